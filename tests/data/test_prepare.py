"""The whole way through a process of its own: several jobs, their errors, and whatever kills or hangs that process."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import LLAMA3

from tests.process_hooks import hold_rows
from tlora.data import build as build_module
from tlora.data import prepare as prepare_module
from tlora.data import worker as worker_module
from tlora.data.dataset import find_damage
from tlora.data.order import split
from tlora.data.prepare import Prepared, PrepareProgress, prepare
from tlora.data.request import PREPARE_MESSAGES, DataLimits, PrepareBatch, PrepareEvent, PrepareFailed, PrepareRequest, SetsMade
from tlora.errors import DataError, ModelError
from tlora.job import DataConfig
from tlora.link.lines import Line

pytestmark = pytest.mark.usefixtures("forked_children")
ROWS = [{"instruction": f"What is {i}?", "output": f"It is {i * 7}."} for i in range(40)]
HANGS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(key: str, directory: Path, tokenizer_path: Path, data: dict[str, Any] | None = None, **more: Any) -> PrepareRequest:
    config = DataConfig.model_validate({"path": "x.jsonl"} | (data or {}))
    fields: dict[str, Any] = {"vocab_size": 1000, "cache_dir": directory / "cache", "base_dir": directory} | more
    return PrepareRequest(key=key, data=config, tokenizer_path=str(tokenizer_path), **fields)


def sets_in(directory: Path) -> list[str]:
    """Names in the cache; whatever is there must be whole."""
    names = sorted(path.name for path in (directory / "cache").iterdir() if path.name != "known")
    assert all(find_damage(directory / "cache" / name, 1000) is None for name in names), names
    return names


def good(result: Prepared | DataError) -> Prepared:
    assert isinstance(result, Prepared), result
    return result


def bad(result: Prepared | DataError) -> str:
    assert isinstance(result, DataError), result
    return str(result)


def test_many_jobs_in_one_go(tmp_path: Path, tokenizer_path: Path) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    write(tmp_path / "other.jsonl", ROWS[:5])
    (tmp_path / "broken.json").write_text('[{"text": "a"}, {"text": }]')
    write(tmp_path / "ids.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1, 10**6]}])
    (tmp_path / "t.jinja").write_text(LLAMA3)
    (tmp_path / "odd.jinja").write_text("{% if %}")
    jobs: dict[str, dict[str, Any]] = {
        "plain": {},
        "missing": {"path": "y.jsonl"},
        "again": {},
        "split": {"eval_size": 0.25, "eval_seed": 1},
        "broken": {"path": "broken.json"},
        "ids": {"path": "ids.jsonl"},
        "other": {"eval_path": "other.jsonl"},
        "uncut": {"chat_template": "t.jinja"},
        "template": {"chat_template": "t.jinja", "max_length": 24},
        "odd": {"chat_template": "odd.jinja"},
        "bad-eval": {"eval_path": "broken.json"},
        "all-eval": {"eval_size": 40},
    }
    results = prepare([request(key, tmp_path, tokenizer_path, data) for key, data in jobs.items()])
    assert list(results) == list(jobs)
    assert "y.jsonl: no such file or directory" in bad(results["missing"])
    assert bad(results["bad-eval"]) == bad(results["broken"]) and "broken.json, row 2: broken JSON" in bad(results["broken"])
    assert "ids.jsonl, line 2: token id 1000000 is beyond" in bad(results["ids"])
    assert "the chat template refuses" in bad(results["odd"])
    assert bad(results["all-eval"]).startswith("x.jsonl: eval_size 40 takes 40 of 40 samples")

    plain, again, parted, other, cut = (good(results[key]) for key in ("plain", "again", "split", "other", "template"))
    assert plain.train.directory == again.train.directory == parted.train.directory == other.train.directory != cut.train.directory
    assert len(plain.train) == 40 and plain.eval is None and plain.report.files == [str(tmp_path / "x.jsonl")]
    assert parted.eval is not None and (len(parted.train), len(parted.eval)) == (30, 10) and parted.report.samples == 40
    train_indices, eval_indices = split(40, 0.25, 1)
    for part, indices in ((parted.train, train_indices), (parted.eval, eval_indices)):
        assert all(np.array_equal(part[i].input_ids, plain.train[int(index)].input_ids) for i, index in enumerate(indices))
    assert other.eval is not None and len(other.eval) == 5 and other.eval_report is not None and other.eval_report.rows == 5
    over = np.maximum(good(results["uncut"]).train.lengths - 24, 0)  # the last tokens of each are trained
    assert cut.report.truncated == np.count_nonzero(over) > 0 and cut.report.trained_tokens_lost == over.sum()
    assert cut.train.lengths.max() == 24
    assert len(sets_in(tmp_path)) == 4


def test_evaluation_rows_that_are_training_rows_are_said(tmp_path: Path, tokenizer_path: Path) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    write(tmp_path / "own.jsonl", [{"instruction": "Is it new?", "output": "Yes."}])
    write(tmp_path / "some.jsonl", [*ROWS[:3], {"instruction": "Is it new?", "output": "Yes."}])
    write(tmp_path / "twice.jsonl", ROWS + ROWS)
    jobs: dict[str, dict[str, Any]] = {
        "own": {"eval_path": "own.jsonl"},
        "same": {"eval_path": "x.jsonl"},
        "some": {"eval_path": "some.jsonl"},
        "split": {"eval_size": 10},
        "twice": {"path": "twice.jsonl", "eval_size": 1},
    }
    found = prepare([request(key, tmp_path, tokenizer_path, data) for key, data in jobs.items()])
    said = {key: [line for line in good(result).warnings() if "training rows" in line] for key, result in found.items()}
    of_file = "so the eval loss is not of unseen data; give rows of their own as eval_path, or use eval_size in its place"
    assert said == {
        "own": [],
        "same": [f"40 of 40 evaluation rows are training rows too, {of_file} ({tmp_path / 'x.jsonl'})"],
        "some": [f"3 of 4 evaluation rows are training rows too, {of_file} ({tmp_path / 'some.jsonl'})"],
        "split": [],
        "twice": [
            "1 of 1 evaluation rows are training rows too, so the eval loss is not of unseen data; "
            f"remove repeated rows from the data ({tmp_path / 'twice.jsonl'})"
        ],
    }


@pytest.mark.parametrize("name", ["csv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("parquet", "json"))])
def test_containers_and_progress(name: str, tmp_path: Path, tokenizer_path: Path) -> None:
    rows = ROWS * 80
    path = tmp_path / f"x.{name}"
    if name == "csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif name == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))
    seen: list[PrepareProgress] = []
    result = good(prepare([request("job", tmp_path, tokenizer_path, {"path": path.name})], seen.append)["job"])
    assert result.report.rows == len(result.train) == 3200 and result.report.format == "alpaca"
    assert seen and all(report.key == "job" for report in seen)
    assert [report.rows for report in seen] == sorted(report.rows for report in seen) and 0 < seen[-1].share <= 1
    inode = result.train.directory.stat().st_ino
    again = good(prepare([request("job", tmp_path, tokenizer_path, {"path": path.name})])["job"])
    assert again.train.directory.stat().st_ino == inode and again.report == result.report


def test_a_job_that_hangs_fails_alone(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HurryOnceItHangs:
        """A worker may take long to start on a busy machine, so the wait is short only after the hanging job has begun."""

        encode = staticmethod(PREPARE_MESSAGES.encode)

        def decode(self, line: bytes) -> Any:
            event = PREPARE_MESSAGES.decode(line)
            monkeypatch.setattr(prepare_module, "STALL_SECONDS", 0.5 if event.key == "hangs" else 180.0)
            return event

    run_worker = prepare_module.run_worker

    def start_without_hurry(*arguments: Any) -> Any:
        monkeypatch.setattr(prepare_module, "STALL_SECONDS", 180.0)
        return run_worker(*arguments)

    monkeypatch.setattr(prepare_module, "PREPARE_MESSAGES", HurryOnceItHangs())
    monkeypatch.setattr(prepare_module, "run_worker", start_without_hurry)
    write(tmp_path / "x.jsonl", ROWS)
    (tmp_path / "hangs.jinja").write_text(HANGS)
    jobs: dict[str, dict[str, Any]] = {"first": {}, "hangs": {"chat_template": "hangs.jinja"}, "last": {"max_length": 64}}
    results = prepare([request(key, tmp_path, tokenizer_path, data) for key, data in jobs.items()])
    assert "x.jsonl: the data worker gave no sign of life for 0.5 seconds" in bad(results["hangs"])
    assert len(good(results["first"]).train) == len(good(results["last"]).train) == 40 and len(sets_in(tmp_path)) == 2


@pytest.mark.slow
def test_a_job_that_kills_its_worker_fails_alone_and_keeps_what_is_done(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    write(tmp_path / "large.jsonl", ROWS * 100)
    go_on = hold_rows(monkeypatch, tmp_path)
    cache, large = tmp_path / "cache", {"path": "large.jsonl"}
    run_worker, workers, killed = prepare_module.run_worker, list[prepare_module.DataWorker](), list[int]()

    def noted(worker: prepare_module.DataWorker, *arguments: Any) -> Any:
        workers.append(worker)
        return run_worker(worker, *arguments)

    def kill(progress: PrepareProgress) -> None:
        if progress.key == "killed" and any(cache.glob("tmp-set-*/progress.json")) and not killed:
            killed.append(workers[-1].process.pid)
            os.kill(killed[0], signal.SIGKILL)
            go_on()

    monkeypatch.setattr(prepare_module, "run_worker", noted)
    keys: dict[str, dict[str, Any]] = {"first": {}, "killed": large, "last": {}}
    results = prepare([request(key, tmp_path, tokenizer_path, data) for key, data in keys.items()], kill)
    assert len(workers) == 2 and killed == [workers[0].process.pid]
    assert "large.jsonl: the data worker was killed by signal 9" in bad(results["killed"])
    assert good(results["first"]).train.directory == good(results["last"]).train.directory
    (kept,) = cache.glob("tmp-*")
    done = json.loads((kept / "progress.json").read_text().partition("\n")[2])["counts"]["report"]["report"]["rows"]
    seen: list[int] = []
    again = good(prepare([request("killed", tmp_path, tokenizer_path, large)], lambda told: seen.append(told.rows))["killed"])
    assert 0 < done <= min(rows for rows in seen if rows) and len(again.train) == len(ROWS) * 100
    assert len(sets_in(tmp_path)) == 2


def test_ctrl_c_says_how_many_rows_are_kept(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    write(tmp_path / "large.jsonl", ROWS * 100)
    hold_rows(monkeypatch, tmp_path)
    jobs = [request("first", tmp_path, tokenizer_path), request("large", tmp_path, tokenizer_path, {"path": "large.jsonl"})]

    def interrupt_once(saved: bool) -> str:
        def tell(progress: PrepareProgress) -> None:
            if progress.rows and progress.key == "large" and (not saved or any((tmp_path / "cache").glob("tmp-set-*/progress.json"))):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as stop:
            prepare(jobs, tell)
        return str(stop.value)

    said = re.fullmatch(r"Interrupted: ([\d,]+) tokenized rows are kept; .*", interrupt_once(True))
    assert said is not None
    (kept,) = (tmp_path / "cache").glob("tmp-*")
    assert f'"rows": {said[1].replace(",", "")}, ' in (kept / "progress.json").read_text()
    assert interrupt_once(False).startswith("Interrupted: "), "of the earlier launch, if this one has saved nothing yet"


def test_a_job_behind_one_that_took_all_memory_is_prepared(tmp_path: Path, tokenizer_path: Path) -> None:
    """A small file of rows that are huge when they are unpacked. Arrow keeps what it has taken."""
    huge = pa.table({"text": pa.array(["x" * (20 << 20)] * 30, pa.large_string())})
    pq.write_table(huge, tmp_path / "bomb.parquet", compression="zstd", row_group_size=30)
    write(tmp_path / "x.jsonl", ROWS)
    limits = DataLimits(1 << 29, 120, 300.0, 100_000, 1000)
    jobs = [request(path, tmp_path, tokenizer_path, {"path": path}, limits=limits) for path in ("bomb.parquet", "x.jsonl")]
    found = prepare(jobs)
    assert len(good(found["x.jsonl"]).train) == len(ROWS)
    failed = found["bomb.parquet"]
    assert isinstance(failed, DataError) and "bomb.parquet: preparing takes more than 0.50 GiB of memory" in str(failed), failed


def test_tokenizer_that_cannot_be_loaded_is_the_runs_trouble(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: .*tokenizer.*tokenizer.json"):
        prepare([request("job", tmp_path, tmp_path / "empty")])


def test_worker_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ModelError, match=r"exit status 3 \(no such module\)"):
        prepare([request("job", tmp_path, tmp_path)])


def test_a_worker_that_is_killed_before_the_first_job_is_started_again_once(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be started long before there are requests, and killed meanwhile on a machine that is short of memory."""
    write(tmp_path / "x.jsonl", ROWS)
    jobs = [request("job", tmp_path, tokenizer_path)]
    run_worker, ends = prepare_module.run_worker, list[int | None]()

    def kill(worker: prepare_module.DataWorker, *arguments: Any) -> Any:
        if len(ends) < 2:
            worker.process.kill()
            ends.append(worker.process.exit_status)
        return run_worker(worker, *arguments)

    monkeypatch.setattr(prepare_module, "run_worker", kill)
    with pytest.raises(ModelError, match=r"the data worker was killed by signal 9.*, before the first job"):
        prepare(jobs)
    assert ends == [-9, -9]
    ends.pop()
    assert len(good(prepare(jobs)["job"]).train) == len(ROWS) and ends == [-9, -9]


@pytest.mark.slow
@pytest.mark.usefixtures("real_start")
def test_worker_runs_no_module_of_the_current_directory(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's that is named as a module is data like any other; what PYTHONPATH names still counts."""
    write(tmp_path / "x.jsonl", ROWS)
    for name in ("queue", "json", "tokenizers", "tlora"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'customized')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "named"))
    assert len(good(prepare([request("job", tmp_path, tokenizer_path)])["job"]).train) == 40
    assert not (tmp_path / "ran").exists() and (tmp_path / "customized").exists()


def test_worker_leaves_with_its_parent_and_holds_no_torch(tmp_path: Path, tokenizer_path: Path) -> None:
    """Started as `prepare` does it; when the line ends, as it does when the parent is killed, the worker ends in the middle of a job."""
    write(tmp_path / "x.jsonl", ROWS)
    (tmp_path / "hangs.jinja").write_text(HANGS)
    probe = (
        "import sys, tlora.data.worker as w; run = w.Worker.run\n"
        "def told(self, request):\n"
        "    heavy = [m for m, v in sys.modules.items() if m.split('.')[0] in ('torch', 'datasets', 'tensorflow') and v]\n"
        "    self.send(w.PrepareFailed('torch', ' '.join(heavy)))\n"
        "    return run(self, request)\n"
        "w.Worker.run = told; w.main()"
    )
    jobs = [request("job", tmp_path, tokenizer_path), request("hangs", tmp_path, tokenizer_path, {"chat_template": "hangs.jinja"})]
    ours, theirs = socket.socketpair()
    line = Line(ours)
    with subprocess.Popen([sys.executable, "-c", probe], stdin=theirs) as process:
        theirs.close()
        line.send(PREPARE_MESSAGES.encode(PrepareBatch(tuple(jobs))))
        told: list[Any] = []
        while len(told) < 3:
            event = PREPARE_MESSAGES.decode(line.read_line(600.0) or b"")
            told += [] if isinstance(event, PrepareProgress) else [event]
        assert [type(event) for event in told] == [PrepareFailed, SetsMade, PrepareFailed]
        assert told[0] == told[2] == PrepareFailed("torch", "")  # the second report comes after tokenizing
        line.close()
        assert process.wait(timeout=600) == 1


MEASURE = """
import json, resource, sys
from pathlib import Path
from tlora.data.prepare import *
directory, tokenizer = Path(sys.argv[1]), sys.argv[2]
for names in sys.argv[3:]:
    requests = [PrepareRequest(n, DataConfig(path=n), tokenizer, 1000, directory / "cache", directory) for n in names.split(",")]
    rows = [made.report.rows for made in prepare(requests).values()]
    print(json.dumps([rows, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


@pytest.mark.parametrize("count", [15_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(count: int, tmp_path: Path, tokenizer_path: Path) -> None:
    """Rows of 1 kB (as Python objects 3 kB) in each container: little more than 100 rows take."""
    row = json.dumps({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "note": "x" * 1000})
    for name, rows in (("small.jsonl", 100), ("large.jsonl", count)):
        with (tmp_path / name).open("w") as stream:
            stream.writelines(row + "\n" for _ in range(rows))
    with (tmp_path / "large.json").open("w") as stream:
        stream.write("[" + row)
        stream.writelines(",\n" + row for _ in range(count - 1))
        stream.write("]")
    pq.write_table(pa.Table.from_pylist([json.loads(row)] * (count // 10)), tmp_path / "large.parquet")
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(tokenizer_path), "small.jsonl", "large.jsonl,large.json,large.parquet"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    (few, base), (many, peak_kib) = (json.loads(line) for line in lines)
    assert few == [100] and many == [count, count, count // 10]
    # an offset and a sum a sample: 16 bytes, and the list's spare room
    assert peak_kib - base < 30 * 1024 + count * 24 / 1024, (base, peak_kib)


def test_a_damaged_set_is_made_again_and_told_to_one_job_of_its_sweep(tmp_path: Path, tokenizer_path: Path) -> None:
    write(tmp_path / "x.jsonl", ROWS)
    first = good(prepare([request("job", tmp_path, tokenizer_path)])["job"])
    tokens = first.train.directory / "tokens.bin"
    contents = tokens.read_bytes()
    tokens.write_bytes(contents[:-1] + b"\x7f")
    results = prepare([request(f"job-{i}", tmp_path, tokenizer_path) for i in range(5)])
    told = [warning for result in results.values() for warning in good(result).warnings()]
    assert len(told) == 1 and "tokenized data in the cache was damaged and has been made again" in told[0] and str(tokens) in told[0]
    assert good(results["job-0"]).warnings() == told and tokens.read_bytes() == contents
    assert good(prepare([request("job", tmp_path, tokenizer_path)])["job"]).warnings() == []


def test_jobs_of_one_set_have_it_checked_once(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are read as a whole: twenty times for a sweep of twenty would take as long as training."""
    checked: list[Path] = []

    def find(directory: Path, *rest: Any) -> str | None:
        checked.append(directory)
        return find_damage(directory, *rest)

    monkeypatch.setattr(build_module, "find_damage", find)
    write(tmp_path / "x.jsonl", ROWS)
    told: list[PrepareEvent] = []
    worker = worker_module.Worker(told.append)
    for i in range(20):
        worker.run(request(f"job-{i}", tmp_path, tokenizer_path, {"eval_size": 0.01 * i}))
    worker.run(request("other", tmp_path, tokenizer_path, {"max_length": 64}))
    worker.run(request("base", tmp_path, tokenizer_path, vocab_size=2000))
    ends = [event for event in told if isinstance(event, SetsMade | PrepareFailed)]
    assert len(ends) == 22 and len({event.train.directory for event in ends if isinstance(event, SetsMade)}) == 3
    assert checked == []  # nothing was there before
    again = worker_module.Worker(told.append)
    for i in range(20):
        again.run(request(f"job-{i}", tmp_path, tokenizer_path))
    assert len(checked) == 1
