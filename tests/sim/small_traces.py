"""A trace of four jobs that queue on eight GPUs."""

from __future__ import annotations

from pathlib import Path

LINES = (("a", "0", "8", "400"), ("b", "10", "4", "300"), ("c", "20", "4", "5000"), ("d", "1000", "1", "200"))


def write_trace(directory: Path) -> Path:
    """`small.csv`, its jobs a to d of 1 to 8 GPUs."""
    path = directory / "small.csv"
    rows = "".join(f"{name},{submitted},{gpus},{duration},u,v,sft,COMPLETED\n" for name, submitted, gpus, duration in LINES)
    path.write_text("job_id,submit_s,gpus,duration_s,user,vc,type,state\n" + rows)
    return path
