"""What it costs a group that a job joins, is saved, leaves and ends: the job itself, and its neighbour.

    python -m bench.joins [--shape qwen3-1.7b | --base DIRECTORY] [--rank 16] [--tokens 1024] [--device cuda] [--json FILE]

One real worker, in this process, trains a job that stays; visitors come and go beside it. A neighbour's wait is the longest time between
two of its optimizer steps meanwhile, less the usual one with such company. On a GPU that holds the first micro-batches of a new shape.
"""

from __future__ import annotations

import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.fidelity_work import ENDLESS, SIZES, Order, Work, make_work
from bench.worker_options import find_base, make_parser, write_result
from tlora.engine import trainer as trainer_room
from tlora.engine.messages import Leave, SetPlan, Stop
from tlora.engine.trainer import Trainer
from tlora.worker_protocol import Failed, Finished, Join, Joined, Left, Load, Report, Stepped

VISITOR_STEPS, SAVED_AT, LEAVES_AT = 60, 40, 20  # of each visitor: in all, before it is saved, and before it goes out and in again
SETTLED = 5  # steps after an event that may still be slower for it
COMPARED_STEPS = 8  # of the neighbour, that tell its usual step before an event


@dataclass(frozen=True)
class Event:
    """Something that happened to a visitor, in seconds of the run's clock: asked for, and through."""

    kind: str
    asked: float
    through: float


@dataclass(frozen=True)
class Cost:
    """Medians over the visitors, in seconds."""

    own_seconds: float
    neighbour_seconds: float


class _Visit:
    """Tells the worker who comes and goes, by what it reports, and notes when. Between two events the neighbour takes some steps."""

    def __init__(self, work: Work, visitors: Sequence[str], tokens: int) -> None:
        self._work, self._left = work, list(visitors)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.events: list[Event] = []
        self.steps: list[float] = []  # when the neighbour's were through
        self._asked, self._came_back = 0.0, False
        self._stepped = (0.0, 0.0)  # when the visitor's last two were through
        self._due: tuple[int, Any] | None = None  # steps of the neighbour, and what it is told then
        for command in (SetPlan(tokens), self._join("stays")):
            self.inbox.put(command)
        self._next()

    def _join(self, name: str) -> Join:
        job = self._work.jobs[name]
        spec = job.spec if name == "stays" else job.spec.model_copy(update={"save_steps": SAVED_AT})
        return Join(spec, job.train_set, job.eval_set)

    def _tell(self, command: Any) -> None:
        self._asked = time.monotonic()
        self.inbox.put(command)

    def _tell_later(self, command: Any) -> None:
        self._due = (len(self.steps) + 3 * COMPARED_STEPS, command)

    def _next(self) -> None:
        self._came_back = False
        self._tell_later(self._join(self._left.pop(0)) if self._left else Stop())

    def hear(self, report: Report) -> None:
        now = time.monotonic()
        match report:
            case Stepped("stays"):
                self.steps.append(now)
                if self._due is not None and len(self.steps) == self._due[0]:
                    self._tell(self._due[1])
            case Stepped(name, steps):
                self._stepped = (self._stepped[1], now)
                if steps == SAVED_AT:
                    self.events.append(Event("checkpoint", self._stepped[0], now))
                elif steps == LEAVES_AT and not self._came_back:
                    self._tell(Leave(name))
            case Joined(name) if name != "stays":
                self.events.append(Event("join from a checkpoint" if self._came_back else "join", self._asked, now))
            case Left(name) if name != "stays":
                self.events.append(Event("leave", self._asked, now))
                self._came_back = True
                self._tell_later(self._join(name))
            case Finished():
                self.events.append(Event("end", self._stepped[0], now))
                self._next()
            case Failed(name, reason):
                raise RuntimeError(f"{name}: {reason}")
            case _:
                pass

    def neighbour_seconds(self, event: Event) -> float:
        """The longest step of the neighbour that lies in the event or shortly after it, less its usual one with such company."""
        gaps = [after - before for before, after in zip(self.steps, self.steps[1:], strict=False)]
        first = next(at for at, when in enumerate(self.steps) if when >= event.asked)
        last = next(at for at, when in enumerate(self.steps) if when >= event.through)
        during = gaps[max(0, first - 1) : last + SETTLED]
        after, before = last + SETTLED, max(0, first - 1)
        joins = event.kind.startswith("join")
        usual = gaps[after : after + COMPARED_STEPS] if joins else gaps[max(0, before - COMPARED_STEPS) : before]
        return max(during) - statistics.median(usual)


def measure(base: Path, device: str, rank: int, tokens: int, visitors: int, directory: Path) -> dict[str, Cost]:
    """Event -> its cost."""
    sizes = replace(SIZES[device], sigma=0.0)
    samples = max(1, tokens // 256)
    names = [f"visitor{number}" for number in range(visitors)]
    orders = [Order("stays", tokens // samples, samples, rank, ENDLESS)]
    orders += [Order(name, tokens // samples, samples, rank, VISITOR_STEPS) for name in names]
    work = make_work(orders, sizes, base, directory / "data", seed=0)
    visit = _Visit(work, names, 4 * tokens)
    trainer_room.REPORT_SECONDS = 0.0
    load = Load(str(base), str(directory / "jobs"), device, time.time())
    hear: Callable[[Report], None] = visit.hear
    Trainer(load, visit.inbox, hear).go_on()
    kinds = list(dict.fromkeys(event.kind for event in visit.events))
    return {
        kind: Cost(
            statistics.median(event.through - event.asked for event in visit.events if event.kind == kind),
            statistics.median(visit.neighbour_seconds(event) for event in visit.events if event.kind == kind),
        )
        for kind in kinds
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="of an optimizer step of each")
    parser.add_argument("--visitors", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["TLORA_CACHE"] = str(Path(name) / "cache")
        found = measure(find_base(args, Path(name)), args.device, args.rank, args.tokens, args.visitors, Path(name))
    for kind, cost in found.items():
        print(f"{kind:24} the job {cost.own_seconds:7.3f} s   its neighbour {cost.neighbour_seconds:+7.3f} s")
    write_result(args, {"costs": {kind: asdict(cost) for kind, cost in found.items()}})


if __name__ == "__main__":
    main()
