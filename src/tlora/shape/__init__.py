"""One model of bytes and seconds: what a base, its jobs and a device make of each other, corrected by what was measured. Knows no torch.

`check`, placing, the planner of a run, the scheduler, a server's capacity and the simulator ask here. What is counted from a base's own
layers, and so needs these, is `planning/memory.py`'s.
"""

GPU_SHARE = 0.92  # of a GPU's; the rest is the allocator's
CPU_SHARE = 0.5  # of a CPU's free memory. The rest is for the caches, for others, and for the allocator: glibc keeps freed blocks, and a
# process has been seen to take 1.9 times its live tensors (docs/adr/016-memory-is-counted.md)
