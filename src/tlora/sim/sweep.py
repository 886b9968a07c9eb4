"""A sweep: scenarios simulated on all cores, a row of numbers for each in a table on disk, from which a stopped sweep goes on.

What the scenarios are is `grid.py`'s. Rows hold no wall time, so that the same sweep gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from tlora.errors import ConfigError, DataError
from tlora.sim.grid import SCALE
from tlora.sim.processes import Standing, map_in_processes
from tlora.sim.result_files import held, write_result
from tlora.sim.scenario import CONSTANTS, Scenario, inputs_digest

Cell = float | str | None
SweepRow = dict[str, Cell]

FORMATS = (".csv", ".parquet")
_GO_ON = "Free space or change its mode there, and run the same command again: it goes on from the rows that it has"
_TEXTS = ("trace", "inputs", "gpu", "policy", "kernels")


def run_sweep(
    scenarios: Sequence[Scenario],
    path: Path,
    measure: Callable[[Scenario], Mapping[str, float]],
    watch: Callable[[Standing], None],
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

        def watch_all(standing: Standing) -> None:
            watch(Standing(len(keys), kept + standing.done, tuple(todo[number] for number in standing.running)))

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
        "closed": float(scenario.closed),
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
