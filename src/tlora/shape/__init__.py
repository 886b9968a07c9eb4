"""One model of bytes and seconds: what a base, its jobs and a device make of each other, corrected by what was measured. Knows no torch.

`check`, placing, the planner of a run, the scheduler, a server's capacity and the simulator ask here. What is counted from a base's own
layers, and so needs these, is `planning/memory.py`'s.
"""
