"""`tlora simulate`: its options and the calls that follow from them. Heavy imports are made when it is called."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlora.cli.terminal import open_console, path_text, printable, say
from tlora.wording.numbers import quantity

if TYPE_CHECKING:
    from rich.console import Console

    from tlora.sim.run import Outcome
    from tlora.sim.scenario import Scenario

POLICIES = "fifo/peft,fifo,backfill,sjf,residual_capacity"
_SEEDS = re.compile(r"\d{1,15}(-\d{1,15})?(,\d{1,15}(-\d{1,15})?)*")
_CLUSTER, _TRUTH, _RESULTS = "Cluster", "What the scheduler cannot predict (by default only the cost of moves)", "Results"
_TRACES = "A CSV file, an event log, or ee9e8c, 6c71a0+b436b2, window_15k, synth_sft."
_POLICIES = (
    "Of fifo, backfill, easy, sjf, srtf, las, memory, tlora, residual_capacity, residual_capacity-no-sharing, residual_capacity-no-growth, "
    "residual_capacity-no-preemption, residual_capacity-order-only; NAME/peft without our kernels' gain, NAME/trl "
    "as TRL packs; decomposition: all that tell where the gain comes from. Gains are over fifo/peft, or else over the first."
)
_SWEEP = (
    "Simulate every combination, such as load=0.5..1.1/7,delta=1.2:2:inf; also gpus, seed, policy, kappa, scale.CONSTANT "
    "(docs/reference/simulator.md)."
)


_Mixed = Annotated[
    bool, typer.Option("--mixed", help="Draw bases of 0.6B to 70B, and jobs as small as recipes have them (--gpu h200-from-128).")
]
_Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs in the whole cluster.", show_default="128", rich_help_panel=_CLUSTER)]
_Nodes = Annotated[str | None, typer.Option(metavar="16x8", help="Nodes x GPUs per node.", show_default="of 8", rich_help_panel=_CLUSTER)]
_Layout = Annotated[
    str, typer.Option(metavar="auto|stages", help="Bases whole on each GPU, or in stages over two or more.", rich_help_panel=_CLUSTER)
]
_MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="24GiB", help="What may be planned for on each GPU.", show_default="of its type", rich_help_panel=_CLUSTER),
]
_Kernels = Annotated[str, typer.Option(metavar="tlora|peft|trl", help="Kernels of policies without a slash.", rich_help_panel=_CLUSTER)]
_UsageHalfLifeSeconds = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Age at which a tenant's GPU time counts half.", rich_help_panel=_CLUSTER),
]
_LengthError = Annotated[float, typer.Option(help="Each job's tokens per step are off by up to this share.", rich_help_panel=_TRUTH)]
_MtbfHours = Annotated[
    float | None, typer.Option(help="Mean time between a node's failures.", show_default="none fails", rich_help_panel=_TRUTH)
]
_CsvDir = Annotated[
    Path | None,
    typer.Option("--csv", metavar="DIR", help="Write metrics.csv and jobs.csv.", show_default=False, rich_help_panel=_RESULTS),
]
_JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the printed table.", show_default=False, rich_help_panel=_RESULTS),
]
_Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts.", show_default=False, rich_help_panel=_RESULTS)]
_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The sweep's rows, .csv or .parquet; rows that are there are not simulated again.",
        show_default=False,
        rich_help_panel=_RESULTS,
    ),
]


def simulate(  # one parameter for each option, as typer has it
    trace: Annotated[str, typer.Option(metavar="FILE|NAME", help=_TRACES)] = "ee9e8c",
    policy: Annotated[str | None, typer.Option(metavar="NAME,...", help=_POLICIES, show_default=POLICIES)] = None,
    load: Annotated[float | None, typer.Option(help="Compress or stretch the arrivals to this load.", show_default="as recorded")] = None,
    closed: Annotated[bool, typer.Option("--closed", help="Submit all jobs at once, to measure throughput.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N jobs.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed for what the trace does not record.", show_default="0")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0-2|0,5", help="Several seeds; prints their means.", show_default=False)] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Draw ranks and batches as tLoRA's paper does.")] = False,
    mixed: _Mixed = False,
    gpus: _Gpus = None,
    nodes: _Nodes = None,
    gpu: Annotated[str, typer.Option(metavar="TYPE", help="A GPU type with measured constants.", rich_help_panel=_CLUSTER)] = "h200",
    layout: _Layout = "auto",
    memory_limit: _MemoryLimit = None,
    kernels: _Kernels = "tlora",
    usage_half_life_seconds: _UsageHalfLifeSeconds = 86_400.0,
    truth_error: Annotated[float, typer.Option(help="Each job's speed is off by up to this share.", rich_help_panel=_TRUTH)] = 0.0,
    length_error: _LengthError = 0.0,
    drift: Annotated[float, typer.Option(help="All speeds swing by this share over a day.", rich_help_panel=_TRUTH)] = 0.0,
    delay: Annotated[float, typer.Option(help="Starts and joins take on average this share longer.", rich_help_panel=_TRUTH)] = 0.0,
    mtbf_hours: _MtbfHours = None,
    csv_dir: _CsvDir = None,
    json_file: _JsonFile = None,
    html: _Html = None,
    sweep: Annotated[str | None, typer.Option(metavar="KEY=A:B,...", help=_SWEEP, show_default=False, rich_help_panel=_RESULTS)] = None,
    out: _Out = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the results only.")] = False,
) -> None:
    """Replay a cluster trace under scheduling policies: the real scheduler, a simulated cluster."""
    if (sweep is None) != (out is None):
        raise typer.BadParameter("--sweep says what to simulate, --out where its rows go; give both or neither")
    if seed is not None and seeds is not None:
        raise typer.BadParameter("--seed and --seeds exclude each other; give one of the two")
    from tlora.sim.conditions import Conditions
    from tlora.sim.outputs import check_results
    from tlora.sim.scenario import Scenario, check_names, layout_named, memory_of

    num_nodes, gpus_per_node = _cluster(gpus, nodes)
    truth = Conditions(speed_error=truth_error, length_error=length_error, drift=drift, delay=delay, mtbf_hours=mtbf_hours)
    conditions = replace(truth, usage_half_life_seconds=usage_half_life_seconds)
    drawn = Scenario(trace, "", kernels, num_nodes, gpus_per_node, gpu, load, jobs, paper=paper, mixed=mixed)
    lying = replace(drawn, layout=layout_named(layout), memory_limit=memory_of(memory_limit))
    plain = replace(lying, closed=closed, conditions=conditions)
    check_names(plain)
    contest = Contest(plain, _policies(POLICIES if policy is None else policy, kernels), _seeds(seed, seeds))
    outputs = Outputs(csv_dir, html, json_file)
    check_results(trace, [*outputs.files(), *([("--out", out)] if out else [])])
    errors = None if quiet else open_console(stderr=True)
    given = {"policy": policy is not None, "seed": (seed, seeds) != (None, None), "load": load is not None, "gpus": gpus is not None}
    if sweep is not None:
        _tell_overruled(sweep, {key for key, is_given in given.items() if is_given}, bool(outputs.files()))
    swept = _sweep(contest, sweep, out, errors) if sweep is not None and out is not None else None
    if swept is None or outputs.files():
        _replay(contest, swept or [], outputs, errors)


def _tell_overruled(sweep: str, given: set[str], also_plain: bool) -> None:
    """Say which options the axes of a sweep replace."""
    from tlora.sim.sweep import read_grid

    for key in read_grid(sweep):
        if key in given:
            where = "the sweep; it holds for the plain replay only" if also_plain else "the sweep, and so is not used"
            option = "--seed or --seeds" if key == "seed" else f"--{key}"
            say(f"warning: {option} is replaced by the axis {key}= in {where}", "yellow", stderr=True)


@dataclass(frozen=True, slots=True)
class Contest:
    """Policies by name, over one scenario with several seeds."""

    plain: Scenario
    policies: list[str]
    seeds: list[int]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where to write the tables and the page."""

    csv_dir: Path | None
    html: Path | None
    json_file: Path | None

    def files(self) -> list[tuple[str, Path]]:
        """Each file with its option, in the order of writing."""
        tables = [("--csv", self.csv_dir / name) for name in ("metrics.csv", "jobs.csv")] if self.csv_dir else []
        return [*tables, *((option, path) for option, path in (("--html", self.html), ("--json", self.json_file)) if path)]


def _sweep(contest: Contest, text: str, out: Path, errors: Console | None) -> list[dict[str, Any]]:
    """Simulate the points that `out` does not have yet, and print the table. Returns the rows for the page."""
    from tlora.cli.simulate_view import point_name, print_sweep, progress_shown
    from tlora.sim.run import gain_rows, sweep_numbers
    from tlora.sim.sweep import read_grid, run_sweep, scenarios_of

    axes = read_grid(text)
    scenarios = scenarios_of(axes, contest.plain, contest.seeds, contest.policies)
    names = [point_name(scenario, [axis for axis in axes if axis != "policy"]) for scenario in scenarios]
    console = open_console()
    try:
        with progress_shown(errors, names) as watch:
            rows = run_sweep(scenarios, out, sweep_numbers, watch)
    except KeyboardInterrupt:
        say(f"stopped; finished simulations are in {path_text(out)}; run the same command to continue", stderr=True)
        raise
    among = [axis for axis in axes if axis not in ("seed", "policy")]
    print_sweep(console, rows, among)
    console.print(f"{quantity(len(rows), 'row')}: {path_text(out)}", soft_wrap=True)
    return gain_rows(rows, [axis for axis in among if axis != "load"])


def _replay(contest: Contest, swept: list[dict[str, Any]], outputs: Outputs, errors: Console | None) -> None:
    """Simulate each policy with each seed, print the results and write the requested files."""
    from tlora.cli.simulate_view import point_name, print_origin, print_policies, progress_shown, title
    from tlora.sim.run import constants_in, run_scenarios, summary
    from tlora.sim.sweep import scenarios_of

    scenarios = scenarios_of({}, contest.plain, contest.seeds, contest.policies)
    with progress_shown(errors, [point_name(scenario, ["seed"]) for scenario in scenarios]) as watch:
        outcomes = run_scenarios(scenarios, watch)
    written = _written(outcomes, swept, outputs)  # before the tables are printed: their reader may close the pipe
    console, first = open_console(), outcomes[0].result
    console.print(title(contest.plain, len(first.jobs), first.load, contest.seeds), style="bold", soft_wrap=True)
    for warning in first.warnings:
        console.print(printable(f"warning: {warning}"), style="yellow", soft_wrap=True)
    print_policies(console, summary(outcomes), contest.seeds)
    print_origin(console, constants_in(outcomes))
    for path in written:
        console.print(f"written: {path_text(path)}", soft_wrap=True)


def _written(outcomes: list[Outcome], swept: list[dict[str, Any]], outputs: Outputs) -> list[Path]:
    """Write the requested files. The page shows the first seed, and the gains of the sweep or else of all seeds."""
    from tlora.sim.outputs import metric_rows, write_document, write_job_csv, write_metrics_csv, write_result
    from tlora.sim.run import WALL_TIMES, document

    paths = [path for _, path in outputs.files()]
    if outputs.csv_dir:
        rows = metric_rows([outcome.result for outcome in outcomes], [outcome.bounds for outcome in outcomes])
        write_metrics_csv(paths[0], [{key: value for key, value in row.items() if key not in WALL_TIMES} for row in rows])
        write_job_csv(paths[1], (outcome.result for outcome in outcomes))
    if outputs.html:
        from tlora.report.simulation_page import simulation_page
        from tlora.sim.run import page_view

        write_result(outputs.html, simulation_page(page_view(outcomes, swept)))
    if outputs.json_file:
        write_document(outputs.json_file, document(outcomes))
    return paths


def _cluster(gpus: int | None, nodes: str | None) -> tuple[int, int]:
    """Nodes x GPUs per node."""
    from tlora.errors import ConfigError
    from tlora.sim.scenario import num_nodes, read_nodes

    if nodes is None:
        asked = 128 if gpus is None else gpus
        per_node = min(asked, 8)
        return num_nodes(asked, per_node), per_node
    count, per_node = read_nodes(nodes)
    if gpus not in (None, count * per_node):
        raise ConfigError(
            f"--gpus {gpus} and --nodes {nodes} disagree: {nodes} are {quantity(count * per_node, 'GPU')}. Give one of the two"
        )
    return count, per_node


def _policies(text: str, kernels: str) -> list[str]:
    """Policies with their kernels, each once."""
    from tlora.sim.scenario import contender
    from tlora.wording.metrics import CHAIN

    chain = [name for name, _ in CHAIN]
    names = [each for name in text.split(",") for each in (chain if name.strip() == "decomposition" else [name.strip()])]
    return list(dict.fromkeys("/".join(contender(name, kernels)) for name in names))


def _seeds(seed: int | None, seeds: str | None) -> list[int]:
    from tlora.errors import ConfigError
    from tlora.sim.sweep import MOST_POINTS

    text = (str(seed or 0) if seeds is None else seeds).replace(" ", "")
    if not _SEEDS.fullmatch(text):
        option = "seed" if seeds is None else "seeds"
        raise ConfigError(f"--{option} {text}: write whole numbers of at most 15 digits, several as a range or a list (0-2 or 0,5)")
    chosen: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not 0 <= int(last or first) - int(first) < MOST_POINTS:
            raise ConfigError(f"--seeds {part}: a range goes up, such as 0-2, and has at most {MOST_POINTS:,} seeds")
        chosen += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(chosen))
