"""Rows of token ids as other programs write them: masks are obeyed, and packed rows are cut into their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_build import make, report_of, write

from tlora.data.columns import format_of
from tlora.data.dataset import Dataset
from tlora.data.formats import Segments, Tokens, read_example, read_examples
from tlora.data.rows import Row
from tlora.errors import DataError

IDS = [5, 6, 7, 8]


def row_of(value: dict[str, Any]) -> Row:
    return Row("x, row 1", value, 0)


def read(**columns: Any) -> list[Any]:
    return read_examples(Row("x.jsonl, line 3", columns, 0), "tokenized")


def refused(pattern: str, **columns: Any) -> None:
    with pytest.raises(DataError, match=f"^x.jsonl, line 3: .*{pattern}"):
        read(**columns)


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks", "loss_mask"])
def test_masks_of_what_is_trained(column: str) -> None:
    assert read(input_ids=IDS, **{column: [0, 0, 1, 1]}) == [Tokens(IDS, [0, 0, 1, 1])]
    assert read(input_ids=IDS, **{column: [False, True, False, True]}) == [Tokens(IDS, [0, 1, 0, 1])]
    assert read(input_ids=IDS, labels=[-100, 6, 7, 8], **{column: [1, 1, 0, 1]}) == [Tokens(IDS, [0, 1, 0, 1])], "all must agree"
    assert read(input_ids=IDS, attention_mask=[0, 1, 1, 1], **{column: [1, 0, 1, 1]}) == [Tokens(IDS[1:], [0, 1, 1])]
    assert read(input_ids=IDS, **{column: None}) == [Tokens(IDS, [1, 1, 1, 1])]
    refused(rf"{column}\[1\] is 2 .*expected 1 \(trained\) or 0", input_ids=IDS, **{column: [0, 2, 1, 1]})
    refused(rf"{column}\[0\] is '1' .*expected 1", input_ids=IDS, **{column: ["1", 1, 1, 1]})
    refused(f"{column} has 3 values where input_ids has 4", input_ids=IDS, **{column: [0, 1, 1]})
    refused(f"column '{column}' is 1 .*expected a list", input_ids=IDS, **{column: 1})


@pytest.mark.parametrize("column", ["loss_scale", "loss_weights"])
def test_weights_of_tokens(column: str) -> None:
    assert read(input_ids=IDS, completion_mask=[0, 1, 1, 1], **{column: [1, 0.5, 0, 2]}) == [Tokens(IDS, [0, 0.5, 0, 2])]
    refused(rf"{column}\[2\] is -1 .*at least 0", input_ids=IDS, **{column: [1, 1, -1, 1]})


@pytest.mark.parametrize(
    "columns",
    [
        {"seq_lengths": [3, 1, 2]},
        {"position_ids": [0, 1, 2, 0, 0, 1]},
        {"position_ids": [0, 1, 2, 0, 0, 1], "seq_lengths": [3, 1, 2]},
        {"attention_mask": [1, 1, 1, 2, 3, 3]},
        {"attention_mask": [1, 1, 1, 2, 3, 3], "position_ids": [0, 1, 2, 0, 0, 1]},
        {"attention_mask": [1] * 6, "seq_lengths": [3, 1, 2]},
    ],
)
def test_a_packed_row_is_cut(columns: dict[str, Any]) -> None:
    labels = [-100, 2, 3, 4, 5, -100]
    assert read(input_ids=[1, 2, 3, 4, 5, 6], labels=labels, **columns) == [
        Tokens([1, 2, 3], [0, 1, 1]),
        Tokens([4], [1]),
        Tokens([5, 6], [1, 0]),
    ]


def test_padding_of_packed_rows() -> None:
    assert read(input_ids=[1, 2, 3, 9, 9], attention_mask=[1, 1, 2, 0, 0]) == [Tokens([1, 2], [1, 1]), Tokens([3], [1])]
    at_the_end = read(input_ids=[1, 2, 3, 9, 9], attention_mask=[1, 1, 1, 0, 0], position_ids=[0, 1, 0, 0, 0], seq_lengths=[2, 1, 2])
    assert at_the_end == [Tokens([1, 2], [1, 1]), Tokens([3], [1])]
    at_the_left = read(input_ids=[9, 9, 1, 2, 3], attention_mask=[0, 0, 1, 1, 1], position_ids=[1, 1, 0, 1, 2])
    assert at_the_left == [Tokens([1, 2, 3], [1, 1, 1])]
    assert read(input_ids=IDS, position_ids=[0, 1, 2, 3], attention_mask=[1] * 4) == [Tokens(IDS, [1] * 4)]


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        ({"seq_lengths": [2, 1]}, r"column 'seq_lengths' is \[2, 1\] .*add up to the 4 tokens"),
        ({"seq_lengths": [4, 0]}, "column 'seq_lengths' is .*above 0"),
        ({"position_ids": [0, 1, 3, 4]}, r"position_ids\[2\] is 3 .*expected 2, or 0 where the next packed sample begins"),
        ({"position_ids": [0, 1, 2]}, "position_ids has 3 values where input_ids has 4"),
        ({"attention_mask": [2, 2, 1, 1]}, "column 'attention_mask' is .*the numbers 1, 2, ... of packed samples"),
        ({"attention_mask": [1, 1, 2, -1]}, "column 'attention_mask' is .*expected 0 and 1"),
        ({"position_ids": [0, 1, 0, 1], "seq_lengths": [3, 1]}, "'seq_lengths' and 'position_ids' cut the packed row at different tokens"),
        ({"cu_seqlens": [0, 2, 4]}, "column 'cu_seqlens' is .*seq_lengths or position_ids. Rename or remove it"),
    ],
)
def test_borders_that_do_not_fit(columns: dict[str, Any], pattern: str) -> None:
    refused(pattern, input_ids=IDS, **columns)


@pytest.mark.parametrize("value", [{"prompt_mask": [1, 0, 0, 0]}, {"masked": True}, {"train": 0}])
def test_other_columns_that_say_what_is_trained_are_refused(value: dict[str, Any]) -> None:
    for row in ({"input_ids": IDS}, {"messages": [{"role": "user", "content": "a"}]}, {"text": "a"}):
        with pytest.raises(DataError, match=f"x, row 1: column '{next(iter(value))}' seems to say what is trained"):
            format_of(row_of(row | value), "auto")
    for other in ({"special_tokens_mask": [1, 0, 0, 1]}, {"token_type_ids": [0] * 4}, {"train_idx": 0}, {"training_data": ["a"]}):
        assert format_of(row_of({"input_ids": IDS} | other), "auto") == "tokenized"


def test_a_set_of_packed_rows(tmp_path: Path, tokenizers: Any) -> None:
    """Equal to the set of its samples; rows and samples are counted apart."""
    packed = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2], "completion_mask": [0, 1, 1, 0, 1]},
        {"input_ids": [6, 7, 8, 9], "seq_lengths": [2, 2], "completion_mask": [1, 0, 1, 1]},
    ]
    apart = [
        {"input_ids": ids, "completion_mask": mask}
        for ids, mask in [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1]), ([6, 7], [1, 0]), ([8, 9], [1, 1])]
    ]
    one, other = (Dataset(make(write(tmp_path / name, rows), tokenizers(None))) for name, rows in (("a.jsonl", packed), ("b.jsonl", apart)))
    assert len(one) == len(other) == 3
    for i in range(3):
        assert np.array_equal(one[i].input_ids, other[i].input_ids) and np.array_equal(one[i].loss_weights, other[i].loss_weights)
    report = report_of(one.directory)
    report.files = ["a.jsonl"]
    assert report.warnings() == [
        "2 rows are packed and are cut into 4 samples (a.jsonl)",
        "1 of 4 samples is left out, without a trained token (a.jsonl)",
    ]
    assert report_of(other.directory).rows == 4 and report.rows == 2


# --- axolotl's labelled segments of text ---


def test_segments_of_text(tmp_path: Path, tokenizers: Any) -> None:
    segments = [
        {"label": False, "text": "<s>The capital of "},
        {"label": True, "text": "France"},
        {"label": True, "text": " is Paris.</s>"},
    ]
    row = {"segments": segments}
    assert read_example(row_of(row), "segments") == Segments([segment["text"] for segment in segments], [0, 1, 1])
    found = Dataset(make(write(tmp_path / "x.jsonl", [row]), tokenizers(None, adds_bos=True)))[0]
    ids = [tokenizers(None)(segment["text"], add_special_tokens=False)["input_ids"] for segment in segments]
    assert found.input_ids.tolist() == [token for part in ids for token in part], "no token is added, none spans two segments"
    assert found.loss_weights.tolist() == [0.0] * len(ids[0]) + [1.0] * (len(ids[1]) + len(ids[2]))


@pytest.mark.parametrize("segment", ["a", {"label": True}, {"text": "a"}, {"label": "true", "text": "a"}, {"label": 2, "text": "a"}])
def test_what_is_no_segment(segment: object) -> None:
    with pytest.raises(DataError, match=r"x, row 1: segments\[0\] is .*expected a segment like \{'label': true"):
        read_example(row_of({"segments": [segment]}), "segments")
    with pytest.raises(DataError, match="column 'segments' is .*at least one segment"):
        read_example(row_of({"segments": []}), "segments")
