"""The program's version: run directories, model cards and caches name it."""

__version__ = "0.1.0"
