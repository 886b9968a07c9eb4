"""Preference data: columns as TRL and ShareGPT rankings have them, and the pairs of token sequences that come of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlora.data.build import SetSpec, build, cache_key, hash_file
from tlora.data.dataset import Dataset
from tlora.data.encode import open_encoder
from tlora.data.formats import Chat, Pair, Text, read_pair
from tlora.data.rows import Row
from tlora.data.sources import Source
from tlora.errors import DataError

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "Is it late?"), ("assistant", "Yes."), ("assistant", "No.")))
TALK = Pair(Chat([USER, GOOD], [0.0, 1.0]), Chat([USER, BAD], [0.0, 1.0]))


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Is it late?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": BAD},
        {"prompt": [USER], "chosen": "Yes.", "rejected": "No."},
        {
            "conversations": [{"from": "human", "value": "Is it late?"}],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "gpt", "value": "No."},
        },
    ],
    ids=["messages", "common beginning", "with the prompt as text", "answers with and without the prompt", "texts", "sharegpt ranking"],
)
def test_one_pair_in_all_its_spellings(value: dict[str, object]) -> None:
    assert read_pair(Row("f, line 1", value, 0.0)) == TALK


def test_a_pair_of_plain_texts() -> None:
    row = Row("f, line 1", {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}, 0.0)
    assert read_pair(row) == Pair(Text("1 + 1 =", " 2"), Text("1 + 1 =", " 3"))


def test_answers_of_the_context_are_not_trained() -> None:
    context = [USER, GOOD, {"role": "user", "content": "Sure?"}]
    pair = read_pair(Row("f, line 1", {"prompt": context, "chosen": [GOOD], "rejected": [BAD]}, 0.0))
    assert isinstance(pair.chosen, Chat) and pair.chosen.weights == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"prompt": "x", "chosen": "y"}, "'rejected' is missing"),
        ({"chosen": "y", "rejected": "z"}, "column 'prompt' is None"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "column 'prompt' is None"),
        ({"prompt": "Another?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "column 'prompt' is 'Another"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [BAD]}, "column 'chosen'"),
        ({"prompt": [USER], "chosen": 5, "rejected": [BAD]}, r"chosen\[0\] is 5"),
        ({"prompt": "x", "chosen": "y", "rejected": ["z"]}, "column 'rejected'"),
    ],
)
def test_what_is_no_pair(value: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=rf"^f, line 1: .*{words}.*"):
        read_pair(Row("f, line 1", value, 0.0))


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def _build(path: Path, encoder: Any, max_length: int = 64, rows: Any = "pairs") -> Dataset:
    order = SetSpec((Source(str(path), (path,)),), "auto", max_length, path.parent / "cache", rows)
    return Dataset(build(order, encoder, lambda file: hash_file(file, lambda *_: None), lambda *_: None)[0])


TEXTS = [{"prompt": "one two", "chosen": " three", "rejected": " four five six"}, {"prompt": "a", "chosen": " b c d", "rejected": " e"}]


def test_a_set_of_pairs_holds_what_both_answers_are_alone(tmp_path: Path, tokenizers: Any) -> None:
    encoder = open_encoder(tokenizers(), None, False, 10**6)
    pairs = _build(_write(tmp_path / "pairs.jsonl", TEXTS), encoder)
    alone = [{"prompt": row["prompt"], "completion": row[answer]} for row in TEXTS for answer in ("chosen", "rejected")]
    samples = _build(_write(tmp_path / "samples.jsonl", alone), encoder, rows="samples")
    assert len(pairs) == 2 and samples[0].lengths == ()
    shown: Any = pairs.meta["report"]
    assert "".join(text for text, _ in shown["rendered"]).startswith("chosen:\none two three")
    for index in range(2):
        chosen, rejected, pair = samples[2 * index], samples[2 * index + 1], pairs[index]
        assert pair.lengths == (len(chosen.input_ids), len(rejected.input_ids))
        assert np.array_equal(pair.input_ids, np.concatenate([chosen.input_ids, rejected.input_ids]))
        assert np.array_equal(pair.loss_weights, np.concatenate([chosen.loss_weights, rejected.loss_weights]))
        assert pairs.trained[index] == samples.trained[2 * index] + samples.trained[2 * index + 1] == pair.trained
        assert pairs.lengths[index] == sum(pair.lengths)
    assert pairs.longest_sequences.tolist() == [max(pairs[i].lengths) for i in range(2)]
    assert samples.longest_sequences is samples.lengths
    part = Dataset(pairs.directory, np.array([1]))
    assert part[0].lengths == pairs[1].lengths and part.longest_sequences.tolist() == [max(pairs[1].lengths)]


def test_a_cut_pair_keeps_two_sequences_and_one_without_an_answer_is_left_out(tmp_path: Path, tokenizers: Any) -> None:
    encoder = open_encoder(tokenizers(), None, False, 10**6)
    long_prompt = {"prompt": "one two three four five " * 19, "chosen": " a", "rejected": " b"}
    found = _build(_write(tmp_path / "pairs.jsonl", [*TEXTS, long_prompt]), encoder, max_length=24)
    report: Any = found.meta["report"]
    assert len(found) == 2 and all(max(found[i].lengths) <= 24 for i in range(2))
    assert report["rows"] == 3 and report["skipped"] == 1 and report["truncated"] >= 1


def test_pairs_and_samples_are_not_taken_for_each_other(tmp_path: Path, tokenizers: Any) -> None:
    encoder = open_encoder(tokenizers(), None, False, 10**6)
    pairs, samples = _write(tmp_path / "pairs.jsonl", TEXTS), _write(tmp_path / "samples.jsonl", [{"text": "x y"}])
    with pytest.raises(DataError, match="'chosen', 'rejected': .*preference data"):
        _build(pairs, encoder, rows="samples")
    with pytest.raises(DataError, match="'chosen' and 'rejected' .*text"):
        _build(samples, encoder)


def test_the_cache_keys_of_samples_are_as_before(tmp_path: Path, tokenizers: Any) -> None:
    encoder, path = open_encoder(tokenizers(), None, False, 10**6), _write(tmp_path / "d.jsonl", [{"text": "x"}])
    keys = [
        cache_key(SetSpec((Source(str(path), (path,)),), "auto", 8, tmp_path, rows), encoder, lambda _: "hash")
        for rows in ("samples", "pairs")
    ]
    assert keys[0] != keys[1] and keys[0] == cache_key(
        SetSpec((Source(str(path), (path,)),), "auto", 8, tmp_path), encoder, lambda _: "hash"
    )
