"""The commands and their options. Each command imports what it needs when it is called."""

from __future__ import annotations

import signal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.plan_command import plan
from tlora.cli.server_commands import (
    Backend,
    MaxHosts,
    MinHosts,
    RayAddress,
    WorkerListen,
    backup,
    bases,
    drain,
    keys,
    login,
    ray_options,
    restore,
    serve,
)
from tlora.cli.service_commands import cancel, clone, download, files, jobs, pause, queue, resume, show, submit
from tlora.cli.simulate_command import simulate
from tlora.cli.terminal import (
    Command,
    add_command,
    close_stdin,
    keep_interrupts,
    note,
    open_console,
    open_table,
    path_text,
    print_table,
    printable,
    say,
    say_error,
    say_how_to_resume,
)
from tlora.cli.worker_commands import worker, worker_token
from tlora.libraries import begin_imports, end_imports

if TYPE_CHECKING:
    from rich.console import Console

    from tlora.engine.ranks.external import Launched
    from tlora.engine.tune import Tuned
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
        help="Override a value of the file, such as defaults.r=8.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda", help="Where to compute; by default on the GPU if there is one.", show_default=False)
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="all|N|0,2",
        help="Train on several GPUs: all, a number of them, or their indices. With --device cpu, a number of processes.",
        show_default=False,
    ),
]


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


def check(
    jobs_file: JobsFile,
    settings: Settings = None,
    device: Device = None,
    gpus: Gpus = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="rtx4090[,FILE]", help="Plan for these models of GPU, which need not be here.", show_default=False),
    ] = None,
) -> None:
    """Validate everything without training: data, one sample per job, parameters, memory."""
    run = _read(jobs_file, settings, None)
    with keep_interrupts():
        _load_libraries()
        from tlora.cli.check_view import print_check, problems_of
        from tlora.cli.progress import watching
        from tlora.engine.check import check as check_run

    with watching(open_console(stderr=True)) as watcher:
        checked = check_run(run, watcher, device, gpus, gpu)
    if checked.base_parameters:  # without a base model there are only problems
        print_check(open_console(), checked)
    if problems := problems_of(checked):
        for problem in problems:
            say_error(problem)
        raise typer.Exit(2)


def train(
    jobs_file: JobsFile,
    output_dir: Annotated[Path | None, typer.Option(help="Overrides the file's output_dir.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoints in the output directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the output directory.")] = False,
    device: Device = None,
    gpus: Gpus = None,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the results only.")] = False,
) -> None:
    """Train all jobs of the file. Ctrl-C saves checkpoints; --resume continues from them."""
    if resume and overwrite:
        raise typer.BadParameter("--resume keeps what --overwrite removes; give one of the two")
    run = _read(jobs_file, settings, output_dir)
    console = open_console()
    from tlora.cli.progress import watching
    from tlora.data.prepare import start_worker
    from tlora.engine.ranks.external import launched
    from tlora.engine.ranks.rank_group import start_ranks

    launch = launched()
    if launch is not None and launch.rank > 0:
        raise typer.Exit(_obey_rank_0(run, launch))
    again = ["train", *_again(jobs_file, output_dir, device, gpus, settings), "--resume"]
    with say_how_to_resume(Path(run.output_dir), again):
        # the data worker and the ranks import their libraries while this process imports its own
        with watching(None if quiet else console) as watcher, start_worker() as data_worker, start_ranks(gpus, launch) as rank_group:
            with keep_interrupts():
                _load_libraries()
                from tlora.engine.train import train as train_run

            options = {"resume": resume, "overwrite": overwrite, "device": device, "gpus": gpus}
            results = train_run(run, **options, watcher=watcher, data_worker=data_worker, rank_group=rank_group)
        from tlora.cli.result_view import exit_code, print_end

        print_end(console, results, again)
    raise typer.Exit(exit_code(results.values(), results.signal_number))


def cluster(
    jobs_file: JobsFile,
    output_dir: Annotated[Path | None, typer.Option(help="Overrides the file's output_dir.", show_default=False)] = None,
    device: Device = None,
    gpus: Annotated[str | None, typer.Option(metavar="all|N|0,2", help="As of train.", show_default="all, or 1 process")] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Of residual_capacity(-growth), fifo, backfill, easy, sjf, srtf, las.")
    ] = "residual_capacity",
    worker_listen: WorkerListen = None,
    backend: Backend = "local",
    ray_address: RayAddress = None,
    min_hosts: MinHosts = 0,
    max_hosts: MaxHosts = None,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the results only.")] = False,
) -> None:
    """Train the jobs as they arrive, under the online scheduler. After a stop or a kill the same command goes on."""
    run = _read(jobs_file, settings, output_dir)
    ray = ray_options(backend, ray_address, min_hosts, max_hosts, worker_listen)
    console = open_console()
    from tlora.cli.progress import watching

    again = ["cluster", *_again(jobs_file, output_dir, device, gpus, settings)]
    again += ["--policy", policy] if policy != "residual_capacity" else []
    again += ["--worker-listen", worker_listen] if worker_listen else []
    given = {"--ray-address": ray_address, "--min-hosts": min_hosts or None, "--max-hosts": max_hosts}
    again += ["--backend", backend] if ray is not None else []
    again += [part for option, value in given.items() if value is not None for part in (option, str(value))]
    with say_how_to_resume(Path(run.output_dir) / "jobs", again):
        with watching(None if quiet else console) as watcher:
            with keep_interrupts():
                _load_libraries()
                from tlora.live.cluster_run import train_on_cluster

            results = train_on_cluster(run, gpus=gpus, device=device, policy=policy, worker_listen=worker_listen, ray=ray, watcher=watcher)
        from tlora.cli.result_view import exit_code, print_end

        print_end(console, results, again)
    raise typer.Exit(exit_code(results.values(), results.signal_number))


def generate(
    adapter: Annotated[Path, typer.Option(help="The adapter's directory, from this program or from PEFT.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="The prompt to answer.", show_default=False)],
    base_model: Annotated[str | None, typer.Option(help="Overrides the base model that the adapter names.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of the answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling, when the temperature is above 0.")] = 0,
    device: Device = None,
    compare: Annotated[bool, typer.Option("--compare", help="Print the base model's answer first.")] = False,
    unused_weights: Annotated[str, typer.Option(metavar="refuse|ignore", help="As in the jobs file.")] = "refuse",
) -> None:
    """Generate an answer with an adapter."""
    from tlora.cli.progress import watching

    if unused_weights not in ("refuse", "ignore"):
        raise typer.BadParameter(f"--unused-weights {unused_weights}: must be refuse or ignore")
    with keep_interrupts():
        _load_libraries()
        from tlora.engine.generate import Sampling, answer, check_prompts, open_adapter

    sampling, console = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed), open_console()
    check_prompts([prompt])
    with watching(open_console(stderr=True)) as watcher:
        model = open_adapter(adapter, base_model=base_model, device=device, unused_weights=unused_weights, watcher=watcher)
    for line in model.notes:
        note(line)
    show = partial(console.print, end="", soft_wrap=True)
    for title, adapted in (("base", False), ("adapter", True)) if compare else (("", True),):
        if title:
            console.print(f"--- {title}", style="bold")
        notes = list[str]()
        answer(model, [prompt], sampling, adapted=adapted, on_text=lambda text: show(printable(text)), on_note=notes.append)
        console.print()
        for line in notes:
            note(line)


def report(directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run's output directory.", show_default=False)]) -> None:
    """Write the report page of a run, finished or not, and print its path."""
    from tlora.report.run_page import write_report

    say(str(write_report(directory)))


def tune(
    base_model: Annotated[
        str, typer.Argument(metavar="BASE_MODEL", help="A directory, of which config.json is enough, or a hub id.", show_default=False)
    ],
    device: Device = None,
    dtype: Annotated[str, typer.Option(metavar="auto|bfloat16|float16", help="As in the jobs file.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the table, instead of the user's cache.", show_default=False)
    ] = None,
) -> None:
    """Time the GPU kernels' tiles at a base model's shapes; training then uses the fastest."""
    if dtype not in ("auto", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype {dtype}: must be auto, bfloat16 or float16")
    with keep_interrupts():
        _load_libraries()
        from tlora.engine.tune import tune as tune_tiles

    _print_tuned(open_console(), tune_tiles(base_model, dtype, device, out, note))


def calibrate(
    device: Annotated[
        str | None, typer.Option(metavar="cuda:N", help="Which GPU to measure; by default the first.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write, instead of the file that this machine reads.", show_default=False)
    ] = None,
) -> None:
    """Measure this machine's GPU in up to 3 minutes, for all commands that predict or plan on it."""
    with keep_interrupts():
        _load_libraries()
        from tlora.engine.calibrate import calibrate as measure_gpu

    found = measure_gpu(device, out, note)
    console = open_console()
    for warning in found.warnings:
        note(f"warning: {warning}")
    readers = "for `tlora plan --device-spec` and `tlora check --gpu`" if out else "train, check, plan, cluster and serve read it here"
    console.print(f"in {found.seconds:.0f} s; {readers}: {path_text(found.path)}", soft_wrap=True)


for _command in (check, plan, train, cluster, generate, report, tune, calibrate):
    add_command(app, _command)
app.command(cls=Command)(worker)  # which has no --debug
_PANELS = {
    None: (worker_token, simulate, serve),
    "Jobs on a server": (submit, jobs, show, pause, resume, cancel, clone, download, queue, login),
    "A server": (drain, backup, restore),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        add_command(app, _command, panel=_panel)
app.add_typer(files, name="files", rich_help_panel="Jobs on a server")
app.add_typer(keys, name="keys", rich_help_panel="A server")
app.add_typer(bases, name="bases", rich_help_panel="A server")


def _again(jobs_file: Path, output_dir: Path | None, device: str | None, gpus: str | None, settings: list[str] | None) -> list[str]:
    """The arguments that repeat a command."""
    given = {"--output-dir": output_dir and str(output_dir), "--device": device, "--gpus": gpus}
    options = [part for option, value in given.items() if value for part in (option, value)]
    return [str(jobs_file), *options, *(part for setting in settings or [] for part in ("--set", setting))]


def _obey_rank_0(run: RunSpec, launch: Launched) -> int:
    """Run `tlora train` on the other ranks of a launcher, which show nothing. Returns the exit status."""
    _load_libraries()
    from tlora.engine.ranks.external import digest_of, find_owner
    from tlora.engine.ranks.rank import serve

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a batch system warns all processes, and rank 0 ends the run
    return serve(find_owner(launch), launch.rank, launch.count, digest_of(run))


def _read(jobs_file: Path, settings: list[str] | None, output_dir: Path | None) -> RunSpec:
    from tlora.jobs_file import at_home, read_jobs_file

    run = read_jobs_file(jobs_file, settings or [])
    return run.model_copy(update={"output_dir": at_home(str(output_dir))}) if output_dir else run


def _load_libraries() -> None:
    """Import torch, transformers and the engine with garbage collection off, which saves a fifth of the time.

    Turns off transformers' progress bars, which would garble the live table, and closes stdin, so that no library waits for an answer.
    """
    begin_imports()
    from transformers.utils import logging

    import_module("tlora.planning.plan")
    end_imports()
    close_stdin()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _print_tuned(console: Console, tuned: Tuned) -> None:
    """A row per launch: the chosen tile, its time and its gain; then the path of the table."""
    from tlora.engine.tune import key_text, tile_text

    table = open_table()
    table.add_column("launch", no_wrap=True)
    table.add_column("tile", no_wrap=True)
    for heading in ("us by rule", "us", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for choice in tuned.choices:
        by_rule = choice.tile == choice.rule
        table.add_row(
            key_text(choice.key),
            "by rule" if by_rule else tile_text(choice.tile),
            f"{1e6 * choice.rule_seconds:.1f}",
            f"{1e6 * choice.seconds:.1f}",
            "" if by_rule else f"{choice.gain:.1%}",
        )
    print_table(console, table)
    for choice in tuned.choices:
        for fault in choice.faults:
            console.print(f"rejected for {key_text(choice.key)}: {fault}", style="dim", soft_wrap=True)
    better = sum(choice.tile != choice.rule for choice in tuned.choices)
    console.print(f"\n{tuned.gpu}: {better} of {len(tuned.choices)} launches are faster than by rule", soft_wrap=True)
    console.print(f"in {tuned.seconds:.0f} s; table: {path_text(tuned.path)}", soft_wrap=True)
