"""What users get wrong: one clear message with the value, the rule and the remedy; the other jobs are trained; nothing half-written."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import tlora
from tests.engine.test_crash import fork
from tests.engine.tiny_runs import job, run_spec, sha256, train
from tests.small_disks import mounted, resize
from tlora import durable
from tlora.cli import commands
from tlora.engine import train as front_door
from tlora.engine.check import check
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError, ModelError
from tlora.store.run_directory import check_run_directory, lock_directory, write_run_file


def bad_files(directory: Path) -> dict[str, tuple[Any, list[str]]]:
    """Name -> (data, what the reason must say)."""

    def write(name: str, content: bytes | str) -> str:
        path = directory / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    row = '{"prompt": "red", "completion": "boat"}\n'
    line = json.dumps({"prompt": "red", "completion": "boat " * 210_000}) + "\n"
    return {
        "missing": (str(directory / "nowhere.jsonl"), ["nowhere.jsonl"]),
        "empty": (write("empty.jsonl", ""), ["empty.jsonl"]),
        "broken": (write("broken.jsonl", row + '{"prompt": "red", "compl\n'), ["broken.jsonl", "2"]),
        "wrong-format": ({"path": write("pairs.jsonl", row), "format": "chat"}, ["pairs.jsonl", "messages"]),
        "unknown-fields": (write("odd.jsonl", '{"frage": "a", "antwort": "b"}\n'), ["odd.jsonl", "frage"]),
        "numbers": (write("numbers.csv", "value\n1\n2\n3\n"), ["numbers.csv", "value"]),
        "number-text": (write("number.jsonl", '{"text": 17}\n'), ["number.jsonl", "17", "text"]),
        "not-utf8": (write("latin.jsonl", row.encode() + b'{"prompt": "gr\xfcn", "completion": "boat"}\n'), ["latin.jsonl", "UTF-8"]),
        "beyond": (write("ids.jsonl", '{"input_ids": [5, 6, 99999], "labels": [5, 6, 99999]}\n'), ["ids.jsonl", "99999"]),
        "negative": (write("minus.jsonl", '{"input_ids": [5, -6, 7], "labels": [5, -6, 7]}\n'), ["minus.jsonl", "-6"]),
        "no-target": (write("mute.jsonl", '{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}\n'), ["mute.jsonl"]),
        "extension": (write("rows.exe", b"MZ\x00\x01" * 50), ["rows.exe"]),
        "all-held-out": ({"path": write("two.jsonl", row * 2), "eval_size": 2}, ["two.jsonl", "eval_size 2"]),
        "broken-evaluation": ({"path": write("fine.jsonl", row * 4), "eval_path": str(directory / "no-eval.jsonl")}, ["no-eval.jsonl"]),
        "template": ({"path": write("t.jsonl", row), "chat_template": str(directory / "no.jinja")}, ["no.jinja"]),
        "long-line": ({"path": write("long.jsonl", row + line), "max_length": 64}, []),  # no mistake: cut, and said so
    }


@pytest.fixture(scope="module")
def alone(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("alone")
    train(base, out, [job("good", str(data / "a.jsonl"))], deterministic=True)
    return sha256(out / "good")


def test_each_bad_file_fails_its_job_alone(base: Path, data: Path, tmp_path: Path, alone: str) -> None:
    bad = bad_files(tmp_path)
    jobs = [job(name, own) for name, (own, _) in bad.items()]
    jobs.insert(3, job("good", str(data / "a.jsonl")))
    notes: list[str] = []
    results = train(base, tmp_path / "out", jobs, deterministic=True, watcher=Watcher(note=notes.append))
    assert results["good"].status == "done" and sha256(tmp_path / "out" / "good") == alone
    for name, (_, parts) in bad.items():
        result, left = results[name], {path.name for path in (tmp_path / "out" / name).iterdir()}
        print(f"{name}: {result.reason}")
        if not parts:
            assert result.status == "done", result
            continue
        assert result.status == "failed" and all(part in result.reason for part in parts), result.reason
        assert "Traceback" not in result.reason and "\n" not in result.reason and 20 < len(result.reason) < 600, result.reason
        assert left == {"result.json"}, left
        assert sum(f"{name} failed" in note for note in notes) == 1
    assert (tmp_path / "out" / "report.html").exists()
    found = check(run_spec(base, tmp_path / "checked", jobs))
    assert {j.name for j in found.jobs if j.problems} == {name for name, (_, parts) in bad.items() if parts}
    assert not (tmp_path / "checked").exists()


def test_a_file_that_is_mended_is_trained_by_resume(base: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    jobs = [job("good", str(data / "a.jsonl")), job("late", str(path))]
    assert train(base, tmp_path / "out", jobs)["late"].status == "failed"
    before = sha256(tmp_path / "out" / "good")
    path.write_text((data / "b.jsonl").read_text())
    results = train(base, tmp_path / "out", jobs, resume=True)
    assert (results["late"].status, results["late"].steps) == ("done", 6)
    assert results["good"].status == "done" and sha256(tmp_path / "out" / "good") == before


def test_targets_and_ranks(base: Path, data: Path, tmp_path: Path) -> None:
    path, notes = str(data / "b.jsonl"), list[str]()
    jobs = [
        job("typo", path, target_modules=["q_prj"]),
        job("head", path, target_modules=["lm_head"]),
        job("pattern", path, rank_pattern={"nothing_proj": 4}),
        job("high", path, r=200),
        job("good", path),
    ]
    results = train(base, tmp_path / "out", jobs, watcher=Watcher(note=notes.append))
    assert [r.status for r in results.values()] == ["failed", "failed", "failed", "done", "done"]
    for part in (
        "'q_prj' is not in this base model",
        "Did you mean q_proj?",
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    ):
        assert part in results["typo"].reason
    assert "'nothing_proj'" in results["pattern"].reason
    assert sum("high: rank 200 is larger than" in note for note in notes) == 1
    for rank in (0, -3, 257):
        with pytest.raises(ValueError, match=r"r\b[\s\S]*equal to"):
            tlora.JobSpec.model_validate(job("x", path, r=rank))


def test_an_output_directory_that_is_in_use(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, out = [job("a", str(data / "b.jsonl"))], tmp_path / "out"
    train(base, out, jobs)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"holds an earlier run.*--resume.*--overwrite"):
        train(base, out, jobs)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "mine.txt").write_text("keep me")
    assert train(base, out, [job("b", str(data / "b.jsonl"), r=2)], overwrite=True)["b"].status == "done"
    assert (out / "mine.txt").exists() and not (out / "a").exists()
    monkeypatch.delattr(front_door, "load")  # it is refused before the base is loaded
    with pytest.raises(ConfigError, match=r"b: r was 2 and is 3"):
        train(base, out, [job("b", str(data / "b.jsonl"), r=3)], resume=True)


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_directory_that_a_run_holds_is_refused_before_a_base_is_loaded(options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Also while that run has written nothing. Runs that only look do not refuse each other."""
    run = run_spec(tmp_path / "base", tmp_path / "out", [job("a", str(data / "b.jsonl"))])
    (tmp_path / "out").mkdir()
    with lock_directory(tmp_path / "out"), pytest.raises(ConfigError, match="is in use by another run"):
        check_run_directory(run, options.get("resume", False), options.get("overwrite", False))
    with lock_directory(tmp_path / "out", fcntl.LOCK_SH):
        check_run_directory(run, options.get("resume", False), options.get("overwrite", False))


@pytest.mark.parametrize(("has", "whose", "remedy"), [((), "cluster", "tlora cluster"), (("bases", "tokens"), "server", "tlora submit")])
def test_a_directory_of_a_cluster_or_a_server_is_said_to_be_one(has: tuple[str, ...], whose: str, remedy: str, tmp_path: Path) -> None:
    for name in ("jobs", "workers", *has):
        (tmp_path / "out" / name).mkdir(parents=True)
    run = run_spec(tmp_path / "base", tmp_path / "out", [job("a", str(tmp_path / "a.jsonl"))])
    for options in ((False, False), (True, False), (False, True)):
        with pytest.raises(ConfigError, match=rf"belongs to a {whose} of tlora, .*Train there with `{remedy}`.*, or choose another"):
            check_run_directory(run, *options)


def test_a_run_may_have_jobs_that_are_called_as_a_clusters_directories(tmp_path: Path) -> None:
    """And be called so itself, beside directories of another use."""
    run = run_spec(tmp_path / "base", tmp_path / "jobs", [job(name, str(tmp_path / "a.jsonl")) for name in ("jobs", "workers")])
    for path in (tmp_path / "workers", *(tmp_path / "jobs" / spec.name for spec in run.jobs)):
        path.mkdir(parents=True)
    write_run_file(tmp_path / "jobs", run, {"status": "stopped"})
    check_run_directory(run, resume=True, overwrite=False)
    check_run_directory(run, resume=False, overwrite=True)


def test_the_jobs_of_a_cluster_are_no_run(base: Path, data: Path, tmp_path: Path) -> None:
    """Each has what a run's jobs have, and another run would go on with them or delete them."""
    jobs, out = [job("a", str(data / "b.jsonl"))], tmp_path / "out" / "jobs"
    train(base, out, jobs)
    (out / "run.json").unlink()
    (tmp_path / "out" / "workers").mkdir()
    (tmp_path / "out" / "events.jsonl").touch()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=rf"output_dir {out} belongs to a cluster of tlora, which schedules the jobs in {out}\."):
            train(base, out, jobs, **options)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_directory_of_somebody_else_is_never_touched(base: Path, data: Path, tmp_path: Path) -> None:
    jobs = [job("a", str(data / "b.jsonl"))]
    (tmp_path / "thesis" / "a").mkdir(parents=True)
    (tmp_path / "thesis" / "a" / "chapter.tex").write_text("years of work")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=r"is no run of tlora. Choose another"):
            train(base, tmp_path / "thesis", jobs, **options)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["chapter.tex"]
    with pytest.raises(ConfigError, match="is a file"):
        train(base, tmp_path / "thesis" / "a" / "chapter.tex", jobs)
    with pytest.raises(ConfigError, match="is a file"):
        train(base, tmp_path / "thesis" / "a" / "chapter.tex" / "out", jobs)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link is a symbolic link to nothing"):
        train(base, tmp_path / "link", jobs)
    with pytest.raises(ConfigError, match="a name in it has 300 bytes, and may have 255"):
        train(base, tmp_path / ("n" * 300), jobs)


def test_no_base_model_leaves_nothing_behind(base: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "nowhere", tmp_path / "empty", "no-such-org/no-such-model"):
        with pytest.raises(ModelError, match=str(wrong)) as caught:
            train(Path(wrong), tmp_path / "out", [job("a", str(data / "b.jsonl"))])
        print(caught.value)
        assert not (tmp_path / "out").exists()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in base.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"broken: cannot be loaded"):
        train(broken, tmp_path / "out", [job("a", str(data / "b.jsonl"))])
    assert not list((tmp_path / "out").rglob("adapter*"))


def test_a_job_that_cannot_fit_says_what_it_needs(base: Path, data: Path, tmp_path: Path) -> None:
    small, large = job("small", str(data / "b.jsonl"), r=1), job("large", str(data / "b.jsonl"), r=256)
    limit = check(run_spec(base, tmp_path, [small])).predicted_bytes + 1000
    results = train(base, tmp_path / "out", [large, small], memory_limit=limit)
    assert (results["large"].status, results["small"].status) == ("failed", "done")
    for part in ("job 'large' needs", "adapter", "and the limit is", "Lower max_length, token_budget or r, or raise memory_limit"):
        assert part in results["large"].reason


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["400k", *(pytest.param(size, marks=pytest.mark.slow) for size in ("300k", "700k", "1300k"))])
def test_a_full_disk_corrupts_nothing_and_resume_ends_it(base: Path, data: Path, tmp_path: Path, alone: str, size: str) -> None:
    """The small job may or may not fit; the large one's adapter (234 KiB) is saved wherever it does, its checkpoints (0.7 MiB) or not. With
    room, resume ends with the adapters of an undisturbed run.
    """
    large = job("large", str(data / "a.jsonl"), r=64, save_steps=1)
    jobs = [large, job("good", str(data / "a.jsonl"))]
    train(base, tmp_path / "whole", jobs, deterministic=True)
    with mounted(tmp_path / "disk", f"size={size}") as disk:
        out, notes = disk / "out", list[str]()
        results = train(base, out, jobs, deterministic=True, watcher=Watcher(note=notes.append))
        assert results["large"].status == ("failed" if size == "300k" else "done"), results["large"]
        assert "No space left on device" in results["large"].reason + "".join(notes)
        for name, result in results.items():
            for kept in (out / name).glob("checkpoint-*"):
                durable.verify(kept)
            assert not [path for path in (out / name).iterdir() if path.name.startswith("tmp-")]
            assert result.status == "failed" or sha256(out / name) == (alone if name == "good" else sha256(tmp_path / "whole" / name))
        resize(disk, "64m")
        again = train(base, out, jobs, deterministic=True, resume=True)
        assert [r.status for r in again.values()] == ["done", "done"], again
        assert all(sha256(out / name) == sha256(tmp_path / "whole" / name) for name in again)
        assert [json.loads(line)["step"] for line in (out / "large" / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_no_write_permission(base: Path) -> None:
    with tempfile.TemporaryDirectory() as found:
        Path(found).chmod(0o555)

        def as_nobody() -> None:
            if os.geteuid() == 0:
                os.seteuid(65534)
            try:
                check_run_directory(run_spec(base, Path(found) / "out", [job("a", "b.jsonl")]), resume=False, overwrite=False)
            except ConfigError as error:
                os._exit(9 if "is read-only for you" in str(error) and "where you may write" in str(error) else 1)

        assert os.waitstatus_to_exitcode(os.waitpid(fork(as_nobody), 0)[1]) == 9


# -- through the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, which has loaded the libraries already. `Result.output` is stdout and stderr."""
    monkeypatch.setattr(commands, "_load_libraries", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(commands.app, [str(arg) for arg in args])
