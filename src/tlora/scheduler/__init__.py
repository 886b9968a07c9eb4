"""Which jobs train together on which GPUs: events in, actions out. No clock, no threads, no sockets, no tensors."""
