"""Columns that say which answers are wanted are refused; others that a format does not read are named; what is read matters."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML
from test_build import make, report_of, write

from tlora.data.columns import OPTIONAL, format_of, unused_columns
from tlora.data.formats import COLUMNS, Example, Pair, read_examples, read_pair
from tlora.data.rows import Row, read_rows
from tlora.errors import DataError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ROWS: dict[str, dict[str, Any]] = {
    "chat": {"messages": CHAT},
    "sharegpt": {"conversations": TURNS},
    "prompt_completion": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "alpaca": {"instruction": "a", "output": "b"},
    "query_response": {"query": "a", "response": "b"},
    "segments": {"segments": [{"label": True, "text": "a"}]},
    "text": {"text": "a"},
    "tokenized": {"input_ids": [1, 2, 3]},
    "preference": {"prompt": CHAT, "chosen": [{"role": "assistant", "content": "c"}], "rejected": CHAT[1:]},
}
VALUES: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "tools": [{"name": "f"}],
    "input": "i",
    "functions": [{"name": "f"}],
    "system": "s",
    "system_prompt": "s",
    "position_ids": [0, 1, 0],
    "seq_lengths": [2, 1],
    "completion_mask": [0, 1, 1],
    "assistant_masks": [0, 0, 1],
    "loss_mask": [1, 0, 1],
    "loss_scale": [0, 0.5, 1],
    "loss_weights": [0.5, 0, 1],
    "history": [["q", "r"]],
    "labels": [-100, 2, 3],
    "attention_mask": [1, 1, 0],
    "prompt": CHAT[:1],
    "conversations": TURNS[:1],
}


def read(name: Any, value: dict[str, Any]) -> list[Example] | Pair:
    return read_pair(row(value)) if name == "preference" else read_examples(row(value), name)


def row(value: dict[str, Any]) -> Row:
    return Row("x.jsonl, line 3", value, 0)


@pytest.mark.parametrize(
    "value",
    [
        ROWS["sharegpt"] | {"chosen": TURNS[1], "rejected": TURNS[1]},
        ROWS["chat"] | {"rejected_response": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": CHAT, "rejected": CHAT},
        {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
        ROWS["text"] | {"rejected": "c"},
    ],
)
@pytest.mark.parametrize("how", ["auto", "chat"])
def test_pairs_are_refused_by_their_columns(value: dict[str, Any], how: Any) -> None:
    """Also where the format is set, and where no format has the columns: that message would be of no help."""
    pair = [column for column in value if column in ("chosen", "rejected", "rejected_response")]
    with pytest.raises(DataError, match=f"x.jsonl, line 3: .*{', '.join(map(repr, pair))}: .*remove"):
        format_of(row(value), how)


@pytest.mark.parametrize("name", ["chat", "sharegpt", "prompt_completion", "alpaca"])
@pytest.mark.parametrize("column", ["label", "kto_tag"])
@pytest.mark.parametrize("verdict", [False, True, 0, 1, 0.0, "False", "true", "1"])
def test_verdicts_are_refused(name: str, column: str, verdict: object) -> None:
    for how in ("auto", name):
        with pytest.raises(DataError, match=rf"line 3: .*'{column}' .*{verdict!r}: .*objective: kto"):
            format_of(row(ROWS[name] | {column: verdict}), how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [{"label": "sports"}, {"label": 7}, {"label": None}, {"chosen": None, "rejected": None}, {"rejected": ""}]
)
def test_what_is_no_preference_is_let_through(value: dict[str, Any]) -> None:
    assert format_of(row(ROWS["chat"] | value), "auto") == "chat"


@pytest.mark.parametrize("name", ["chat", "alpaca", "preference"])
@pytest.mark.parametrize(
    ("column", "value"), [("images", ["a.png"]), ("image", {"path": "a.png"}), ("videos", ["a.mp4"]), ("audio", "a.wav")]
)
def test_rows_with_images_or_sound_are_refused(name: str, column: str, value: object) -> None:
    rows: Any = "pairs" if name == "preference" else "samples"
    with pytest.raises(DataError, match=f"x.jsonl, line 3: column '{column}': only text is read"):
        format_of(row({**ROWS[name], column: value}), "auto", rows)
    for empty in (None, [], ""):
        assert format_of(row({**ROWS[name], column: empty}), "auto", rows) == name
    assert format_of(row({"text": "a", column: value}), "auto") == "text", "of a plain text it is but one more fact"


@pytest.mark.parametrize("name", ["text", "tokenized"])
def test_without_an_answer_a_label_is_a_class(name: str) -> None:
    value = row(ROWS[name] | {"label": 1})
    assert format_of(value, "auto") == name and unused_columns(value, name) == ["label"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "column"), [(name, column) for name, columns in OPTIONAL.items() for column in columns])
def test_a_column_that_counts_as_used_is_read(name: Any, column: str) -> None:
    value = ROWS[name] | {column: VALUES[column]}
    if column == "conversations":
        del value["prompt"]  # the other place of a pair's prompt
    assert unused_columns(row(value), name) == []
    assert read(name, value) != read(name, ROWS[name])


def test_a_column_that_counts_as_unused_is_not_read() -> None:
    for name, value in ROWS.items():
        for column, extra in VALUES.items():
            if column not in (*OPTIONAL[name], *COLUMNS[name]):  # type: ignore[index]
                more = value | {column: extra}
                assert unused_columns(row(more), name) == [column]  # type: ignore[arg-type]
                assert read(name, more) == read(name, value)


def test_plain_prompts_have_no_place_for_tools() -> None:
    value = {"prompt": "a", "completion": "b", "tools": VALUES["tools"]}
    assert unused_columns(row(value), "prompt_completion") == ["tools"]


def test_unused_columns_are_named_once_for_a_set(tmp_path: Path, tokenizers: Any) -> None:
    rows = [ROWS["chat"] | {"id": i, "source": "web" if i % 2 else None, "empty": ""} for i in range(300)]
    report = report_of(make(write(tmp_path / "x.jsonl", rows), tokenizers(CHATML)))
    assert report.unused_columns == {"id": 300, "source": 150}
    report.files = ["x.jsonl"]
    assert report.warnings()[-1] == "columns that format chat does not use: 'id', 'source' (x.jsonl)"


def test_a_file_of_random_columns_does_not_fill_the_report(tmp_path: Path, tokenizers: Any) -> None:
    rows = [{"text": "Hello!", f"column-{i}": 1, "always": 1} for i in range(1000)]
    report = report_of(make(write(tmp_path / "x.jsonl", rows), tokenizers(CHATML)))
    assert len(report.unused_columns) == 100 and report.unused_columns["always"] == 1000
    report.files = ["x.jsonl"]
    assert report.warnings()[0].endswith("'column-10' and 88 more (x.jsonl)")


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_late_verdict_is_told_with_its_row(suffix: str, tmp_path: Path, tokenizers: Any) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "csv":
        path.write_text("prompt,completion,label\n" + "a,b,\n" * 200 + "a,b,False\n")
    else:
        path.write_text(json.dumps([{"prompt": "a", "completion": "b"}] * 200 + [{"prompt": "a", "completion": "b", "label": False}]))
    with pytest.raises(DataError, match=rf"x.{suffix}, .*20[12]: .*'label'.*'?False'?"):
        make(path, tokenizers(None))
    assert list((tmp_path / "cache").iterdir()) == []


TABLES: dict[str, Any] = {
    "lists": {"prompt": ["a", "b"], "completion": ["c", "d"], "id": [1, 2]},
    "one_row": {"prompt": ["a"], "completion": ["c"]},
    "pandas": {"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}},
    "pandas_index": {"0": {"prompt": "a", "completion": "c"}, "1": {"prompt": "b", "completion": "d"}},
    "pandas_split": {"columns": ["prompt", "completion"], "data": [["a", "c"], ["b", "d"]]},
    "pandas_split_with_index": {"columns": ["prompt", "completion"], "index": [0, 1], "data": [["a", "c"], ["b", "d"]]},
    "texts": {"text": ["a", "b"]},
    "chats": {"messages": [CHAT, CHAT]},
    "tokens": {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, 4]]},
    "pairs": {"prompt": ["p", "q"], "chosen": ["a", "b"], "rejected": ["c", "d"]},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_one_object_is_refused_as_that_with_a_command_that_writes_its_rows(name: str, tmp_path: Path) -> None:
    rows: Any = "pairs" if name == "pairs" else "samples"
    write(tmp_path / "OLD", [TABLES[name]])
    with pytest.raises(DataError, match=r"^x.jsonl, line 3: a whole table in one object: .*; convert it: `python -c '(.*)'`$") as caught:
        format_of(row(TABLES[name]), "auto", rows)
    subprocess.run(shlex.split(str(caught.value).split("`")[1].replace("python", sys.executable)), cwd=tmp_path, check=True)
    (found,) = {format_of(each, "auto", rows) for each in read_rows(tmp_path / "NEW.json")}
    for each in read_rows(tmp_path / "NEW.json"):
        read(found, each.value)


def test_rows_of_lists_alone_are_no_tables() -> None:
    """Whose other columns may be texts, as many as messages."""
    for value in (*ROWS.values(), {"messages": CHAT, "tags": ["x", "y"]}, {"input_ids": [1, 2], "tokens": ["a", "b"]}):
        format_of(row(value), "auto", "pairs" if "chosen" in value else "samples")
