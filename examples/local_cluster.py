"""The jobs of a jobs file over several GPUs of one machine, under the scheduler: `python examples/local_cluster.py JOBS.YAML cuda 0 1`

`cpu 0 1` takes two one-thread workers instead of GPUs. Jobs arrive ten seconds apart, share a GPU while each one's steps take at most
twice what they take alone, and leave their adapters in OUTPUT_DIR/jobs. `tlora simulate --trace OUTPUT_DIR/events.jsonl` replays it.
After a stop the same command goes on with both the jobs and that log.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import Literal

from tlora.cluster.controller import run
from tlora.cluster.event_log import EventLog
from tlora.cluster.local import LocalBackend, LocalMachine, submit_all
from tlora.cluster.reconciler import LocalJob
from tlora.costs.hardware import cost_model
from tlora.jobs_file.read import read_jobs_file
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.protocol import JobSubmitted
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.settings import Settings

BASE = "qwen3-0.6b"  # whose measured speeds the scheduler goes by: who may share depends little on their scale


def main(jobs_file: str, device: str, *gpus: str, apart_seconds: float = 10.0) -> Path:
    order = read_jobs_file(jobs_file)
    out = Path(order.output_dir)
    jobs, arrivals = {}, []
    for number, (name, found) in enumerate(profile_jobs(order).items()):
        if not isinstance(found, ProfiledJob):
            raise SystemExit(f"{name}: {found}")
        spec = next(job for job in order.jobs if job.name == name)
        jobs[name] = LocalJob(spec, found.train_set, found.eval_set)
        arrivals.append((number * apart_seconds, JobSubmitted(name, BASE, 1, found.profile, max_slowdown=2.0)))
    place: Literal["cuda", "cpu"] = "cuda" if device == "cuda" else "cpu"
    machine = LocalMachine(
        tuple(map(int, gpus)), place, {BASE: order.base_model}, out, order.deterministic, dtype=order.dtype,
        base_precision=order.base_precision, recompute=order.recompute, memory_limit=order.memory_limit, report_to=tuple(order.report_to),
    )  # fmt: skip
    scheduler = Scheduler(residual_capacity(Settings(elastic=False)), cost_model())
    out.mkdir(parents=True, exist_ok=True)
    with LocalBackend(machine) as backend, closing(EventLog(out / "events.jsonl")) as log:
        submit_all(backend, jobs, arrivals)

        def note(seconds: float, item: object) -> None:
            log.write(seconds, item)
            print(f"{seconds:7.1f} s  {item}")  # noqa: T201

        run(scheduler, backend, note)
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
