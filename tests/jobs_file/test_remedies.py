"""Each remedy that an error about a job names is tried here: with it the job is accepted. No error of these files is left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tlora.job import RunSpec
from tlora.jobs_file import explain

SOURCE = Path(__file__).parents[2] / "src" / "tlora"
FILES = ("job.py", "adapter_shape.py")
TAKE_OUT = None
MIXED = [{"path": "d", "weight": 1}, "e"]
KTO = {"objective": "kto", "batch_size": 2}

# What a job has, what its error says, and each remedy in it as the keys that it changes.
CASES: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        {"chat_template_kwargs": {"tools": True}},
        "says what is rendered.*take it out.*such as enable_thinking: false",
        [{"chat_template_kwargs": TAKE_OUT}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ),
    ({"eval_size": 2.5}, "write 2, or a share below 1", [{"eval_size": 2}, {"eval_size": 0.5}]),
    (
        {"eval_size": 2, "eval_path": "e"},
        r"remove one \(eval_size: 0 on the job undoes a default\)",
        [{"eval_size": TAKE_OUT}, {"eval_path": TAKE_OUT}, {"eval_size": 0}],
    ),
    ({"data": MIXED}, "give each a weight, or none", [{"data": ["d", "e"]}, {"data": [{"path": p, "weight": 1} for p in "de"]}]),
    ({"eval_path": [{"path": "e", "weight": 2}]}, "remove the weights", [{"eval_path": [{"path": "e"}]}]),
    ({"name": "a/b"}, "letters, digits, '.', '_' and '-', no '/', 63 at most", [{"name": "Ab.1_-"}, {"name": "a" * 63}]),
    ({"name": "tmp-a"}, "choose another", [{"name": "a-tmp"}]),
    ({"name": "run.json"}, "choose another", [{"name": "run-json"}]),
    (
        {"objective": "dpo", "format": "chat"},
        "Set format to auto or one of preference, or choose another objective",
        [{"format": "auto"}, {"format": "preference"}, {"objective": "sft"}],
    ),
    (
        KTO | {"format": "text"},
        "Set format to auto or one of chat, prompt_completion, alpaca, sharegpt, query_response, or choose another objective",
        [{"format": name} for name in ("auto", "chat", "prompt_completion", "alpaca", "sharegpt", "query_response")],
    ),
    ({"objective": "orpo", "train_on": "all"}, "Take it out", [{"train_on": TAKE_OUT}]),
    ({"objective": "dpo", "packing": True}, "Take packing out", [{"packing": TAKE_OUT}]),
    (KTO | {"batch_size": 1}, "Set at least 2", [{"batch_size": 2}]),
    ({"gpus": 3, "batch_size": 2}, "Set gpus to at most 2, or raise batch_size", [{"gpus": 2}, {"batch_size": 3}]),
    ({"eval_steps": 5}, r"set eval_size \(say 0.05\) or eval_path on the job's data", [{"eval_size": 0.05}, {"eval_path": "e"}]),
    (
        {"early_stopping_patience": 2, "eval_size": 2},
        r"set eval_steps \(say 50, or epoch\)",
        [{"eval_steps": 50}, {"eval_steps": "epoch"}],
    ),
    ({"target_modules": ["all"]}, "write `target_modules: all-linear`", [{"target_modules": "all-linear"}]),
    ({"target_modules": ["All_Linear"]}, "write `target_modules: all-linear`", [{"target_modules": "all-linear"}]),
    ({"target_modules": "all"}, "write `target_modules: all-linear`", [{"target_modules": "all-linear"}]),
    (
        {"target_modules": "q_proj"},
        r"write `target_modules: \[q_proj\]` \('all-linear' takes every layer\)",
        [{"target_modules": ["q_proj"]}, {"target_modules": "all-linear"}],
    ),
    (
        {"target_modules": []},
        "name layers, write `target_modules: all-linear`, or set target_parameters",
        [{"target_modules": ["q_proj"]}, {"target_modules": "all-linear"}, {"target_parameters": ["experts.down_proj"]}],
    ),
    (
        {"target_parameters": ["experts.down_proj"], "lora_dropout": 0.1},
        "set lora_dropout: 0, or take target_parameters out",
        [{"lora_dropout": 0}, {"target_parameters": TAKE_OUT}],
    ),
    (
        {"expert_rank": "divide"},
        "set it, or take expert_rank out",
        [{"target_parameters": ["experts.down_proj"]}, {"expert_rank": TAKE_OUT}],
    ),
    ({"exclude_modules": "v_proj"}, r"write `exclude_modules: \[v_proj\]`", [{"exclude_modules": ["v_proj"]}]),
    (
        {"target_modules": "(q_proj"},
        "write a list of names, or correct it",
        [{"target_modules": ["q_proj"]}, {"target_modules": ".*(q_proj)"}],
    ),
    ({"modules_to_save": ["embed_tokens"]}, "'trainable_token_indices'", [{"modules_to_save": TAKE_OUT, "trainable_token_indices": [7]}]),
    ({"trainable_token_indices": [7, 7]}, "list each once", [{"trainable_token_indices": [7]}]),
    (
        {"layers_pattern": "layers"},
        "set both, or neither",
        [{"layers_to_transform": [0]}, {"layers_pattern": TAKE_OUT}],
    ),
    (
        {"target_modules": ".*q_proj", "layers_to_transform": [1]},
        "write the layers into it, or target_modules as a list",
        [{"target_modules": r".*\.1\..*q_proj", "layers_to_transform": TAKE_OUT}, {"target_modules": ["q_proj"]}],
    ),
]


def run(job: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({"base_model": "b", "jobs": [job]})


def said(job: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        run(job)
    return explain(caught.value)


@pytest.mark.parametrize(("fields", "message", "remedies"), CASES, ids=[str(case[0]) for case in CASES])
def test_each_remedy_helps(fields: dict[str, Any], message: str, remedies: list[dict[str, Any]]) -> None:
    job = {"name": "a", "data": "d"} | fields
    assert re.search(message, said(job)), said(job)
    for remedy in remedies:
        changed = job | remedy
        run({key: value for key, value in changed.items() if value is not TAKE_OUT or key not in remedy})


def twins(name: str) -> dict[str, Any]:
    return {"base_model": "b", "jobs": [{"name": "a", "data": "d"}, {"name": name, "data": "d"}]}


def test_two_jobs_of_one_name() -> None:
    with pytest.raises(ValidationError, match="names must differ in more than case"):
        RunSpec.model_validate(twins("A"))
    RunSpec.model_validate(twins("a2"))


def patterns() -> Iterator[str]:
    """Of all messages that these files raise as ValueError."""
    for name in FILES:
        for node in ast.walk(ast.parse((SOURCE / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", "") == "ValueError":
                yield pattern(node.exc.args[0])


def pattern(message: ast.expr) -> str:
    if isinstance(message, ast.BinOp):
        return pattern(message.left)
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)  # type: ignore[arg-type]


def test_no_error_of_a_job_is_left_out() -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(twins("a"))
    every = [explain(caught.value), *(said({"name": "a", "data": "d"} | fields) for fields, *_ in CASES)]
    found = list(patterns())
    assert len(found) >= 17, "the errors are looked for where they no longer are"
    assert not [message for message in found if not any(re.search(message, text) for text in every)]
