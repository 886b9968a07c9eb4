"""`tlora simulate`: options in, tables and files out, one message per error, a sweep that survives a kill."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.sim.small_traces import write_trace
from tlora.cli.commands import app
from tlora.cli.simulate_command import POLICIES as DEFAULT_POLICIES
from tlora.cli.simulate_view import progress_shown
from tlora.scheduler.policies import POLICIES
from tlora.sim import run, sweep
from tlora.sim.conditions import Conditions
from tlora.sim.scenario import Scenario, contender
from tlora.sim.sweep import TaskProgress
from tlora.sim.trace import SHIPPED
from tlora.wording.metrics import CHAIN, TIMES


def call(*arguments: object, columns: int | None = None) -> tuple[int, str, str]:
    environment = {"COLUMNS": columns and str(columns), "TERM": "dumb"}
    result = CliRunner().invoke(app, ["simulate", *(str(argument) for argument in arguments)], env=environment)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "num_cores", lambda: 1)
    return write_trace(tmp_path).name


class AskedError(Exception):
    """Ends a command when it has said what it wants simulated."""


def asked_of(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> list[Scenario]:
    asked: list[Scenario] = []

    def fake(scenarios: list[Scenario], watch: object) -> None:
        asked.extend(scenarios)
        raise AskedError

    monkeypatch.setattr(run, "run_scenarios", fake)
    with pytest.raises(AskedError):
        call(*arguments)
    return asked


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_help_is_fast_and_names_every_option() -> None:
    code = (
        "import sys\nfrom tlora.cli import main\nsys.argv = ['tlora', 'simulate', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'plotly', 'pyarrow', 'tlora.sim', 'tlora.scheduler', 'multiprocessing'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = os.environ | {"COLUMNS": "160"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    options = (
        "trace",
        "policy",
        "load",
        "jobs",
        "seed",
        "seeds",
        "paper",
        "mixed",
        "gpus",
        "nodes",
        "gpu",
        "kernels",
        "truth-error",
        "length-error",
    )
    options += ("drift", "delay", "mtbf-hours", "usage-half-life-seconds", "csv", "html", "sweep", "out", "quiet", "debug")
    assert all(f"--{option}" in done.stdout for option in options)
    words = set(re.findall(r"[\w+-]+", done.stdout))
    assert {*POLICIES, *SHIPPED} <= words and "128" in words


def test_a_simulation_loads_no_model_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tlora.cli import main\n"
        f"sys.argv = ['tlora', 'simulate', '--trace', {str(write_trace(tmp_path))!r}, '--policy', 'fifo']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'plotly'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(monkeypatch)
    assert asked == [Scenario("ee9e8c", *contender(name, "tlora"), 16, 8, "h200") for name in DEFAULT_POLICIES.split(",")]
    assert [(each.policy, each.kernels) for each in asked[:2]] == [("fifo", "peft"), ("fifo", "tlora")] and asked[
        -1
    ].policy == "residual_capacity"


def test_every_option_is_handed_on(monkeypatch: pytest.MonkeyPatch, trace: str) -> None:
    options = (
        "--trace",
        trace,
        "--policy",
        "sjf,fifo/tlora, sjf/peft",
        "--kernels",
        "peft",
        "--seeds",
        "0-1,5",
        "--nodes",
        "4x4",
        "--gpus",
        "16",
    )
    options += (
        "--load",
        "0.5",
        "--jobs",
        "3",
        "--paper",
        "--gpu",
        "h200",
        "--truth-error",
        "0.15",
        "--length-error",
        "0.1",
        "--drift",
        "0.2",
    )
    asked = asked_of(monkeypatch, *options, "--delay", "0.5", "--mtbf-hours", "300", "--usage-half-life-seconds", "3600")
    conditions = Conditions(speed_error=0.15, length_error=0.1, drift=0.2, delay=0.5, mtbf_hours=300.0, usage_half_life_seconds=3600.0)
    policies = (("sjf", "peft"), ("fifo", "tlora"))  # the third is the first
    assert asked == [
        Scenario(trace, *policy, 4, 4, "h200", 0.5, 3, seed, paper=True, conditions=conditions) for seed in (0, 1, 5) for policy in policies
    ]
    assert {(each.nodes, each.gpus_per_node) for each in asked_of(monkeypatch, "--trace", trace, "--policy", "fifo", "--gpus", "4")} == {
        (1, 4)
    }
    assert {each.num_gpus for each in asked_of(monkeypatch, "--trace", trace, "--policy", "fifo", "--nodes", "3x8")} == {24}
    assert [each.seed for each in asked_of(monkeypatch, "--trace", trace, "--policy", "fifo", "--seed", "7")] == [7]


@pytest.mark.parametrize(
    "options, told",
    [
        (("--policy", "fifo,bakfill"), "error: policy 'bakfill': there is no such policy; did you mean 'backfill'?"),
        (("--policy", "fifo/pef"), "did you mean 'peft'?"),
        (("--policy", ""), "error: policy '': there is no such policy"),
        (("--gpus", "1000001"), "error: 1,000,001 GPUs are too many to simulate. Give at most 1,000,000"),
        (("--delay", "1e300"), "error: delay is 1e+300"),
        (("--seeds", "0-100000000000"), "error: --seeds 0-100000000000: a range goes up, such as 0-2, and has at most 100,000 seeds"),
        (("--seed", "9" * 16), "error: --seed 9999999999999999: write whole numbers of at most 15 digits"),
        (("--trace", "~nobody-of-this-name/x"), "error: trace '~nobody-of-this-name/x': there is neither such a file"),
        (("--trace", "x" * 300), "there is neither such a file"),
        (("--trace", "."), "error: trace '.': is a directory. Give a file in it, such as a cluster's events.jsonl"),
        (("--html", "x" * 300), "cannot be written (File name too long)"),
        (("--html", "/dev/null"), "error: /dev/null cannot be written (it is no plain file"),
        (("--csv", "taken"), "error: taken/jobs.csv cannot be written (it is a directory)"),
        (("--trace", "ee9e8d"), "error: trace 'ee9e8d': there is neither such a file nor such a shipped trace; did you mean 'ee9e8c'?"),
        (("--gpu", "h20"), "did you mean 'h200'?"),
        (("--kernels", "plain"), "error: kernels 'plain': there are no constants of it; known here: peft, tlora"),
        (("--gpus", "100"), "error: 100 GPUs are no whole number of nodes of 8"),
        (("--gpus", "64", "--nodes", "16x8"), "error: --gpus 64 and --nodes 16x8 disagree: 16x8 are 128 GPUs"),
        (("--nodes", "16"), "error: nodes '16': write their number, an x"),
        (("--seeds", "2-0"), "error: --seeds 2-0: a range goes up"),
        (("--seeds", "a"), "error: --seeds a: write whole numbers"),
        (("--load", "0"), "error: load 0: it is the share of the GPUs"),
        (("--truth-error", "2"), "error: truth_error is 2: "),
        (("--html", "."), "error: . cannot be written (it is a directory)"),
        (("--csv", "small.csv"), "error: small.csv/metrics.csv cannot be written"),
        (("--sweep", "laod=1", "--out", "rows.csv"), "error: sweep 'laod': there is no such axis; did you mean 'load'?"),
        (("--sweep", "load=1", "--out", "rows.txt"), "error: out rows.txt: a sweep is written as .csv or .parquet"),
        (("--sweep", "load=1", "--out", "other.csv"), "error: other.csv is not the table of a sweep"),
        (("--sweep", "load=1"), "--out where its rows go; give both or neither"),
        (("--out", "rows.csv"), "--out where its rows go; give both or neither"),
        (("--seed", "1", "--seeds", "0-1"), "give one of the two"),
        (("--polcy", "fifo"), "--policy"),
        (("--jobs", "0"), "greater than or equal to 1"),
    ],
)
def test_errors_are_one_message_and_code_2(trace: str, options: tuple[str, ...], told: str) -> None:
    Path("taken/jobs.csv").mkdir(parents=True)
    Path("other.csv").write_text("a,b\n1,2\n")
    arguments = [*options, *(() if "--trace" in options else ("--trace", trace)), *(() if "--policy" in options else ("--policy", "fifo"))]
    code, out, err = call(*arguments, columns=200)
    assert code == 2 and told in err and not out
    assert not err.startswith("error: ") or err.count("\n") == 1


@pytest.mark.parametrize(
    "options, told",
    [
        (("--html", "small.csv"), "--html small.csv is the file of --trace too, whose content would be lost. Give another path"),
        (("--html", "up/../link.csv"), "--html up/../link.csv is the file of --trace too"),
        (("--csv", "logs"), "--csv logs/jobs.csv is the file of --trace too"),
        (("--sweep", "load=1", "--out", "small.csv"), "--out small.csv is the file of --trace too"),
        (("--sweep", "load=1", "--out", "s.csv", "--html", "s.csv"), "--out s.csv is the file of --html too"),
        (("--sweep", "load=1", "--out", "new/metrics.csv", "--csv", "new"), "--out new/metrics.csv is the file of --csv too"),
    ],
)
def test_a_result_never_replaces_the_trace_or_another_result(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "jobs.csv").symlink_to("../small.csv")
    (tmp_path / "link.csv").symlink_to(trace)
    monkeypatch.setattr(run, "run_scenarios", pytest.fail)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}
    code, out, err = call("--trace", trace, "--policy", "fifo", *options)
    assert code == 2 and told in err and err.count("\n") == 1 and not out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.csv")} == before


def test_what_is_printed(trace: str) -> None:
    code, out, err = call("--trace", trace, "--nodes", "1x8", "--policy", "fifo/peft,fifo,backfill", "--seeds", "0-1")
    lines = out.splitlines()
    assert code == 0 and not err
    assert lines[0].startswith("4 jobs of small.csv on 8 GPUs (1 node of 8, h200), load ") and lines[0].endswith("as recorded, seeds 0, 1")
    heads = [text.strip() for text in lines[1].split("  ") if text.strip()]
    assert heads[:8] == ["policy", "mean JCT", "gain", "median", "p90", "p99", f"{TIMES}bound", "queued"] and "useful" in heads
    assert [line.split()[0] for line in lines[2:5]] == ["fifo/peft", "fifo", "backfill"]
    assert f"1.00{TIMES}" in lines[2] and "(" in lines[4]
    assert "gain: mean JCT of fifo/peft over that of the policy, mean of the seeds 0, 1 (lowest to highest)" in lines
    assert sum(line.startswith("lower bounds with the kernels ") for line in lines) == 2
    (extrapolated,) = (line for line in lines if line.startswith("extrapolated, not measured: "))
    assert "exchange_between_nodes_seconds (tlora, peft)" in extrapolated and "--sweep scale." in lines[-1]
    narrow = call("--trace", trace, "--nodes", "1x8", "--policy", "fifo/peft", columns=80)[1].splitlines()
    assert (
        len(narrow[1]) <= 80
        and "p90" not in narrow[1]
        and all(head in narrow[1] for head in ("gain", "p99", f"{TIMES}bound", "beyond", "useful"))
    )


def test_a_decomposition_is_printed_and_written(trace: str) -> None:
    code, out, _ = call("--trace", trace, "--nodes", "1x8", "--policy", "decomposition", "--quiet", "--json", "found.json")
    found = json.loads(Path("found.json").read_text())
    assert (
        code == 0
        and len(found["rows"]) == len(CHAIN)
        and [each["means"] for each in found["decomposition"]] == [each for _, each in CHAIN[1:]]
    )
    (line,) = (line for line in out.splitlines() if line.startswith("gain of residual_capacity: "))
    assert all(f" {each['means']} {each['factor']:.2f}" in line for each in found["decomposition"])
    assert math.prod(each["factor"] for each in found["decomposition"]) == pytest.approx(found["rows"][-1]["gain"])
    for row in found["rows"]:
        bases = [each for each in found["by_base"] if each["name"] == row["name"]]
        assert bases and sum(each["jobs_done"] for each in bases) == row["jobs_done"]
        assert all(each["gpu_seconds"] > 0 and each["tokens_per_gpu_second"] > 0 for each in bases)


def test_a_closed_sweep_shows_throughput_over_the_bound(trace: str, tmp_path: Path) -> None:
    options = ("--trace", trace, "--nodes", "1x8", "--closed", "--policy", "fifo/peft,residual_capacity", "--quiet")
    code, out, _ = call(*options, "--sweep", "delta=1.2:2:inf", "--out", "rows.csv", "--html", "page.html")
    lines = out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("tokens/s from 5 to 60 %"))
    assert code == 0 and [line.split()[0] for line in lines[at - 3 : at]] == ["1.2", "2", "inf"]
    assert lines[at - 4].split()[:3] == ["delta", "fifo/peft:", "tokens/s"]
    assert all(float(row["steady_tokens_per_second"]) > 0 and row["closed"] == "1" for row in rows_of(Path("rows.csv")))
    assert "Throughput against the bound" in Path("page.html").read_text()
    code, out, err = call(*options, "--load", "0.5")
    assert code == 2 and not out and "with --closed all jobs are submitted at once" in err
    assert "4 jobs of small.csv on 8 GPUs (1 node of 8, h200), all at once, seed 0" in call(*options)[1]


def test_jobs_that_can_never_run_are_told(trace: str) -> None:
    code, out, _ = call("--trace", trace, "--nodes", "1x4", "--policy", "fifo", "--quiet")
    assert code == 0 and "fifo: without 1 rejected job\n" in out
    assert "warning: 1 of 4 jobs, " in out and "'a', the first: it asks for 8 GPUs and the cluster has 4. Ask for fewer" in out
    code, out, _ = call("--trace", trace, "--policy", "fifo", "--quiet", "--sweep", "gpus=8:4", "--nodes", "1x4", "--out", "rows.csv")
    assert code == 0 and "warning: rejected jobs (load counts the others only): gpus 4: 1" in out
    code, out, err = call("--trace", trace, "--nodes", "1x1", "--jobs", "1")
    assert code == 2 and not out and err.startswith("error: no job of this trace can run on this cluster. 'a', the first, is rejected: ")
    assert err.endswith("Ask for fewer; or simulate other GPUs (--gpus, --nodes, --memory-limit)\n")


def test_options_that_axes_replace_are_said(trace: str) -> None:
    options = ("--trace", trace, "--nodes", "1x8", "--sweep", "policy=fifo:backfill", "--out", "rows.csv", "--quiet")
    code, out, err = call(*options, "--policy", "sjf", "--seed", "1")
    assert code == 0 and "sjf" not in out
    assert err == "warning: --policy is replaced by the axis policy= in the sweep, and so is not used\n"
    assert call(*options)[2] == ""
    assert call(*options, "--policy", "sjf", "--html", "page.html")[2].endswith("in the sweep; it holds for the plain replay only\n")


def test_files_are_the_same_bytes_for_the_same_seed(trace: str, tmp_path: Path) -> None:
    options = ("--trace", trace, "--nodes", "1x8", "--policy", "fifo/peft,backfill", "--truth-error", "0.15")
    for name in ("one", "two"):
        code, out, _ = call(*options, "--csv", name, "--html", f"{name}/page.html")
        assert code == 0 and f"written: {name}/metrics.csv\nwritten: {name}/jobs.csv\nwritten: {name}/page.html\n" in out
    for name in ("metrics.csv", "jobs.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    metrics, jobs = rows_of(tmp_path / "one" / "metrics.csv"), rows_of(tmp_path / "one" / "jobs.csv")
    assert [(row["policy"], row["kernels"]) for row in metrics] == [("fifo", "peft"), ("backfill", "tlora")]
    assert not {"wall_seconds", "decision_milliseconds"} & set(metrics[0])
    assert [row["job_id"] for row in jobs] == ["a", "b", "c", "d"] * 2
    page = (tmp_path / "one" / "page.html").read_text()
    assert "small" in page and "residual" not in page and "extrapolated" in page
    for name in ("one", "two"):
        code, out, _ = call(*options, "--seeds", "0-1", "--json", f"{name}/found.json")
        assert code == 0 and f"written: {name}/found.json\n" in out
    assert (tmp_path / "one" / "found.json").read_bytes() == (tmp_path / "two" / "found.json").read_bytes()
    found = json.loads((tmp_path / "one" / "found.json").read_text())
    assert found["seeds"] == [0, 1] and [row["name"] for row in found["rows"]] == ["fifo/peft", "backfill/tlora"]
    assert found["reference"] == "fifo/peft" and found["rows"][0]["gain"] == 1 and found["decomposition"] == []
    assert not {"wall_seconds", "decision_milliseconds"} & set(found["rows"][0])
    call(*options, "--csv", "three", "--seed", "1")
    assert (tmp_path / "three" / "jobs.csv").read_bytes() != (tmp_path / "one" / "jobs.csv").read_bytes()


def test_a_sweep_and_its_page(trace: str, tmp_path: Path) -> None:
    options = (
        "--trace",
        trace,
        "--nodes",
        "1x8",
        "--policy",
        "fifo/peft,backfill",
        "--sweep",
        "load=0.5:0.9,delta=2:inf",
        "--out",
        "s/rows.csv",
    )
    code, out, _ = call(*options)
    lines = out.splitlines()
    assert code == 0 and [text.strip() for text in lines[0].split("  ") if text.strip()] == [
        "load",
        "delta",
        "fifo/peft: mean JCT",
        "backfill",
    ]
    assert [line.split()[:2] for line in lines[1:5]] == [["0.5", "2"], ["0.5", "inf"], ["0.9", "2"], ["0.9", "inf"]]
    assert lines[-2] == "small.csv: mean JCT of fifo/peft over that of each policy, seed 0" and lines[-1] == "8 rows: s/rows.csv"
    rows = rows_of(tmp_path / "s" / "rows.csv")
    assert len(rows) == 8 and {row["load"] for row in rows} == {"0.5", "0.9"}
    code, again, _ = call(*options, "--html", "page.html")
    assert code == 0 and again.startswith(out) and "4 jobs of small.csv" in again  # the page needs the replay as well
    assert "Gain against load" in (tmp_path / "page.html").read_text()


def test_the_factors_of_several_seeds_make_the_gain_that_is_printed(trace: str) -> None:
    policies = "fifo/peft,fifo,residual_capacity"
    code, out, _ = call("--trace", trace, "--nodes", "1x8", "--policy", policies, "--seeds", "0-2", "--quiet", "--json", "found.json")
    found = json.loads(Path("found.json").read_text())
    product, gain = math.prod(each["factor"] for each in found["decomposition"]), found["rows"][-1]["gain"]
    assert code == 0 and product == pytest.approx(gain) and f"gain of residual_capacity: {gain:.2f} = " in out


@pytest.mark.slow
def test_settings_at_their_bounds_are_simulated(trace: str) -> None:
    axes = "load=0.001:10,kappa=0.001:1000"
    options = ("--delay", "10", "--mtbf-hours", "0.1", "--seed", "9" * 15, "--out", "rows.csv")
    code, out, _ = call("--trace", trace, "--nodes", "2x8", "--policy", "residual_capacity", "--sweep", axes, *options)
    assert code == 0 and out.endswith("4 rows: rows.csv\n")


KILLED_AFTER_3_ROWS = """
import os, signal, sys
from tlora.cli import main
from tlora.sim import sweep
write_table = sweep.write_table
def write_and_die(path, rows):
    write_table(path, rows)
    if len(rows) == 3:
        os.killpg(0, signal.SIGKILL)
sweep.write_table = write_and_die
main()
"""


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_kill(tmp_path: Path) -> None:
    def command(out: str) -> list[str]:
        trace = ["--trace", "ee9e8c", "--jobs", "60", "--policy", "fifo/peft,sjf"]
        return [sys.executable, "-m", "tlora", "simulate", *trace, "--sweep", "load=0.5..1.1/10", "--out", out, "--quiet"]

    killed = [sys.executable, "-c", KILLED_AFTER_3_ROWS, *command("rows.csv")[3:]]
    assert subprocess.run(killed, cwd=tmp_path, start_new_session=True, check=False).returncode == -signal.SIGKILL
    path = tmp_path / "rows.csv"
    there = rows_of(path)
    assert len(there) == 3 and all(row["mean_jct_seconds"] for row in there)
    for out in ("rows.csv", "whole.csv"):
        done = subprocess.run(command(out), cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.endswith(f"20 rows: {out}\n") and not done.stderr
    assert path.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_ctrl_c_tells_how_to_go_on(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tlora.sim.sweep.write_table", interrupt)
    code, _, err = call("--trace", trace, "--policy", "fifo", "--sweep", "load=0.5", "--out", "rows.csv")
    assert code == 130 and "finished simulations are in rows.csv" in err


def test_a_bar_in_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    standings = [TaskProgress(4, 2, (2, 3)), TaskProgress(4, 3, (3,)), TaskProgress(4, 4, ())]
    names = ["fifo seed 0", "sjf seed 0", "fifo seed 1", "sjf seed 1"]
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False, _environ={"TERM": "xterm"})
    with progress_shown(terminal, names) as watch:
        for standing in standings:
            watch(standing)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in shown for text in ("0/4", "2/4", "fifo seed 1, sjf seed 1", "3/4", "left: sjf seed 1", "4/4"))
    seconds = iter((0.0, 5.0, 12.0, 30.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    plain = Console(file=io.StringIO(), width=120)
    with progress_shown(plain, names) as watch:
        for standing in standings:
            watch(standing)
    assert plain.file.getvalue() == "[12.0 s] 3 of 4 simulated; now sjf seed 1\n"  # type: ignore[attr-defined]
    with progress_shown(None, names) as watch:
        watch(standings[0])
