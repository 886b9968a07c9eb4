"""Answers of white space alone are counted and said, for every format and objective; a source that has no others is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML
from test_build import source

from tlora.data.build import SetSpec, build, hash_file
from tlora.data.dataset import Dataset
from tlora.data.encode import ChatSettings, open_encoder
from tlora.data.report import DataReport
from tlora.errors import DataError

USER = {"role": "user", "content": "Hello!"}
CALL = {"type": "function", "function": {"name": "lamp", "arguments": {}}}
ASKED = {"label": 0, "text": "q"}
THINKING = CHATML.replace("m['content']", "(m['reasoning_content'] or '') + m['content']")


def bot(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def chat(*answers: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [message for answer in answers for message in (USER, answer)]}


ROWS: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [  # rows, one with an empty answer, one without
    ("samples", "samples", {"prompt": "q", "completion": ""}, {"prompt": "q", "completion": "a"}),
    ("blank", "samples", {"prompt": "q", "completion": " \n"}, {"prompt": "", "completion": "a"}),
    ("chat", "samples", chat(bot("")), chat(bot("a"))),
    ("segments", "samples", {"segments": [ASKED, {"label": 1, "text": "\n"}]}, {"segments": [ASKED, {"label": 1, "text": "a"}]}),
    ("alpaca", "samples", {"instruction": "q", "output": ""}, {"instruction": "q", "output": "a"}),
    ("pairs", "pairs", {"prompt": "q", "chosen": " ", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ("rejected", "pairs", {"prompt": [USER], "chosen": [bot("a")], "rejected": [bot("")]}, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ("labelled", "labelled", {"prompt": "q", "completion": "", "label": False}, {"prompt": "q", "completion": "a", "label": True}),
]


def report_of(path: Path, rows: list[dict[str, Any]], tokenizer: Any, kind: Any = "samples", **settings: Any) -> DataReport:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = open_encoder(tokenizer, None, settings.get("train_all", False), 10**6, ChatSettings(last_turn=settings.get("last", False)))
    order = SetSpec((source(path),), "auto", 256, path.parent / "cache", kind)
    made, _ = build(order, encoder, lambda file: hash_file(file, lambda *_: None), lambda *_: None)
    return DataReport.from_meta(Dataset(made).meta, ["x"])


def said(report: DataReport) -> list[str]:
    return [line for line in report.warnings() if "empty" in line]


@pytest.mark.parametrize(("kind", "empty", "full"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS])
def test_some_are_said_and_all_are_refused(tmp_path: Path, tokenizers: Any, kind: Any, empty: Any, full: Any) -> None:
    tokenizer = tokenizers(CHATML)
    learns = "from which the model learns to say nothing"
    one = [f"1 of 3 rows has an empty answer, {learns}: fill or remove it (x)"]
    assert said(report_of(tmp_path / "one.jsonl", [full, empty, full], tokenizer, kind)) == one
    two = [f"2 of 3 rows have an empty answer, {learns}: fill or remove them (x)"]
    assert said(report_of(tmp_path / "two.jsonl", [empty, full, empty], tokenizer, kind)) == two
    assert not said(report_of(tmp_path / "none.jsonl", [full, full], tokenizer, kind))
    with pytest.raises(
        DataError, match=r"all\.jsonl: all answers of 2 rows are empty; expected text to train on\. Format .* reads .*: fill"
    ):
        report_of(tmp_path / "all.jsonl", [empty, empty], tokenizer, kind)


def test_a_row_with_another_answer_is_said_and_not_refused(tmp_path: Path, tokenizers: Any) -> None:
    rows = [chat(bot(""), bot("a"))]
    assert len(said(report_of(tmp_path / "x.jsonl", rows, tokenizers(CHATML)))) == 1
    assert not said(report_of(tmp_path / "x.jsonl", rows, tokenizers(CHATML), last=True))  # the first answer is not trained
    assert not said(report_of(tmp_path / "y.jsonl", [chat(bot("", loss=False), bot("a"))], tokenizers(CHATML)))


def test_calls_and_reasoning_are_answers(tmp_path: Path, tokenizers: Any) -> None:
    assert not said(report_of(tmp_path / "x.jsonl", [chat(bot("", tool_calls=[CALL]))], tokenizers(CHATML)))
    thought = [chat(bot("", reasoning_content="Hm.")), chat(bot("a", reasoning_content="Hm."))]
    assert not said(report_of(tmp_path / "y.jsonl", thought, tokenizers(THINKING)))
    assert len(said(report_of(tmp_path / "y.jsonl", thought, tokenizers(CHATML)))) == 1  # whose template drops it


def test_where_all_is_trained_a_prompt_is_text_too(tmp_path: Path, tokenizers: Any) -> None:
    rows = [{"prompt": "q", "completion": ""}]
    assert not said(report_of(tmp_path / "x.jsonl", rows, tokenizers(), train_all=True))
    lines = said(report_of(tmp_path / "y.jsonl", [{"text": ""}, {"text": "a"}], tokenizers(adds_bos=True)))
    assert lines == ["1 of 2 rows has an empty text, from which the model learns to say nothing: fill or remove it (x)"]


def test_token_ids_hold_no_empty_answer(tmp_path: Path, tokenizers: Any) -> None:
    assert not said(report_of(tmp_path / "x.jsonl", [{"input_ids": [1, 2], "labels": [-100, 2]}], tokenizers()))
