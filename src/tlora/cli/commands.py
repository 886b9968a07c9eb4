"""The commands and their options. Each imports what it calls when it is called."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.simulate_command import simulate
from tlora.garbage import no_collection

if TYPE_CHECKING:
    from rich.console import Console

    from tlora.cli.progress import LiveView, PlainView, SilentView
    from tlora.job import RunSpec

app = typer.Typer(
    name="tlora",
    help="Train many LoRA adapters at once over one frozen language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobsFile = Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file: base model, defaults, jobs.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Put a value over the file's, such as defaults.r=8.",
        show_default=False,
    ),
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where to compute; the GPU if there is one.", show_default=False)]
_UNUSED = ("sklearn", "scipy", "torchvision", "torchaudio")  # where they are installed, transformers loads them: 3 s for nothing
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from tlora.version import __version__

        typer.echo(f"tlora {__version__}")
        raise typer.Exit


@app.callback()
def tlora(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Train many LoRA adapters at once over one frozen language model."""


@app.command()
def check(jobs_file: JobsFile, settings: Settings = None, device: Device = None, debug: Debug = False) -> None:
    """Validate everything without training: data, one sample per job, parameters, memory."""
    from tlora.cli.terminal import errors_told, interrupts_kept, open_console, printable

    with errors_told(debug):
        run = _read(jobs_file, settings, None)
        with interrupts_kept():
            _load_libraries()
            from tlora.cli.check_view import print_check, problems_of
            from tlora.engine.check import check as check_run
            from tlora.engine.progress import Watcher

        console = open_console()
        with _open_view(open_console(stderr=True), quiet=False) as view:
            found = check_run(run, Watcher(view.progress, view.note), device)
        if found.base_parameters:  # without a base there are only problems to tell
            print_check(console, found)
        if problems := problems_of(found):
            errors = open_console(stderr=True)
            for problem in problems:
                errors.print(f"error: {printable(problem)}", style="red", soft_wrap=True)
            raise typer.Exit(2)


@app.command()
def train(
    jobs_file: JobsFile,
    output_dir: Annotated[Path | None, typer.Option(help="Instead of the file's output_dir.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in the output directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in the output directory.")] = False,
    device: Device = None,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the results only.")] = False,
    debug: Debug = False,
) -> None:
    """Train every job of the file. Ctrl-C writes checkpoints; --resume goes on from them."""
    from tlora.cli.terminal import errors_told, interrupts_kept, open_console

    with errors_told(debug):
        if resume and overwrite:
            raise typer.BadParameter("--resume keeps what --overwrite removes; give one of the two")
        run = _read(jobs_file, settings, output_dir)
        console = open_console()
        from tlora.data.prepare import start_worker

        with _open_view(console, quiet) as view, start_worker() as data_worker:  # it loads its libraries while this process loads its own
            with interrupts_kept():
                _load_libraries()
                from tlora.engine.progress import Watcher
                from tlora.engine.train import train as train_run

            watcher = Watcher(view.progress, view.note)
            results = train_run(run, resume=resume, overwrite=overwrite, device=device, watcher=watcher, data_worker=data_worker)
        from tlora.cli.result_view import exit_code, print_end

        again = [str(jobs_file), *(["--output-dir", str(output_dir)] if output_dir else [])]
        again += ["--device", device] if device else []
        again += [part for setting in settings or [] for part in ("--set", setting)]
        print_end(console, results, again)
        raise typer.Exit(exit_code(results.values(), results.signal_number))


@app.command()
def generate(
    adapter: Annotated[Path, typer.Option(help="The adapter's directory, from this program or from PEFT.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="What to answer.", show_default=False)],
    base_model: Annotated[str | None, typer.Option(help="Instead of the base that the adapter names.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, when the temperature is above 0.")] = 0,
    device: Device = None,
    compare: Annotated[bool, typer.Option("--compare", help="Let the base answer first, without the adapter.")] = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt with an adapter."""
    from tlora.cli.terminal import errors_told, interrupts_kept, open_console, printable

    with errors_told(debug):
        with interrupts_kept():
            _load_libraries()
            from tlora.engine.generate import Sampling, answer, open_adapter

        console = open_console()
        model = open_adapter(adapter, base_model=base_model, device=device)
        for note in model.notes:
            open_console(stderr=True).print(printable(note), style="dim", soft_wrap=True)
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        for title, adapted in (("base", False), ("adapter", True)) if compare else (("", True),):
            if title:
                console.print(f"--- {title}", style="bold")
            answer(model, [prompt], sampling, adapted=adapted, on_text=lambda text: console.print(printable(text), end="", soft_wrap=True))
            console.print()


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run's output directory.", show_default=False)], debug: Debug = False
) -> None:
    """Write the report page of a run, finished or not, and print its path."""
    from tlora.cli.terminal import errors_told, open_console

    with errors_told(debug):
        from tlora.report.run_page import write_report

        open_console().print(str(write_report(directory)), soft_wrap=True)


@app.command()
def tune(
    base_model: Annotated[
        str, typer.Argument(metavar="BASE_MODEL", help="A directory, of which config.json is enough, or a hub id.", show_default=False)
    ],
    device: Device = None,
    dtype: Annotated[str, typer.Option(metavar="auto|bfloat16|float16", help="As in the jobs file.")] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of the user's table of this GPU.", show_default=False)] = None,
    debug: Debug = False,
) -> None:
    """Time the GPU kernels' tiles at a base's shapes; training takes the fastest from then on."""
    from tlora.cli.terminal import errors_told, interrupts_kept, open_console, printable

    with errors_told(debug):
        if dtype not in ("auto", "bfloat16", "float16"):
            raise typer.BadParameter(f"--dtype must be auto, bfloat16 or float16, and is {dtype}")
        with interrupts_kept():
            _load_libraries()
            from tlora.cli.tune_view import print_tuned
            from tlora.engine.tune import tune as tune_tiles

        console, lines = open_console(), open_console(stderr=True)
        tuned = tune_tiles(base_model, dtype, device, out, lambda line: lines.print(printable(line), style="dim", soft_wrap=True))
        print_tuned(console, tuned)


app.command()(simulate)


def _read(jobs_file: Path, settings: list[str] | None, output_dir: Path | None) -> RunSpec:
    from tlora.jobs_file import read_jobs_file

    run = read_jobs_file(jobs_file, settings or [])
    return run.model_copy(update={"output_dir": str(output_dir)}) if output_dir else run


def _open_view(console: Console, quiet: bool) -> LiveView | PlainView | SilentView:
    from tlora.cli.progress import LiveView, PlainView, SilentView
    from tlora.cli.terminal import shows_live

    if quiet:
        return SilentView()
    return LiveView(console) if shows_live(console) else PlainView(console)


def _load_libraries() -> None:
    """torch, transformers and the engine, without a search for garbage in them: a fifth of the time.

    transformers draws bars, which would run through the live table; and nothing that a library asks is answered by our stdin.
    """
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    with no_collection():
        from transformers.utils import logging

        import_module("tlora.engine.plan")
    gc.freeze()  # nor later
    from tlora.cli.terminal import close_stdin

    close_stdin()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
