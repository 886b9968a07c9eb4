"""The output of `tlora check`: a table, one sample per job with its trained part marked, memory, warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tlora.batching.replicas import part_text
from tlora.cli.terminal import bytes_text, open_table, print_table, printable
from tlora.wording.numbers import MANY_JOBS, by_jobs, count_text, duration_text, names_text, quantity, shortened

if TYPE_CHECKING:
    from tlora.data.report import DataReport
    from tlora.engine.check import JobCheck, RunCheck

_PIECE_CHARS = 600  # of one piece of a sample; a longer one is cut in its middle
_TRAINED = "bold green"
_DATA_COLUMNS = {
    "format": "format",
    "rows": "rows",
    "samples": "samples",
    "tokens": "tokens",
    "trained": "trained_tokens",
    "longest": "longest",
    "cut": "truncated",
    "skipped": "skipped",
}

Columns = dict[str, Callable[["JobCheck"], str]]


def problems_of(check: RunCheck) -> list[str]:
    """Each problem once, with the names of its jobs."""
    own = by_jobs((job.name, problem) for job in check.jobs for problem in job.problems)
    return list(dict.fromkeys([*check.problems, *own]))


def print_check(console: Console, check: RunCheck) -> None:
    """Everything except the problems, which are printed to stderr."""
    if check.jobs:
        _print_tables(console, check)
    colour = console.color_system is not None and not console.no_color
    for jobs in shortened(_alike(check)):
        console.print()
        if isinstance(jobs, int):
            console.print(
                Text(f"… the first samples of {quantity(jobs, 'more group')} of jobs, each with other data or another template"),
                soft_wrap=True,
            )
            continue
        console.print(_sample(jobs, colour), soft_wrap=True)
    console.print()
    if check.kernels:
        console.print(Text(f"kernels: {check.kernels}"), soft_wrap=True)
    if check.gpus:
        _print_gpus(console, check)
    else:
        console.print(Text(_memory(check)), soft_wrap=True)
        if check.streamed:
            console.print(Text(f"base: {check.streamed}"), soft_wrap=True)
        if check.recompute_choices:
            _print_recompute_choices(console, check)
    own = by_jobs((job.name, warning) for job in check.jobs for warning in job.warnings)
    for warning in dict.fromkeys([*check.warnings, *own]):
        console.print(Text(f"warning: {printable(warning)}", style="yellow"), soft_wrap=True)


def _print_gpus(console: Console, check: RunCheck) -> None:
    """What each GPU would do, and why."""
    each = f"{len(check.gpus)} GPUs" if check.device != "cpu" else f"{len(check.gpus)} processes"
    unlike = any(gpu.name for gpu in check.gpus)
    alike = "" if unlike else f", {bytes_text(check.limit_bytes)} for each, {check.token_budget:,} tokens per micro-batch"
    text = f"{each}{alike}: {check.form}"
    console.print(Text(f"{text}; the placement: {check.placement}"), soft_wrap=True)
    table = open_table()
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("begins with", overflow="fold")
    for name in (*(["tokens per micro-batch"] if unlike else []), "predicted peak", "time", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, gpu in enumerate(check.gpus):
        rate = count_text(gpu.tokens_per_second) if gpu.seconds else ""
        begins = [*gpu.jobs, *(part_text(name, gpu.longest_samples.get(name, 0)) for name in gpu.parts)]
        names = Text(printable(names_text(begins) if len(check.jobs) > MANY_JOBS else ", ".join(begins)))
        peak, own = bytes_text(gpu.predicted_bytes), list[str]()
        if unlike:
            peak, own = f"{peak} of {bytes_text(gpu.limit_bytes)}", [f"{gpu.token_budget:,}"]
        table.add_row(f"{number} {gpu.name}".strip(), names, *own, peak, duration_text(gpu.seconds), rate)
    print_table(console, table)
    rough = "roughly" if check.device == "cpu" else check.rated_as
    console.print(
        Text(f"Time and tokens/s follow from the base's size, {rough}; the placement needs only the jobs' ratios."), soft_wrap=True
    )


def _print_recompute_choices(console: Console, check: RunCheck) -> None:
    """Memory against speed, side by side; the speed is compared with the first."""
    table = open_table()
    for name in ("recompute", "layers", "tokens per micro-batch", "predicted peak", f"tokens/s, {check.rated_as}"):
        table.add_column(name, justify="right")
    for choice in check.recompute_choices:
        rate, share = choice.tokens_per_second, choice.tokens_per_second / check.recompute_choices[0].tokens_per_second
        needed = bytes_text(choice.predicted_bytes) + ("" if choice.fits else " (too much)")
        speed = f"{count_text(rate)} ({share:.0%})"
        varies = choice.layers_of_budget != choice.recomputed_layers
        layers = f"{choice.layers_of_budget} to {choice.recomputed_layers}" if varies else str(choice.recomputed_layers)
        table.add_row(str(choice.recompute), layers, f"{choice.token_budget:,}", needed, speed)
    print_table(console, table)


def _print_tables(console: Console, check: RunCheck) -> None:
    """One table; in a narrow terminal two, of the data and of the adapters."""
    data: Columns = {name: _about_data(field) for name, field in _DATA_COLUMNS.items()}
    sizes: Columns = {
        "steps": lambda job: str(job.total_steps or ""),
        "rank": _about_adapter(lambda job: str(job.rank)),
        "parameters": _about_adapter(lambda job: count_text(job.trainable_parameters)),
        "memory": _about_adapter(lambda job: bytes_text(job.memory_bytes)),
    }
    for columns in [data | sizes] if console.width >= 120 else [data, sizes]:
        table = open_table()
        table.add_column("job", overflow="fold")
        for name in columns:
            table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
        for job in shortened(check.jobs, lambda job: bool(job.problems)):
            if isinstance(job, int):
                table.add_row(f"… and {job} more", style="dim")
                continue
            style = "red" if job.problems else ""
            table.add_row(Text(printable(job.name), style=style), *(cell(job) for cell in columns.values()))
            if columns is not sizes:
                for source in job.sources:
                    taken = "" if source.per_epoch is None else f" ({source.per_epoch:,} per epoch)"
                    cells = [count_text(source.samples) if name == "samples" else "" for name in columns]
                    table.add_row(Text(f"  {printable(source.name)}{taken}"), *cells, style="dim")
            if job.eval_data and columns is not sizes:
                shown = [_field(job.eval_data, field) for field in _DATA_COLUMNS.values()]
                table.add_row("  its evaluation", *shown, *[""] * (len(columns) - len(shown)), style="dim")
        print_table(console, table)


def _about_adapter(text: Callable[[JobCheck], str]) -> Callable[[JobCheck], str]:
    """Nothing of an adapter that cannot be placed: its rank is not known, and it takes no memory."""
    return lambda job: text(job) if job.trainable_parameters else ""


def _about_data(field: str) -> Callable[[JobCheck], str]:
    return lambda job: _field(job.data, field) if job.data else ""


def _field(report: DataReport, field: str) -> str:
    value = getattr(report, field)
    return value if isinstance(value, str) else count_text(value)


def _alike(check: RunCheck) -> list[list[JobCheck]]:
    """Jobs that have a sample to show, grouped by equal samples (those of a sweep)."""
    groups: dict[str, list[JobCheck]] = {}
    for job in check.jobs:
        if job.data and job.data.rendered:
            shown = repr((job.data.rendered, [report.template_changes() for report in _reports(job)]))
            groups.setdefault(shown, []).append(job)
    return list(groups.values())


def _reports(job: JobCheck) -> list[DataReport]:
    return [report for report in (job.data, job.eval_data) if report is not None]


def _sample(jobs: list[JobCheck], colour: bool) -> Text:
    """The first sample of the jobs. The trained part is green, or in [[ ]] without colour."""
    job = jobs[0]
    names = printable(names_text([job.name for job in jobs]))
    text = Text()
    text.append(f"{names}: first sample, trained part {'green' if colour else 'in [[ ]]'}\n", style="bold")
    for piece, weight in job.data.rendered if job.data else []:
        shown = printable(_cropped(piece))
        scale = f" (weight {weight:g})" if weight not in (0, 1) else ""
        if not weight:
            text.append(shown, style="dim")
        elif colour:
            text.append(shown, style=_TRAINED)
            text.append(scale, style="dim")
        else:
            text.append(f"[[{shown}]]{scale}")
    for report in _reports(job):
        text.append("".join(f"\n{printable(line)}" for line in report.template_changes()), style="yellow")
    return text


def _cropped(text: str) -> str:
    if len(text) <= _PIECE_CHARS:
        return text
    half = _PIECE_CHARS // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters) … {text[-half:]}"


def _memory(check: RunCheck) -> str:
    share = f"{check.resident_jobs} of {len(check.jobs)} jobs at a time" if check.resident_jobs < len(check.jobs) else "all jobs at a time"
    resident = " (live tensors; the process may use up to 1.9 times as much)" if check.device == "cpu" else ""
    how = "as measured by an earlier run" if check.measured else "estimated; a run measures first"
    layers = f" with {check.recomputed}, {how}" if check.num_layers else ""
    speed = f"; about {count_text(check.tokens_per_second)} tokens/s, {check.rated_as}" if check.tokens_per_second else ""
    mailbox = f"gradients that other GPUs read {bytes_text(check.mailbox_bytes)}, " if check.mailbox_bytes else ""
    return (
        f"{check.device}: {bytes_text(check.predicted_bytes)} predicted{resident} of {bytes_text(check.limit_bytes)}: the base with "
        f"{count_text(check.base_parameters)} parameters takes {bytes_text(check.base_bytes)}, the adapters "
        f"{bytes_text(check.adapter_bytes)}, {mailbox}activations {bytes_text(check.activation_bytes)}{layers}; {share}, "
        f"{check.token_budget:,} tokens per micro-batch{speed}"
    )
