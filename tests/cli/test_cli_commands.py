"""The commands: options in, exit codes out, one message per error, nothing heavy loaded before it is needed."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tlora import __version__
from tlora.cli.commands import app
from tlora.cli.terminal import keep_interrupts
from tlora.data.prepare import DataWorker
from tlora.data.report import DataReport
from tlora.engine.watcher import JobProgress, RunProgress, Watcher
from tlora.errors import CapacityError, CheckpointError, ConfigError, DataError, ModelError
from tlora.job import RunSpec
from tlora.link.supervisor import SupervisedProcess
from tlora.store.job_result import JobResult

JOBS = "base_model: some/base\njobs:\n  - {name: polite, data: p.jsonl}\n  - {name: sql, data: s.jsonl}\n"
DONE = {name: JobResult(name, "done", rank=16, steps=5, total_steps=5, train_loss=1.5, path=f"out/{name}") for name in ("polite", "sql")}


class Results(dict[str, JobResult]):
    report: Path | None = Path("out/report.html")
    signal_number: int | None = None


class FakeEngine:
    """Stands where `tlora.engine.train` would; remembers what it was asked for."""

    def __init__(self, results: dict[str, JobResult], signal_number: int | None = None, error: BaseException | None = None) -> None:
        self.results, self.error = Results(results), error
        self.results.signal_number = signal_number
        self.run: RunSpec | None = None
        self.options: dict[str, Any] = {}
        self.data_worker: SupervisedProcess | None = None

    def train(self, run: RunSpec, *, watcher: Watcher, data_worker: DataWorker, rank_group: object, **options: Any) -> Results:
        self.run, self.options, self.data_worker = run, options, data_worker.process
        assert not self.data_worker.has_ended, "the process that prepares data is not running"
        if self.error:
            raise self.error
        watcher.note("a notable line")
        watcher.progress(RunProgress(1.0, (JobProgress("polite", "training", 16, step=1, total_steps=5, loss=2.0),)))
        return self.results


@pytest.fixture
def jobs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "jobs.yaml"
    file.write_text(JOBS)
    return file


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def call(*arguments: object, columns: str | None = None) -> tuple[int, str, str]:
    environment = {"COLUMNS": columns}  # pytest-xdist sets it in its workers
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_help_loads_no_model_library():
    code = (
        "import sys\nfrom tlora.cli import main\nsys.argv = ['tlora', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'yaml', 'plotly', 'pyarrow', 'jinja2', 'tlora.job'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("check", "train", "generate", "report", "tune"))


@pytest.mark.parametrize("module", ["tlora.cache_directory", "psutil", "tlora.cli.commands", "typer"])
def test_ctrl_c_while_its_own_modules_are_imported_is_130_without_a_word(module: str):
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from tlora.cli import main\nsys.argv = ['tlora', '--version']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_wrong_jobs_file_is_told_before_a_model_library_is_loaded(tmp_path: Path):
    code = (
        "import sys\nfrom tlora.cli import main\nsys.argv = ['tlora', 'train', 'nowhere.yaml']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: nowhere.yaml: no such file")


@pytest.mark.parametrize("arguments", [["--version"], ["-h"], ["train", "-h"], ["--show-completion"]], ids=" ".join)
def test_what_every_program_answers(arguments: list[str]):
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "SHELL": "/bin/bash"}
    if arguments == ["--show-completion"]:
        arguments = ["--show-completion", "bash"]
    done = subprocess.run([sys.executable, "-m", "tlora", *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    expected = {"--version": f"tlora {__version__}\n", "--show-completion": "complete -o default -F"}
    assert expected.get(arguments[0], "Usage: ") in done.stdout


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}], ids=str)
def test_waiting_threads_let_others_have_their_core_unless_the_user_says_how_they_wait(given: dict[str, str]):
    """Before torch is loaded, which reads it."""
    code = (
        "import os, sys, tlora.cli\nsys.argv = ['tlora', '--version']\nassert 'torch' not in sys.modules\n"
        "try: tlora.cli.main()\nfinally: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-2:] == [given.get("GOMP_SPINCOUNT", "None" if given else "3000"), "False"]


def test_a_full_stdout_at_the_end_is_said_and_fails_nothing(jobs_file: Path):
    """In a process of its own, which has the results without the libraries that make them."""
    rows = json.dumps({name: asdict(result) for name, result in DONE.items()})
    code = (
        "import contextlib, json, sys, types\nimport tlora.cli.commands, tlora.data.prepare\nfrom tlora.cli import main\n"
        "tlora.data.prepare.start_worker = contextlib.nullcontext\ntlora.cli.commands._load_libraries = lambda: None\n"
        "class Results(dict):\n    report = signal_number = None\n"
        "results = Results({name: types.SimpleNamespace(**row) for name, row in json.loads(sys.argv[1]).items()})\n"
        "module = types.ModuleType('tlora.engine.train')\nmodule.train = lambda *_, **__: results\nsys.modules[module.__name__] = module\n"
        "sys.argv = ['tlora', 'train', 'jobs.yaml', '--quiet']\nmain()\n"
    )
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code, rows]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=jobs_file.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and "result.json" in done.stderr and "No space left on device" in done.stderr


def test_a_ctrl_c_that_a_library_swallows_still_ends_the_command():
    """It catches whatever an import that it only tries raises."""
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), keep_interrupts():
        with suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
            done.append("went on at once")
        done.append("loaded")
    assert done == ["loaded"] and signal.getsignal(signal.SIGINT) is before
    with keep_interrupts():
        done.append("none came")
    assert done == ["loaded", "none came"]


def test_train_hands_its_options_on_and_ends_with_0(jobs_file: Path, use: Callable[..., None]):
    engine = FakeEngine(DONE)
    use("tlora.engine.train", train=engine.train)
    code, out, _ = call("train", jobs_file, "--resume", "--device", "cpu", "--output-dir", "other", "--set", "jobs.sql.r=3")
    assert code == 0
    assert engine.run and engine.run.output_dir == "other" and [job.r for job in engine.run.jobs] == [16, 3]
    assert engine.options == {"resume": True, "overwrite": False, "device": "cpu", "gpus": None}
    assert engine.data_worker is not None and engine.data_worker.has_ended, "the process that prepares data outlives the command"
    assert "a notable line" in out and "[1.0 s] polite: training, step 1/5, train loss 2.0000" in out
    assert "out/sql" in out and "report: out/report.html" in out and "\x1b" not in out


def test_quiet_prints_the_results_only(jobs_file: Path, use: Callable[..., None]):
    use("tlora.engine.train", train=FakeEngine(DONE).train)
    code, out, _ = call("train", jobs_file, "--quiet")
    assert code == 0 and "a notable line" not in out and "training" not in out and "out/sql" in out


def test_a_failed_job_makes_1_and_tells_why(jobs_file: Path, use: Callable[..., None]):
    failed = JobResult("sql", "failed", "s.jsonl, row 3: bad \x1b[2J", rank=16, steps=2, total_steps=5)
    use("tlora.engine.train", train=FakeEngine(DONE | {"sql": failed}).train)
    code, out, _ = call("train", jobs_file)
    assert code == 1 and "sql failed: s.jsonl, row 3: bad \ufffd[2J" in out and "2/5" in out


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_tells_how_to_go_on(jobs_file: Path, use: Callable[..., None], number: int, expected: int):
    stopped = {name: JobResult(name, "stopped", steps=2, total_steps=5) for name in DONE}
    use("tlora.engine.train", train=FakeEngine(stopped, signal_number=number).train)
    arguments = (jobs_file.name, "--output-dir", "a b", "--device", "cpu", "--set", "jobs.sql.r=3")
    code, out, _ = call("train", *arguments, "--overwrite")
    assert code == expected
    name = signal.Signals(number).name
    assert f"Interrupted by {name}" in out
    assert "tlora train jobs.yaml --output-dir 'a b' --device cpu --set jobs.sql.r=3 --resume" in out


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError, CheckpointError, CapacityError])
def test_what_a_user_can_mend_is_one_message_and_2(jobs_file: Path, use: Callable[..., None], kind: type[Exception]):
    use("tlora.engine.train", train=FakeEngine({}, error=kind("value, rule, [bold]remedy[/bold]")).train)
    code, out, err = call("train", jobs_file)
    assert (code, err) == (2, "error: value, rule, [bold]remedy[/bold]\n")
    assert "Traceback" not in out


def test_debug_shows_the_traceback_of_an_error(jobs_file: Path, use: Callable[..., None]):
    use("tlora.engine.train", train=FakeEngine({}, error=DataError("x")).train)
    with pytest.raises(DataError):
        call("train", jobs_file, "--debug")


def test_ctrl_c_outside_training_is_130(jobs_file: Path, use: Callable[..., None]):
    use("tlora.engine.train", train=FakeEngine({}, error=KeyboardInterrupt()).train)
    assert call("train", jobs_file)[0] == 130
    use("tlora.engine.train", train=FakeEngine({}, error=KeyboardInterrupt("7 rows are kept")).train)
    code, _, err = call("train", jobs_file)
    assert (code, err) == (130, "7 rows are kept\n")


@pytest.mark.parametrize(
    ("command", "module", "train", "directory", "again"),
    [
        ("train", "tlora.engine.train", "train", "a b", ["--resume"]),
        ("cluster", "tlora.live.cluster_run", "train_on_cluster", "a b/jobs", ["--policy", "fifo"]),
    ],
)
def test_a_ctrl_c_that_ends_a_run_at_once_says_how_to_resume_it(
    jobs_file: Path, use: Callable[..., None], command: str, module: str, train: str, directory: str, again: list[str]
):
    arguments = [command, jobs_file.name, "--output-dir", "a b", "--device", "cpu"]

    def quit_at_once(*_: Any, **__: Any) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "run.json").write_text("{}")
        raise KeyboardInterrupt

    def quit_before(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    use(module, **{train: quit_at_once})
    code, _, err = call(*arguments, *again)
    kept = "each unfinished job goes on from its last checkpoint, or from step 0 if it has none"
    assert (code, err) == (130, f"Quit at once; {kept}. Resume with: {shlex.join(['tlora', *arguments, *again])}\n")
    use(module, **{train: quit_before})  # before the run has begun: the file is that of the earlier one
    assert call(*arguments, *again)[::2] == (130, "")


def test_every_problem_of_the_file_is_told_and_nothing_is_trained(jobs_file: Path, use: Callable[..., None]):
    engine = FakeEngine(DONE)
    use("tlora.engine.train", train=engine.train)
    jobs_file.write_text("base_model: b\njobs:\n  - {name: a, data: d, rank: 3}\n  - {name: b, data: d, r: 0}\n")
    code, _, err = call("train", jobs_file)
    assert code == 2 and engine.run is None
    assert err.splitlines()[0] == "error: 2 problems:" and "jobs.yaml:3: rank" in err and "jobs.yaml:4: r: 0" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "Missing argument"),
        (("train", "jobs.yaml", "--resume", "--overwrite"), "give one of the two"),
        (("train", "jobs.yaml", "--nope"), "No such option"),
        (("nope",), "No such command"),
        (("generate", "--prompt", "x"), "Missing option '--adapter'"),
        (("generate", "--adapter", "x", "--prompt", "x", "--max-new-tokens", "0"), "max-new-tokens"),
        (("generate", "--adapter", "x", "--prompt", "x", "--unused-weights", "some"), "must be refuse or ignore"),
    ],
)
def test_a_wrong_command_line_is_2(jobs_file: Path, arguments: tuple[str, ...], message: str):
    code, _, err = call(*arguments)
    assert code == 2 and message in err


def job_check(name: str, **changes: Any) -> SimpleNamespace:
    data = DataReport(
        format="chat",
        files=["p.jsonl"],
        rows=1234,
        samples=1230,
        skipped=4,
        truncated=7,
        tokens=56789,
        trained_tokens=23456,
        trained_tokens_lost=99,
        longest=777,
        rendered=[("User: hi [b]\n", 0.0), ("Hello\x1b[31m!", 1.0), (" tail", 0.5)],
    )
    fields = {"problems": (), "warnings": (), "rank": 16, "trainable_parameters": 65536, "memory_bytes": 3 << 20, "total_steps": 42}
    return SimpleNamespace(**({"name": name, "data": data, "eval_data": None, "sources": ()} | fields | changes))


def run_check(*jobs: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    fields = {"problems": (), "warnings": (), "base_parameters": 681_000, "base_bytes": 2_700_000, "token_budget": 2048}
    fields |= {"gpus": (), "predicted_bytes": 5 << 30, "limit_bytes": 16 << 30, "device": "cpu", "resident_jobs": len(jobs)}
    fields |= {"tokens_per_second": 0.0, "rated_as": ""}
    fields |= {
        "adapter_bytes": 6 << 20,
        "mailbox_bytes": 0,
        "activation_bytes": 4 << 30,
        "recomputed_layers": 0,
        "recomputed": "",
        "num_layers": 0,
        "measured": False,
        "recompute_choices": (),
    }
    return SimpleNamespace(jobs=jobs, **({"kernels": "", "streamed": ""} | fields | changes))


def test_check_prints_what_it_found_and_ends_with_0(jobs_file: Path, use: Callable[..., None]):
    found = run_check(job_check("polite"), job_check("sql", warnings=("rank is large",)), warnings=("tight",), resident_jobs=1)
    use("tlora.engine.check", check=lambda run, watcher, device, gpus, gpu: found)
    code, out, err = call("check", jobs_file)
    assert code == 0 and err == ""
    row = next(line for line in out.splitlines() if line.startswith("polite"))
    assert row.split() == [
        "polite",
        "chat",
        "1,234",
        "1,230",
        "56.8",
        "k",
        "23.5",
        "k",
        "777",
        "7",
        "4",
        "42",
        "16",
        "65.5",
        "k",
        "3",
        "MiB",
    ]
    assert "polite, sql: first sample, trained part in [[ ]]" in out, "one sample of both is printed once"
    assert "User: hi [b]\n[[Hello\ufffd[31m!]][[ tail]] (weight 0.5)" in out
    assert (
        "5 GiB predicted (live tensors; the process may use up to 1.9 times as much) of 16 GiB" in out
        and "1 of 2 jobs at a time, 2,048 tokens per micro-batch" in out
    )
    assert [line for line in out.splitlines() if line.startswith("warning: ")] == ["warning: tight", "warning: sql: rank is large"]


def test_check_in_a_narrow_terminal_has_every_name_and_every_number(jobs_file: Path, use: Callable[..., None]):
    use("tlora.engine.check", check=lambda run, watcher, device, gpus, gpu: run_check(job_check("polite"), job_check("sql")))
    _, out, _ = call("check", jobs_file, columns="50")
    rows = [" ".join(line.split()[1:]) for line in out.splitlines() if line.startswith("polite ") and len(line) <= 50]
    assert " ".join(rows) == "chat 1,234 1,230 56.8 k 23.5 k 777 7 4 42 16 65.5 k 3 MiB"
    assert sum(line.startswith("sql ") for line in out.splitlines()) == len(rows) == 3


def test_check_says_nothing_of_an_adapter_that_cannot_be_placed(jobs_file: Path, use: Callable[..., None]):
    bad = job_check("bad", trainable_parameters=0, memory_bytes=0, problems=("adapter_config.json: use_dora=True",))
    use("tlora.engine.check", check=lambda run, watcher, device, gpus, gpu: run_check(job_check("polite"), bad))
    _, out, _ = call("check", jobs_file)
    row = next(line for line in out.splitlines() if line.startswith("bad"))
    assert row.split()[-1] == "42", "its steps are the last that is known"


def test_check_says_no_more_than_it_knows_of_a_gpu(jobs_file: Path, use: Callable[..., None]):
    use("tlora.engine.check", check=lambda run, watcher, device, gpus, gpu: run_check(job_check("sql"), device="cuda"))
    _, out, _ = call("check", jobs_file)
    assert "cuda: 5 GiB predicted of 16 GiB" in out and "live tensors" not in out


@pytest.mark.parametrize(("measured", "how"), [(True, "as measured by an earlier run"), (False, "estimated; a run measures first")])
def test_check_tells_what_of_a_gpu_is_for_what(jobs_file: Path, use: Callable[..., None], measured: bool, how: str):
    found = run_check(job_check("sql"), device="cuda", recomputed="3 of 32 layers recomputed", num_layers=32, measured=measured)
    use("tlora.engine.check", check=lambda run, watcher, device, gpus, gpu: found)
    _, out, _ = call("check", jobs_file)
    assert f"the adapters 6 MiB, activations 4 GiB with 3 of 32 layers recomputed, {how}" in out


def test_check_tells_every_problem_once_and_ends_with_2(jobs_file: Path, use: Callable[..., None]):
    bad = job_check("sql", data=None, problems=("s.jsonl: no such file", "target 'x' unknown"))
    use(
        "tlora.engine.check",
        check=lambda run, watcher, device, gpus, gpu: run_check(job_check("polite"), bad, problems=("wandb is not installed",)),
    )
    code, out, err = call("check", jobs_file)
    assert code == 2
    assert err.splitlines() == ["error: wandb is not installed", "error: sql: s.jsonl: no such file", "error: sql: target 'x' unknown"]
    assert "polite" in out


def test_check_hands_on_settings_and_device(jobs_file: Path, use: Callable[..., None]):
    asked: list[Any] = []
    use(
        "tlora.engine.check",
        check=lambda run, watcher, device, gpus, gpu: asked.append((run, device, gpu)) or run_check(job_check("polite")),
    )
    call("check", jobs_file, "--set", "defaults.r=9", "--device", "cpu")
    call("check", jobs_file, "--gpu", "rtx4090")
    assert [job.r for job in asked[0][0].jobs] == [9, 9] and asked[0][1:] == ("cpu", None) and asked[1][1:] == (None, "rtx4090")


def test_report_prints_the_path(jobs_file: Path, use: Callable[..., None]):
    use("tlora.report.run_page", write_report=lambda directory: directory / "report.html")
    assert call("report", "some") == (0, "some/report.html\n", "")


def test_report_of_no_run_is_2(jobs_file: Path):
    code, out, err = call("report", "nowhere")
    assert code == 2 and out == "" and err.startswith("error: nowhere ") and "run.json" in err


def test_a_path_that_is_too_long_is_one_message_of_any_command():
    for command in (("worker-token",), ("keys", "list", "--local", "--data-dir")):
        code, out, err = call(*command, "n" * 256)
        assert code == 2 and out == "" and err.startswith("error: ") and "nnn" in err and "Traceback" not in err


LIVE = """
import sys
from types import ModuleType, SimpleNamespace
from tlora.engine.watcher import JobProgress, RunProgress
from tlora.cli import commands, main
class Results(dict):
    report = None
    signal_number = None
def train(run, *, watcher, **_):
    for step in range(1, 4):
        jobs = (JobProgress("polite", "training", 16, step, 3, 1.0 / step, None, 10, 1234.0, 0.5, 9.0),)
        watcher.progress(RunProgress(float(step), jobs, 2345.0, 0.01))
    watcher.note("a note")
    losses = dict.fromkeys(("train_loss_first", "train_loss", "eval_loss_first", "eval_loss"))
    done = dict(name="polite", status="done", rank=16, steps=3, total_steps=3, num_tokens=9, seconds=1.0, path="out/polite")
    done |= dict(sweep_of=None, reason="")
    return Results(polite=SimpleNamespace(**done, **losses))
fake = ModuleType("fake")
fake.train = train
sys.modules["tlora.engine.train"] = fake
commands._load_libraries = lambda: None
sys.argv = ["tlora", "train", sys.argv[1]]
main()
"""


def test_a_terminal_gets_a_table_that_is_redrawn(jobs_file: Path):
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", LIVE, str(jobs_file)], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the child has closed its end
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(master)
    assert process.wait() == 0
    seen = b"".join(chunks).decode()
    assert "\x1b[1A" in seen and "\x1b[2K" in seen, "lines are taken back"
    assert all(text in seen for text in ("1/3", "3/3", "1,234", "50%", "0:09", "padding 1.0%", "a note", "out/JOB"))
