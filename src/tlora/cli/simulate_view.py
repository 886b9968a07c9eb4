"""The output of `tlora simulate`: progress, a table of the policies, a table of a sweep, and the constants that were not measured."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from tlora.cli.terminal import open_table, print_table, printable, shows_live
from tlora.shape.hardware import extrapolated_fields
from tlora.sim.run import reference_of
from tlora.sim.sweep import setting_cells
from tlora.wording.metrics import GROUPS, TIMES, decomposition_text, metric_text
from tlora.wording.numbers import DASH, duration_text, quantity

if TYPE_CHECKING:
    from tlora.shape.cost import BaseConstants
    from tlora.sim.outputs import MetricRow
    from tlora.sim.scenario import Scenario
    from tlora.sim.sweep import SweepRow, TaskProgress

LINE_SECONDS = 10.0  # between two plain lines
SWEEP_LINES = 60  # of a sweep's table; the file has all
_ROOMY = 120  # columns of a terminal that shows all metrics
_NARROW = ("mean_jct_seconds", "p99_jct_seconds", "mean_jct_over_bound", "windows_beyond_share", "useful_utilisation")
_WIDE = (
    *("mean_jct_seconds", "median_jct_seconds", "p90_jct_seconds", "p99_jct_seconds", "mean_jct_over_bound", "queueing_share"),
    *("slowdown_p99", "windows_beyond_share", "missing_jobs_share", "late_jobs_share", "regroupings_per_job", "useful_utilisation"),
    *("allocated_utilisation", "shared_gpu_share", "tokens_per_second", "steady_tokens_per_second"),
)
_EXPLAINED = (
    *("mean_jct_over_bound", "windows_beyond_share", "missing_jobs_share", "late_jobs_share"),
    *("useful_utilisation", "shared_gpu_share"),
)
_HEADS = {"p90_jct_seconds": "p90", "allocated_utilisation": "allocated", "windows_beyond_share": "beyond"}


def label(policy: str, kernels: str) -> str:
    """As written after --policy."""
    return policy if kernels == "tlora" else f"{policy}/{kernels}"


def point_name(scenario: Scenario, axes: Sequence[str]) -> str:
    """The name of a running simulation: its policy and its values on the axes."""
    cells = setting_cells(scenario, "")
    return " ".join([label(scenario.policy, scenario.kernels), *(f"{axis} {_value_text(cells[axis])}" for axis in axes)])


@contextmanager
def progress_shown(console: Console | None, names: Sequence[str]) -> Iterator[Callable[[TaskProgress], None]]:
    """A bar in a terminal, a line every few seconds elsewhere, nothing without a console. `names` are those of the tasks."""
    if console is None:
        yield lambda _: None
    elif not shows_live(console):
        yield _plain_lines(console, names)
    else:
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        with Progress(BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), text, console=console, transient=True) as progress:
            task, began, kept = progress.add_task("", total=len(names)), time.monotonic(), -1

            def tell(standing: TaskProgress) -> None:
                nonlocal kept
                kept = standing.done if kept < 0 else kept
                left = ""
                if simulated := standing.done - kept:
                    seconds = (time.monotonic() - began) / simulated * (standing.total - standing.done)
                    left = f"about {duration_text(seconds)} left: " if seconds else ""
                running = ", ".join(names[number] for number in standing.running)
                progress.update(task, completed=standing.done, description=left + running, refresh=True)

            yield tell


def _plain_lines(console: Console, names: Sequence[str]) -> Callable[[TaskProgress], None]:
    began = last = time.monotonic()

    def tell(standing: TaskProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS and standing.running:
            last = now
            running = ", ".join(names[number] for number in standing.running)
            console.print(f"[{duration_text(now - began)}] {standing.done} of {standing.total} simulated; now {running}", soft_wrap=True)

    return tell


def print_policies(console: Console, rows: Sequence[MetricRow], seeds: Sequence[int]) -> None:
    """A line for each policy; then the meaning of its columns, and the jobs that are not counted."""
    metrics = {metric.key: metric for group in GROUPS.values() for metric in group}
    shown = [metrics[key] for key in (_WIDE if console.width >= _ROOMY else _NARROW)]
    heads = [_HEADS.get(metric.key) or metric.short or metric.label for metric in shown]
    table = _table(["policy", heads[0], "gain", *heads[1:]])
    for row in rows:
        first, *others = (metric_text(metric.kind, _number(row[metric.key])) for metric in shown)
        table.add_row(_name(row), first, _gain_text(row), *others)
    print_table(console, table)
    reference = _reference(rows)
    spread = f", mean of the seeds {', '.join(map(str, seeds))} (lowest to highest)" if len(seeds) > 1 else ""
    console.print(f"gain: mean JCT of {reference} over that of the policy{spread}", style="dim", soft_wrap=True)
    if text := decomposition_text({f"{row['policy']}/{row['kernels']}": _number(row["gain"]) for row in rows}):
        console.print(f"gain of residual_capacity: {text}", soft_wrap=True)
    for metric in shown:
        if metric.key in _EXPLAINED:
            head = heads[shown.index(metric)]
            console.print(f"{head}: {metric.meaning}", style="dim", soft_wrap=True)
    for kernels, row in {str(row["kernels"]): row for row in rows}.items():
        mean_jct, makespan = (duration_text(_number(row[f"{name}_bound_seconds"])) for name in ("mean_jct", "makespan"))
        console.print(f"lower bounds with the kernels {kernels}: mean JCT {mean_jct}, makespan {makespan}", style="dim", soft_wrap=True)
        most, cheapest = (metric_text("rate", _number(row[f"{name}tokens_bound_per_second"])) for name in ("", "cheapest_"))
        bounds = f"{most} tokens/s for all the work, {cheapest} for its cheapest 55 %"
        console.print(f"upper bounds with them, within the jobs' bounds: {bounds}", style="dim", soft_wrap=True)
    ended = [f"{_number(rows[0][f'jobs_{state}']):,.0f} {state}" for state in ("cancelled", "failed") if _number(rows[0][f"jobs_{state}"])]
    if ended:
        counted = f"completion times are of the {_number(rows[0]['jobs_done']):,.0f} that are done"
        console.print(f"as in the trace, jobs are {' and '.join(ended)}; {counted}", style="dim", soft_wrap=True)
    for row in rows:
        counts = {state: round(_number(row[f"jobs_{state}"])) for state in ("rejected", "unfinished")}
        left = [quantity(count, f"{state} job") for state, count in counts.items() if count]
        if left:
            console.print(f"{_name(row)}: without {' and '.join(left)}", style="yellow", soft_wrap=True)


def print_sweep(console: Console, rows: Sequence[SweepRow], axes: Sequence[str]) -> None:
    """A line for each point: the gain of each policy over the reference, the mean over the seeds."""
    reference = _reference(rows)
    others = [name for name in dict.fromkeys(_name(row) for row in rows) if name != reference]
    seconds: defaultdict[tuple[str, ...], dict[tuple[str, object], float]] = defaultdict(dict)
    for row in rows:
        point = tuple(_value_text(row[axis]) for axis in axes)
        seconds[point][_name(row), row["seed"]] = _number(row["mean_jct_seconds"])
    table = _table([*axes, f"{reference}: mean JCT", *others])
    for point, by_run in list(seconds.items())[:SWEEP_LINES]:
        seeds = list(dict.fromkeys(seed for _, seed in by_run))
        before = [by_run[reference, seed] for seed in seeds]
        gains = ([first / by_run[name, seed] for first, seed in zip(before, seeds, strict=True)] for name in others)
        table.add_row(*point, duration_text(_mean(before)), *(_times(_mean(gain)) for gain in gains))
    print_table(console, table)
    if any(row.get("closed") for row in rows):
        _print_throughput(console, rows, axes)
    if len(seconds) > SWEEP_LINES:
        console.print(f"... and {len(seconds) - SWEEP_LINES:,} points more", style="dim")
    if others:
        seeds_told = list(dict.fromkeys(_value_text(row["seed"]) for row in rows))
        of_seeds = f"mean of the seeds {', '.join(seeds_told)}" if len(seeds_told) > 1 else f"seed {seeds_told[0]}"
        caption = f"{printable(str(rows[0]['trace']))}: mean JCT of {reference} over that of each policy, {of_seeds}"
        console.print(caption, style="dim", soft_wrap=True)
    _warn_of_uncounted(console, rows, axes)


def _print_throughput(console: Console, rows: Sequence[SweepRow], axes: Sequence[str]) -> None:
    """Steady tokens/s of each policy at each point, the mean over the seeds, and the highest of their upper bounds."""
    most: dict[tuple[str, ...], float] = {}
    rates_at: defaultdict[tuple[str, ...], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        point = tuple(_value_text(row[axis]) for axis in axes)
        rates_at[point][_name(row)].append(_number(row["steady_tokens_per_second"]))
        most[point] = max(most.get(point, 0.0), _number(row.get("tokens_bound_per_second")))
    names = list(dict.fromkeys(_name(row) for row in rows))
    table = _table([*axes, *(f"{name}: tokens/s" for name in names), "upper bound"])
    for point, rates in list(rates_at.items())[:SWEEP_LINES]:
        table.add_row(*point, *(metric_text("rate", _mean(rates[name])) for name in names), metric_text("rate", most[point]))
    print_table(console, table)
    caption = "tokens/s from 5 to 60 % of the total work, all jobs submitted at once; upper bound: of all the work within the jobs' bounds"
    console.print(caption, style="dim", soft_wrap=True)


def _warn_of_uncounted(console: Console, rows: Sequence[SweepRow], axes: Sequence[str]) -> None:
    """The jobs that no load or no completion time counts, and where."""
    for state, effect in (("rejected", "load counts the others only"), ("unknown", "no completion time counts them")):
        counts = {
            ", ".join(f"{axis} {_value_text(row[axis])}" for axis in axes) or "everywhere": _number(row[f"jobs_{state}"])
            for row in rows
            if _number(row.get(f"jobs_{state}", 0.0)) > 0
        }
        if counts:
            where = "; ".join(f"{point}: {count:,.0f}" for point, count in list(counts.items())[:SWEEP_LINES])
            console.print(f"warning: {state} jobs ({effect}): {where}", style="yellow", soft_wrap=True)


def print_origin(console: Console, constants: Mapping[str, Mapping[str, BaseConstants]]) -> None:
    """The extrapolated constants, and how to see how much depends on one."""
    kernels_of: defaultdict[str, list[str]] = defaultdict(list)
    for kernels, bases in constants.items():
        for name in dict.fromkeys(name for base in bases.values() for name in extrapolated_fields(base)):
            kernels_of[name].append(kernels)
    if kernels_of:
        listed = ", ".join(f"{name} ({', '.join(kernels)})" for name, kernels in kernels_of.items())
        console.print(f"extrapolated, not measured: {listed}", style="yellow", soft_wrap=True)
        first = next(iter(kernels_of))
        console.print(f"how much depends on one: --sweep scale.{first}=0.7:1:1.3 --out FILE.csv", style="dim", soft_wrap=True)


def title(scenario: Scenario, count: int, load: float, seeds: Sequence[int]) -> str:
    """What was simulated, in one line."""
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    nodes = f"{quantity(scenario.nodes, 'node')} of {scenario.gpus_per_node}"
    cluster = f"{quantity(scenario.num_gpus, 'GPU')} ({nodes}, {scenario.gpu})"
    arrivals = f"load {load:.3g} " + ("as recorded" if scenario.load is None else "by compressed arrivals")
    return printable(
        f"{quantity(count, 'job')} of {scenario.trace} on {cluster}, {'all at once' if scenario.closed else arrivals}, {which}"
    )


def _table(heads: Sequence[str]) -> Table:
    table = open_table()
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(Text(head), justify="right", no_wrap=True)
    return table


def _name(row: Mapping[str, object]) -> str:
    return label(str(row["policy"]), str(row["kernels"]))


def _reference(rows: Sequence[Mapping[str, object]]) -> str:
    return label(*reference_of([(str(row["policy"]), str(row["kernels"])) for row in rows]))


def _gain_text(row: MetricRow) -> str:
    least, most = _number(row["least_gain"]), _number(row["most_gain"])
    text = _times(_number(row["gain"]))
    return text if least == most or math.isnan(least) else f"{text} ({least:.2f}-{most:.2f})"


def _times(value: float) -> str:
    return f"{value:.2f}{TIMES}" if math.isfinite(value) else DASH


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _value_text(value: object) -> str:
    return DASH if value is None else f"{value:g}" if isinstance(value, int | float) else printable(str(value))
