"""A model card names the settings that the job reads: each one that it lists changes the job, and each one that it leaves out does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlora.adapters.adamw import learning_rate
from tlora.job import BasePrecision, JobSpec
from tlora.objectives import objective_of
from tlora.store.model_card import model_card

REPORT: dict[str, Any] = {"rows": 8, "format": "prompt_completion", "tokens": 80, "trained_tokens": 40}
RESULT: dict[str, Any] = dict.fromkeys(
    ("steps", "num_tokens", "train_loss_first", "train_loss", "eval_loss_first", "eval_loss", "best_step"), 1
)
OTHER = {"beta": 0.7, "desirable_weight": 0.7, "undesirable_weight": 0.7, "min_lr_rate": 0.7, "warmup_steps": 7, "num_train_epochs": 7.0}


def card_of(tmp_path: Path, report: dict[str, Any] | None = REPORT, **fields: Any) -> tuple[JobSpec, str, set[str]]:
    spec = JobSpec.model_validate({"name": "a", "data": "d.jsonl"} | fields)
    card = model_card(spec, "/srv/base", None, report, RESULT, tmp_path)
    settings = card.split("## Settings")[1].split("## Result")[0]
    return spec, card, {line.split(" | ")[0].removeprefix("| ") for line in settings.splitlines() if line.startswith("| ")}


def what_is_done(spec: JobSpec) -> Any:
    """All that the settings of `OTHER` can change: the objective, and the learning rates of a set of 20 rows."""
    steps = spec.total_steps(20)
    return objective_of(spec), [learning_rate(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo", "kto"])
@pytest.mark.parametrize("schedule", ["linear", "constant", "constant_with_warmup", "cosine_with_min_lr"])
@pytest.mark.parametrize("max_steps", [None, 5])
def test_a_card_has_the_settings_that_are_read_and_no_others(tmp_path: Path, objective: str, schedule: str, max_steps: int | None) -> None:
    fields = {"objective": objective, "lr_scheduler_type": schedule, "max_steps": max_steps}
    spec, _, shown = card_of(tmp_path, **fields)
    for key, value in OTHER.items():
        changed = JobSpec.model_validate(spec.model_dump() | {key: value})
        assert (key in shown) == (what_is_done(changed) != what_is_done(spec)), key
    assert {"objective", "learning_rate", "lr_scheduler_type", "batch_size", "r", "target_modules", "max_length"} <= shown
    assert ("train_on" in shown) == (objective == "sft") and "chat_template_kwargs" not in shown
    assert ("max_steps" in shown) == (max_steps is not None)


@pytest.mark.parametrize(("precision", "said"), [(None, None), ("fp8", "linear layers in fp8"), ("nf4", "in 4 bits: bitsandbytes' NF4")])
def test_a_card_says_over_which_form_of_the_base_was_trained(precision: BasePrecision | None, said: str | None, tmp_path: Path) -> None:
    spec = JobSpec.model_validate({"name": "a", "data": "d.jsonl"})
    card = model_card(spec, "/srv/base", precision, REPORT, RESULT, tmp_path)
    assert ("It was trained over the base" in card) == (said is not None) and (said is None or said in card)


def test_what_is_trained_of_a_text_is_no_setting(tmp_path: Path) -> None:
    assert "train_on" not in card_of(tmp_path, REPORT | {"format": "text"})[2]
    assert "chat_template_kwargs" in card_of(tmp_path, data={"path": "d", "chat_template_kwargs": {"enable_thinking": False}})[2]


def test_a_set_without_a_report_has_a_card_without_its_counts(tmp_path: Path) -> None:
    _, with_counts, _ = card_of(tmp_path)
    _, card, shown = card_of(tmp_path, None)
    assert "Trained on `d.jsonl`.\n" in card and "train_on" in shown
    assert "Trained on `d.jsonl`: 8 rows of format prompt_completion, 80 tokens, 40 of them trained on.\n" in with_counts
