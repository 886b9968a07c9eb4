"""From rows to a set on disk: tokens and weights to the id, counts, cache, and nothing half-made."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, LLAMA3

from tlora import durable
from tlora.data import build as build_module
from tlora.data import dataset as dataset_module
from tlora.data import scratch
from tlora.data import worker as worker_module
from tlora.data.build import SetSpec, build, cache_key, hash_file, tokenizer_hash
from tlora.data.dataset import Dataset, Sample, Writer, find_damage
from tlora.data.encode import encode, open_encoder
from tlora.data.formats import Text
from tlora.data.report import DataReport
from tlora.data.request import PrepareEvent, PrepareFailed, PrepareProgress, PrepareRequest, SetsMade
from tlora.data.rows import list_files
from tlora.data.sources import Source
from tlora.data.worker import Worker
from tlora.errors import DataError
from tlora.job import DataConfig


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source(path: Path) -> Source:
    return Source(str(path), tuple(list_files(path)))


def make(path: Path, tokenizer: Any, max_length: int = 1024, **settings: Any) -> Path:
    return make_and_tell(path, tokenizer, max_length, **settings)[0]


def make_and_tell(path: Path, tokenizer: Any, max_length: int = 1024, **settings: Any) -> tuple[Path, str | None]:
    encoder = open_encoder(
        tokenizer,
        settings.get("template"),
        settings.get("train_all", False),
        settings.get("vocab_size", 1000),
        settings.get("chats"),
    )
    order = SetSpec((source(path),), settings.get("format", "auto"), max_length, path.parent / "cache")
    return build(order, encoder, lambda file: hash_file(file, lambda _rows, _share: None), lambda _rows, _share: None)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def report_of(directory: Path) -> DataReport:
    return DataReport.from_meta(Dataset(directory).meta, [])


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def texts(tokenizer: Any, *pairs: tuple[str, str]) -> list[Sample]:
    found = encode(open_encoder(tokenizer, None, False, 1000), [Text(*pair) for pair in pairs], ["row"] * len(pairs))
    return [encoded.sample for encoded in found]


def pairs_of(sample: Sample) -> list[tuple[int, float]]:
    return list(zip(sample.input_ids.tolist(), sample.loss_weights.tolist(), strict=True))


# --- plain text ---


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompt_and_completion_to_the_id(adds_bos: bool, tokenizers: Any) -> None:
    tokenizer = tokenizers(None, adds_bos=adds_bos)
    [sample] = texts(tokenizer, ("What is the capital of France?", " Paris."))
    head = [tokenizer.bos_token_id] * adds_bos + ids(tokenizer, "What is the capital of France?")
    tail = [*ids(tokenizer, " Paris."), tokenizer.eos_token_id]
    assert pairs_of(sample) == [(token, 0.0) for token in head] + [(token, 1.0) for token in tail]


def test_boundary_inside_a_token_is_cut_there(tokenizers: Any) -> None:
    """ "... is" + " Paris": with the space in the prompt, " Paris" would be one token over the boundary."""
    tokenizer = tokenizers(None)
    prompt, completion = "The capital of France is ", "Paris."
    assert ids(tokenizer, prompt + completion)[: len(ids(tokenizer, prompt))] != ids(tokenizer, prompt)
    [sample] = texts(tokenizer, (prompt, completion))
    assert sample.input_ids.tolist() == [*ids(tokenizer, prompt), *ids(tokenizer, completion), tokenizer.eos_token_id]
    assert sample.loss_weights.tolist() == [0.0] * len(ids(tokenizer, prompt)) + [1.0] * (len(ids(tokenizer, completion)) + 1)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_special_tokens_are_never_doubled(adds_bos: bool, tokenizers: Any) -> None:
    tokenizer = tokenizers(None, adds_bos=adds_bos)
    for sample in texts(tokenizer, ("", "<s>Hello!</s>"), ("<s>user", "Hello!</s>")):
        assert sample.input_ids.tolist().count(tokenizer.bos_token_id) == 1 and sample.input_ids[0] == tokenizer.bos_token_id
        assert sample.input_ids.tolist().count(tokenizer.eos_token_id) == 1 and sample.input_ids[-1] == tokenizer.eos_token_id


def test_lone_surrogate_is_refused_with_its_row(tmp_path: Path, tokenizers: Any) -> None:
    for rows in (
        [{"text": "a"}, {"text": "b\ud800"}],
        [{"messages": [{"role": "user", "content": "a\udc00"}, {"role": "assistant", "content": "b"}]}],
    ):
        path = write(tmp_path / "x.jsonl", rows)
        with pytest.raises(DataError, match=rf"x.jsonl, line {len(rows)}: .*surrogate"):
            make(path, tokenizers(CHATML))


# --- counts ---


def test_report_counts_cut_and_skipped_samples(tmp_path: Path, tokenizers: Any) -> None:
    tokenizer = tokenizers(None)
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "labels": [-100, -100, 3, 4, 5, 6, 7, 8]},  # 3 of 6 trained tokens are cut off
        {"input_ids": [1, 2, 3, 4, 5, 6, 7], "labels": [-100] * 5 + [6, 7]},  # both are cut off: nothing left
        {"input_ids": [9, 8], "labels": [9, 8]},  # the first token is no target
        {"input_ids": [9], "labels": [9]},  # so this has none
        {"input_ids": [1, 2], "labels": [-100, -100]},
        {"input_ids": [300, 2, 3, 4, 5]},  # just fits
    ]
    directory = make(write(tmp_path / "x.jsonl", rows), tokenizer, max_length=5)
    report = report_of(directory)
    assert (report.format, report.rows, report.samples, report.skipped) == ("tokenized", 6, 3, 3)
    assert (report.truncated, report.trained_tokens_lost, report.longest) == (2, 5, 8)
    assert (report.tokens, report.trained_tokens) == (5 + 2 + 5, 3 + 1 + 4)
    report.files = ["x.jsonl"]
    assert report.warnings() == [
        "2 of 6 rows are cut to max_length, 5 trained tokens lost; the longest has 8 tokens (x.jsonl)",
        "3 of 6 rows are left out, without a trained token (x.jsonl)",
    ]
    dataset = Dataset(directory)
    assert [pairs_of(dataset[i]) for i in range(len(dataset))] == [
        [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)],
        [(9, 1), (8, 1)],
        [(300, 1), (2, 1), (3, 1), (4, 1), (5, 1)],
    ]
    assert dataset.lengths.tolist() == [5, 2, 5] and dataset.trained.tolist() == [3, 1, 4] and dataset.max_token_id == 300
    assert dataset.trained.dtype == np.float64


def test_rendered_sample_shows_the_trained_part(tmp_path: Path, tokenizers: Any) -> None:
    rows = [{"instruction": "Hello!", "output": "Sure, 你好世界."}, {"instruction": "other", "output": "row"}]
    report = report_of(make(write(tmp_path / "x.jsonl", rows), tokenizers(CHATML)))
    assert report.rendered == [
        ("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n", 0),
        ("Sure, 你好世界.<|im_end|>", 1),
        ("\n", 0),
    ]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_all_who_read_a_set_share_its_open_files(tmp_path: Path, tokenizers: Any) -> None:
    directory = make(write(tmp_path / "x.jsonl", [{"input_ids": [1, 2, i]} for i in range(9)]), tokenizers(None))
    before = open_files()
    readers = [Dataset(directory, np.array([i])) for i in range(9)]
    assert open_files() - before == 2 and len({id(reader._tokens) for reader in readers}) == 1
    assert [int(reader[0].input_ids[2]) for reader in readers] == list(range(9))
    readers.clear()
    assert open_files() == before


def test_tokens_at_places_in_samples(tmp_path: Path, tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_READ_AT_ONCE", 7)
    directory = make(write(tmp_path / "x.jsonl", [{"input_ids": list(range(i, 2 * i + 2))} for i in range(20)]), tokenizers(None))
    view = Dataset(directory, np.array([3, 11, 4, 19]))
    places = [(2, 0), (3, 20), (0, 1), (1, 12), (2, 5), (2, 5)]
    found = view.tokens_at(np.array([i for i, _ in places]), np.array([place for _, place in places]))
    assert found.tolist() == [int(view[i].input_ids[place]) for i, place in places]
    assert view.tokens_at(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("name", ["tokens.bin", "weights.bin"])
def test_a_set_that_is_cut_while_it_is_open(name: str, tmp_path: Path, tokenizers: Any) -> None:
    """A page of a mapped file that is cut would end the process."""
    directory = make(write(tmp_path / "x.jsonl", [{"input_ids": list(range(2 + i))} for i in range(90)]), tokenizers(None))
    dataset = Dataset(directory)
    os.truncate(directory / name, 4096)
    with pytest.raises(
        DataError, match=rf"{name}: another program has cut .*a sample ends at byte 16740, behind the end of the file.*Resume the run"
    ):
        dataset[89]
    assert dataset[0].input_ids.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["offsets.npy", "trained.npy", "meta.json", "tokens.bin"])
@pytest.mark.parametrize("harm", [Path.unlink, lambda file: os.truncate(file, 0)])
def test_a_set_that_is_cut_before_it_is_opened(name: str, harm: Any, tmp_path: Path, tokenizers: Any) -> None:
    directory = make(write(tmp_path / "x.jsonl", [{"input_ids": [5, 6, 7]}]), tokenizers(None))
    harm(directory / name)
    with pytest.raises(DataError, match=rf"{name}: another program has cut or changed"):
        Dataset(directory)[0]


# --- refusals ---


@pytest.mark.parametrize("bad", [1000, 2**31, 2**70])
def test_ids_beyond_the_vocabulary(bad: int, tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1, bad]}])
    with pytest.raises(DataError, match=rf"x.jsonl, line 2: token id {bad} .*1000"):
        make(path, tokenizers(None))


def test_tokenizer_larger_than_the_models_vocabulary(tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    with pytest.raises(DataError, match=r"x.jsonl, line 1: token id \d+ .*\b20\b"):
        make(path, tokenizers(None), vocab_size=20)


def test_column_of_numbers(tmp_path: Path, tokenizers: Any) -> None:
    (tmp_path / "x.csv").write_text("text\n1\n2.5\n-3e4\n")
    with pytest.raises(DataError, match=r"x.csv: .*3 values .*'text' .*numbers"):
        make(tmp_path / "x.csv", tokenizers(None))
    (tmp_path / "x.csv").write_text("text\n1\nword\n")
    assert len(Dataset(make(tmp_path / "x.csv", tokenizers(None)))) == 2


def test_nothing_to_train(tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 3)
    with pytest.raises(DataError, match=r"x.jsonl: .*3 rows .*max_length 1024"):
        make(path, tokenizers(CHATML))
    assert len(Dataset(make(path, tokenizers(CHATML), train_all=True))) == 3


def test_format_overrides_detection(tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"instruction": "a", "output": "b", "text": "c"}])
    assert report_of(make(path, tokenizers(CHATML), format="text")).rendered == [("c</s>", 1)]
    with pytest.raises(DataError, match=r"x.jsonl, line 1: .*'messages' .*instruction, output"):
        make(path, tokenizers(CHATML), format="chat")


# --- the cache ---


def test_same_input_is_not_tokenized_again(tmp_path: Path, tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    first = make(path, tokenizers(CHATML))
    monkeypatch.setattr(build_module, "encode_blocks", lambda *_: pytest.fail("tokenized again"))
    assert make(path, tokenizers(CHATML)) == first
    moved = path.rename(tmp_path / "moved.jsonl")
    assert make(moved, tokenizers(CHATML)) == first


def test_whatever_changes_the_tokens_makes_another_set(tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"instruction": "Hello!", "output": "b", "text": "c"}])
    base = tokenizers(CHATML)
    sets = [
        make(path, base),
        make(path, base, max_length=64),
        make(path, base, train_all=True),
        make(path, base, format="text"),
        make(path, base, vocab_size=999),
        make(path, base, template=LLAMA3),
        make(path, tokenizers(CHATML, eos=None)),
        make(path, tokenizers(CHATML, adds_bos=True)),
        make(write(path, [{"instruction": "Hello!", "output": "c", "text": "c"}]), base),
    ]
    assert len(set(sets)) == len(sets)


@pytest.mark.parametrize("name", ["tokens.bin", "weights.bin", "offsets.npy", "trained.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_set_is_made_again(name: str, damage: str, tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    directory = make(path, tokenizers(CHATML))
    contents = (directory / name).read_bytes()
    (directory / name).unlink()
    if damage == "cut":
        (directory / name).write_bytes(contents[:-1])
    assert find_damage(directory, 1000) is not None
    assert make(path, tokenizers(CHATML)) == directory and find_damage(directory, 1000) is None
    assert (directory / name).read_bytes() == contents


@pytest.mark.parametrize("name", ["tokens.bin", "weights.bin", "offsets.npy", "trained.npy", "meta.json", "MANIFEST.json"])
def test_one_flipped_bit_of_a_set_is_found_and_told(name: str, tmp_path: Path, tokenizers: Any) -> None:
    """The sizes stay as they are."""
    path = write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    directory = make(path, tokenizers(CHATML))
    contents = (directory / name).read_bytes()
    (directory / name).write_bytes(contents[:-4] + bytes([contents[-4] ^ 1]) + contents[-3:])
    again, damage = make_and_tell(path, tokenizers(CHATML))
    assert again == directory and damage and f"{name} is damaged" in damage
    assert (directory / name).read_bytes() == contents
    assert make_and_tell(path, tokenizers(CHATML)) == (directory, None)


@pytest.mark.parametrize("bad", [1000, 2**30, -1])
def test_ids_out_of_range_in_a_set_are_found_and_told(bad: int, tmp_path: Path, tokenizers: Any) -> None:
    """Even if the hashes are right."""
    path = write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    directory = make(path, tokenizers(CHATML))
    contents = (directory / "tokens.bin").read_bytes()
    (directory / "tokens.bin").write_bytes(np.int32(bad).tobytes() + contents[4:])
    (directory / "MANIFEST.json").unlink()
    durable.write_manifest(directory)
    _, damage = make_and_tell(path, tokenizers(CHATML))
    assert damage and f"{bad}" in damage and "the vocabulary has 1000" in damage
    assert (directory / "tokens.bin").read_bytes() == contents


def test_a_set_without_hashes_is_made_again_in_silence(tmp_path: Path, tokenizers: Any) -> None:
    """As earlier versions left them: under the same name, so that their runs can be resumed."""
    path = write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    directory = make(path, tokenizers(CHATML))
    (directory / "MANIFEST.json").unlink()
    (directory / "tokens.bin").write_bytes(b"rot!")
    assert make_and_tell(path, tokenizers(CHATML)) == (directory, None)
    assert find_damage(directory, 1000) is None


def test_the_key_of_a_set_stays(tmp_path: Path, tokenizers: Any) -> None:
    """Checkpoints name the set that they were trained on: a key that no version knows any more would end all runs."""
    tokenizer = tokenizers(CHATML)
    order = SetSpec((source(write(tmp_path / "x.jsonl", [{"text": "Hello!"}])),), "auto", 64, tmp_path)
    encoder = open_encoder(tokenizer, None, False, 1000)
    parts = {
        "version": 1,
        "files": [(".jsonl", hashlib.sha256(order.files[0].read_bytes()).hexdigest())],
        "tokenizer": tokenizer_hash(tokenizer),
        "template": CHATML,
        "settings": ["auto", 64, False, 1000],
    }
    expected = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    assert cache_key(order, encoder, lambda file: hash_file(file, lambda _rows, _share: None), 1) == expected
    made = Dataset(build(order, encoder, lambda file: hash_file(file, lambda _rows, _share: None), lambda _rows, _share: None)[0])
    assert made.was_named(f"{expected}/1") and not made.was_named(f"{expected}/2")
    assert not made.was_named(f"{made.directory.name}/1"), "its present name is no earlier one"


def test_two_at_once_leave_one_set(tmp_path: Path) -> None:
    """Both fill a directory of their own; the second to finish finds the first one's and gives up its own."""
    writers = [Writer(tmp_path / "set") for _ in range(2)]
    for writer in writers:
        writer.add(Sample(np.array([1, 2], dtype=np.int32), np.ones(2, dtype=np.float32)))
    for writer in writers:
        writer.finish({"report": {}})
    assert names(tmp_path) == ["set"] and len(Dataset(tmp_path / "set")) == 1


def test_what_stands_in_the_way_is_an_error(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "set")
    writer.add(Sample(np.array([1, 2], dtype=np.int32), np.ones(2, dtype=np.float32)))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "foreign").touch()
    with pytest.raises(OSError, match="not empty"):
        writer.finish({"report": {}})


@pytest.mark.parametrize("row", [{"text": 3}, {"other": "b"}])
def test_a_bad_row_leaves_nothing_behind(row: dict[str, Any], tmp_path: Path, tokenizers: Any) -> None:
    path = write(tmp_path / "x.jsonl", [{"text": "a"}] * 300 + [row])
    with pytest.raises(DataError, match=r"x.jsonl, line 301: column 'text'"):
        make(path, tokenizers(CHATML))
    assert names(tmp_path / "cache") == []


def test_full_disk_leaves_nothing_behind(tmp_path: Path, tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dataset_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make(write(tmp_path / "x.jsonl", [{"text": "a"}]), tokenizers(CHATML))
    assert names(tmp_path / "cache") == []


# --- what the worker says of each ---


def events_of(worker_cache: Path, path: str, tokenizer_path: Path, **data: Any) -> list[PrepareEvent]:
    told: list[PrepareEvent] = []
    config = DataConfig.model_validate({"path": path, **data})
    Worker(told.append).run(PrepareRequest("job", config, str(tokenizer_path), 1000, worker_cache, worker_cache.parent))
    return told


def test_worker_events(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "EVENT_SECONDS", 0.0)
    write(tmp_path / "x.jsonl", [{"text": "Hello!"}] * 300)
    started, *progress, done = events_of(tmp_path / "cache", "x.jsonl", tokenizer_path, eval_path="x.jsonl")
    assert started == PrepareProgress("job", 0, 0.0) and isinstance(done, SetsMade) and done.train == done.eval
    assert all(isinstance(event, PrepareProgress) for event in progress)
    assert [event.rows for event in progress] == [0, 128, 256, 300] and progress[-1].share == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (MemoryError(), "x.jsonl: preparing takes more than 8.00 GiB"),
        (type("PanicException", (BaseException,), {})("index out of bounds"), "x.jsonl: PanicException: index out of bounds"),
    ],
)
def test_worker_survives(error: BaseException, pattern: str, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    monkeypatch.setattr(worker_module, "build", fail)
    start, end = events_of(tmp_path / "cache", "x.jsonl", tokenizer_path)
    assert start == PrepareProgress("job", 0, 0.0) and isinstance(end, PrepareFailed) and not end.of_tokenizer and pattern in end.reason


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_worker_can_be_interrupted(
    error: type[BaseException], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "build", lambda *_: (_ for _ in ()).throw(error()))
    write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    with pytest.raises(error):
        events_of(tmp_path / "cache", "x.jsonl", tokenizer_path)


def test_worker_names_a_template_that_it_cannot_read(tmp_path: Path, tokenizer_path: Path) -> None:
    write(tmp_path / "x.jsonl", [{"text": "Hello!"}])
    for contents in (None, b"\xff"):
        if contents:
            (tmp_path / "t.jinja").write_bytes(contents)
        event = events_of(tmp_path / "cache", "x.jsonl", tokenizer_path, chat_template="t.jinja")[-1]
        assert isinstance(event, PrepareFailed) and not event.of_tokenizer
        assert "t.jinja: the chat template cannot be read" in event.reason


def test_old_scratch_is_removed_and_young_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    earlier, mine = f"tmp-{os.getpid()}-a", scratch.private_directory(tmp_path).name  # a container gives each launch the same number
    old, young = (f"tmp-{ended.pid}-{letter}" for letter in "ab")
    stale = 2 * scratch.STALE_SECONDS
    for name, age in ((old, stale), (young, 10.0), (earlier, stale), (mine, stale), (f"tmp-{os.getppid()}-a", stale), ("other", stale)):
        (tmp_path / name).mkdir(exist_ok=True)
        past = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (past, past))
    gone = [tmp_path / "tmp-3-gone", *tmp_path.glob("tmp-*")]  # another run removed it since the directory was read
    scratch.remove_old(SimpleNamespace(glob=lambda _: gone))  # type: ignore[arg-type]
    assert names(tmp_path) == sorted(["other", young, mine, f"tmp-{os.getppid()}-a"])


def test_hash_of_a_file_gives_signs_of_life(tmp_path: Path) -> None:
    """The key depends on a file's bytes, whatever their size against the chunk that is hashed at a time."""
    beats: list[tuple[int, float]] = []
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)) * (3 << 17))  # 96 MiB
    whole = hash_file(path, lambda rows, share: beats.append((rows, share)))
    assert len(beats) == 24
    path.write_bytes(bytes(range(256)) * (3 << 17) + b"x")
    assert hash_file(path, lambda _rows, _share: None) != whole
