"""What share of a device's memory may be planned for. Imports nothing, as the command line asks before it loads any library."""

GPU_SHARE = 0.92  # of a GPU's; the rest is the allocator's
CPU_SHARE = 0.5  # of a CPU's free memory. The rest is for the caches, for others, and for the allocator: glibc keeps freed blocks, and a
# process has been seen to take 1.9 times its live tensors (docs/adr/016-memory-is-counted.md)
