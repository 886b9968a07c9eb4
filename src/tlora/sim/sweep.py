"""A sweep: scenarios simulated on all cores, a row of numbers for each in a table on disk, from which a stopped sweep goes on.

`scenarios_of` says which there are. Rows hold no wall time, so that the same sweep gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from tlora.errors import CapacityError, ConfigError, DataError
from tlora.jobs_file.spelling import suggest
from tlora.processes import LostProcessError, Pool, num_cores, open_pool
from tlora.sim.arrivals import LOADS
from tlora.sim.conditions import MOST_HALF_LIFE_SECONDS
from tlora.sim.outputs import held, write_result
from tlora.sim.scenario import CONSTANTS, MOST_GPUS, Scenario, contender, inputs_digest, num_nodes

Value = float | int | str
Axes = Mapping[str, tuple[Value, ...]]

SCALE = "scale."
_NAMED = ("load", "delta", "gpus", "seed", "policy", "kappa", "warm_start_seconds", "usage_half_life_seconds")
KEYS = (*_NAMED, *(SCALE + name for name in CONSTANTS))
RANGE_POINTS = 5  # of `a..b` without a number
MOST_POINTS = 100_000  # of a sweep: all of them are held at once
_FACTORS = (0.001, 1000.0)
_BOUNDS = {
    "load": LOADS,
    "delta": (1, math.inf),
    "gpus": (1, MOST_GPUS),
    "seed": (0, 10**15 - 1),
    "warm_start_seconds": (0, 3600),
    "usage_half_life_seconds": (1, MOST_HALF_LIFE_SECONDS),
}  # the others are factors
_RANGE = re.compile(r"(?P<first>.+?)\.\.(?P<last>[^/]+)(?:/(?P<count>\d+))?")
_WHOLE = ("gpus", "seed")


def read_grid(text: str) -> dict[str, tuple[Value, ...]]:
    """The values of each axis. `key=a:b:c` are these three, `key=a..b/n` are n from a to b in equal steps (5 without /n; every whole number
    for seed). Raises ConfigError for a key or value that there is not.
    """
    axes: dict[str, tuple[Value, ...]] = {}
    for part in text.split(","):
        key, equals, values = (piece.strip() for piece in part.partition("="))
        if not equals or not values:
            raise ConfigError(
                f"sweep {part.strip()!r}: an axis is written key=value:value:... or key=first..last/points, such as load=0.5..1.1/7"
            )
        if key not in KEYS:
            raise ConfigError(f"sweep {key!r}: there is no such axis; {suggest(key, KEYS)}")
        if key in axes:
            raise ConfigError(f"sweep {key!r}: the axis is there twice; write all of its values behind one {key}=")
        axes[key] = tuple(dict.fromkeys(value for piece in values.split(":") for value in _values(key, piece.strip())))
    return axes


def scenarios_of(axes: Axes, plain: Scenario, seeds: Sequence[int], policies: Sequence[str]) -> list[Scenario]:
    """One scenario for each combination of the axes, in the order of the axes, then seeds, then policies, where these are no axes.

    `policies` are as one writes them, "fifo/peft". What no axis names is as in `plain`. Raises ConfigError for too many.
    """
    grid: dict[str, Sequence[Value]] = {**axes}
    grid.setdefault("seed", seeds)
    grid["policy"] = grid.pop("policy", policies)  # last: those of one scene stand together
    if (count := math.prod(map(len, grid.values()))) > MOST_POINTS:
        raise ConfigError(f"these are {count:,} simulations, and at most {MOST_POINTS:,} go into one command. Give fewer values")
    points = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    return list(dict.fromkeys(_scenario(plain, point) for point in points))


def _scenario(plain: Scenario, point: Mapping[str, Value]) -> Scenario:
    scenario = plain
    for key, value in point.items():
        if key == "policy":
            name, kernels = contender(str(value), plain.kernels)
            scenario = replace(scenario, policy=name, kernels=kernels)
        elif key == "gpus":
            scenario = replace(scenario, nodes=num_nodes(int(value), plain.gpus_per_node))
        elif key == "warm_start_seconds":
            moves = replace(scenario.conditions.moves, warm_start_seconds=float(value))
            scenario = replace(scenario, conditions=replace(scenario.conditions, moves=moves))
        elif key == "usage_half_life_seconds":
            scenario = replace(scenario, conditions=replace(scenario.conditions, usage_half_life_seconds=float(value)))
        elif key.startswith(SCALE):
            others = tuple(pair for pair in scenario.scale if pair[0] != key.removeprefix(SCALE))
            scenario = replace(scenario, scale=(*others, (key.removeprefix(SCALE), float(value))))
        else:
            scenario = replace(scenario, **{key: value})
    return scenario


def _values(key: str, text: str) -> list[Value]:
    if key == "policy":
        name, kernels = contender(text, "")
        return [f"{name}/{kernels}" if kernels else name]
    matched = _RANGE.fullmatch(text)
    if matched is None:
        return [_checked(key, _number(key, text), text)]
    first, last = _number(key, matched["first"]), _number(key, matched["last"])
    asked = float(matched["count"] or (last - first + 1 if key == "seed" else RANGE_POINTS))
    if not (first < last < math.inf and 2 <= asked <= MOST_POINTS):
        raise ConfigError(
            f"sweep {key}={text}: a range goes from a number up to a larger one in 2 points or more, such as 0.5..1.1/7, "
            f"and has at most {MOST_POINTS:,}"
        )
    count = int(asked)
    points = (round(first + (last - first) * at / (count - 1), 10) for at in range(count))
    return [_checked(key, point, text) for point in points]


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"sweep {key}={text}: {text!r} is no number") from None


def _checked(key: str, value: float, text: str) -> Value:
    least, most = _BOUNDS.get(key, _FACTORS)
    if not least <= value <= most:
        raise ConfigError(f"sweep {key}={text}: {value:g} must be from {least:,.15g} to {most:,.15g}; choose other points")
    if key in _WHOLE and value != int(value):
        raise ConfigError(f"sweep {key}={text}: {value:g} must be a whole number; choose other points")
    return int(value) if key in _WHOLE else value


_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """How many tasks there are and are done, and the numbers of those that run."""

    total: int
    done: int
    running: tuple[int, ...]


def map_in_processes(function: Callable[[_T], _R], tasks: Sequence[_T], watch: Callable[[TaskProgress], None]) -> Generator[tuple[int, _R]]:
    """(number of the task, its result) in the order in which they end; `function` must be one of a module.

    A single task, or a single core, needs no second process. When the iterator is closed early, running tasks are ended.
    Raises what `function` raised, and CapacityError when a process was killed.
    """
    workers = min(num_cores(), len(tasks))
    if workers <= 1:
        for number, task in enumerate(tasks):
            watch(TaskProgress(len(tasks), number, (number,)))
            yield number, function(task)
        watch(TaskProgress(len(tasks), len(tasks), ()))
        return
    try:
        with open_pool(workers, "spawn") as pool:
            yield from _results(pool, function, tasks, watch)
    except LostProcessError:
        raise CapacityError(
            f"one of {workers} processes that simulate was killed, most likely for want of memory. Simulate fewer jobs or GPUs, or let it "
            "have fewer cores (taskset -c 0 tlora ...)"
        ) from None


def _results(
    pool: Pool, function: Callable[[_T], _R], tasks: Sequence[_T], watch: Callable[[TaskProgress], None]
) -> Generator[tuple[int, _R]]:
    """Hands out no more tasks than there are workers, so that each that is handed out runs."""
    running: dict[Future[_R], int] = {}
    waiting = iter(range(len(tasks)))
    for done in range(len(tasks)):
        while len(running) < num_cores() and (number := next(waiting, None)) is not None:
            running[pool.submit(function, tasks[number])] = number
        watch(TaskProgress(len(tasks), done, tuple(running.values())))
        ended = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
        yield running.pop(ended), ended.result()
    watch(TaskProgress(len(tasks), len(tasks), ()))


Cell = float | str | None
SweepRow = dict[str, Cell]

FORMATS = (".csv", ".parquet")
_GO_ON = "Free space or change its mode there, and run the same command again: it goes on from the rows that it has"
_TEXTS = ("trace", "inputs", "gpu", "layout", "policy", "kernels")


def run_sweep(
    scenarios: Sequence[Scenario],
    path: Path,
    measure: Callable[[Scenario], Mapping[str, float]],
    watch: Callable[[TaskProgress], None],
) -> list[SweepRow]:
    """The row of each scenario, in their order: its settings, and what `measure` gives, a function of a module.

    After each simulation the whole table is put in place at once; points that `path` has are not simulated again, and its rows of
    other points stay. `watch` hears of all points, with their numbers. Raises ConfigError for a file of another kind, or that another
    sweep is writing, DataError for a table that no sweep has written.
    """
    settings = [setting_cells(scenario, digest) for scenario, digest in zip(scenarios, _digests(scenarios), strict=True)]
    keys = [tuple(cells.values()) for cells in settings]
    columns = tuple(settings[0])
    with held(path):
        row_by_key = {tuple(row[column] for column in columns): row for row in read_table(path, columns)}
        others = [row for key, row in row_by_key.items() if key not in set(keys)]
        todo = [number for number, key in enumerate(keys) if key not in row_by_key]
        kept = len(keys) - len(todo)

        def watch_all(standing: TaskProgress) -> None:
            watch(TaskProgress(len(keys), kept + standing.done, tuple(todo[number] for number in standing.running)))

        with closing(map_in_processes(measure, [scenarios[number] for number in todo], watch_all)) as results:
            for at, numbers in results:
                number = todo[at]
                finite = {name: None if math.isnan(value) else value for name, value in numbers.items()}
                row_by_key[keys[number]] = settings[number] | finite
                write_table(path, [*others, *(row_by_key[key] for key in keys if key in row_by_key)])
        return [row_by_key[key] for key in keys]


def setting_cells(scenario: Scenario, inputs: str) -> SweepRow:
    """The columns that tell one point from another. None: natural load, all jobs, each job's own bound, measured kappa, no failures."""
    scale, conditions = dict(scenario.scale), scenario.conditions
    return {
        "trace": scenario.trace,
        "inputs": inputs,
        "jobs": scenario.jobs,
        "paper": float(scenario.paper),
        "mixed": float(scenario.mixed),
        "closed": float(scenario.closed),
        "layout": scenario.layout,
        "memory_limit": scenario.memory_limit,
        "gpu": scenario.gpu,
        "gpus": scenario.num_gpus,
        "gpus_per_node": scenario.gpus_per_node,
        "load": scenario.load,
        "delta": scenario.delta,
        "kappa": scenario.kappa,
        **{SCALE + name: scale.get(name, 1.0) for name in CONSTANTS},
        "speed_error": conditions.speed_error,
        "length_error": conditions.length_error,
        "drift": conditions.drift,
        "delay": conditions.delay,
        "mtbf_hours": conditions.mtbf_hours,
        "usage_half_life_seconds": conditions.usage_half_life_seconds,
        "warm_start_seconds": conditions.moves.warm_start_seconds,
        "seed": scenario.seed,
        "policy": scenario.policy,
        "kernels": scenario.kernels,
    }


def read_table(path: Path, columns: Sequence[str]) -> list[SweepRow]:
    """The rows of an earlier sweep, none where there is no file. Every one must have `columns`."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"out {path}: a sweep is written as {' or '.join(FORMATS)}. Give the file one of these endings")
    if not path.exists():
        return []
    try:
        return _read_csv(path, columns) if path.suffix == ".csv" else _read_parquet(path, columns)
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's are among these
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as the table of a sweep ({error}). Give another file, or take this one away") from None


def write_table(path: Path, rows: Sequence[SweepRow]) -> None:
    """All rows, with the columns of the first. At every moment the file holds the old or the new ones."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    write_result(path, _csv_text(columns, rows) if path.suffix == ".csv" else _parquet_bytes(columns, rows), _GO_ON)


def _digests(scenarios: Sequence[Scenario]) -> Iterator[str]:
    known: dict[tuple[str, str], str] = {}
    for scenario in scenarios:
        key = scenario.trace, scenario.gpu
        if key not in known:
            known[key] = inputs_digest(scenario)
        yield known[key]


def _read_csv(path: Path, columns: Sequence[str]) -> list[SweepRow]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        heads = next(reader, None)
        if heads is None:  # an empty file
            return []
        _check_heads(path, heads, columns)
        return [{head: _cell(head, text) for head, text in zip(heads, texts, strict=True)} for texts in reader]


def _cell(head: str, text: str) -> Cell:
    return text if head in _TEXTS else float(text) if text else None


def _read_parquet(path: Path, columns: Sequence[str]) -> list[SweepRow]:
    parquet: Any = import_module("pyarrow.parquet")  # slow to load, and without types
    table: Any = parquet.read_table(path)
    _check_heads(path, table.column_names, columns)
    return cast("list[SweepRow]", table.to_pylist())


def _check_heads(path: Path, heads: Sequence[str], columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in heads]
    if missing:
        raise DataError(
            f"{path} is not the table of a sweep, or is that of another version: it has no column {missing[0]!r}. Give another file"
        )


def _csv_text(columns: Sequence[str], rows: Sequence[SweepRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell_text(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def _cell_text(value: Cell) -> str:
    """As it is read again: a number keeps all of its digits, whole ones without a point."""
    if value is None or isinstance(value, str):
        return value or ""
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))


def _parquet_bytes(columns: Sequence[str], rows: Sequence[SweepRow]) -> bytes:
    pyarrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    schema: Any = pyarrow.schema([(column, pyarrow.string() if column in _TEXTS else pyarrow.float64()) for column in columns])
    plain: list[dict[str, Any]] = [
        {column: float(value) if isinstance(value := row.get(column), int | float) else value for column in columns} for row in rows
    ]
    sink: Any = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(plain, schema), sink)
    return sink.getvalue().to_pybytes()
