"""Arithmetic about hardware: what a micro-batch costs on which GPUs, and what a group of jobs makes of it."""
