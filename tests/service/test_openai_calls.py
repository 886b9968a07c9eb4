"""Calls that OpenAI's own service takes, with its own client: each is answered as there, or refused by the fields of the call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.service.served import Served, listening, until


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Served, openai.OpenAI]]:
    with (
        listening(tmp_path / "server", eager=False) as (served, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key=served.key("alice"), max_retries=0) as client,
    ):
        yield served, client


def trained(served: Served, client: openai.OpenAI, **fields: Any) -> Any:
    """A job that has succeeded, with two rows of metrics and two checkpoints."""
    order: Any = {"model": "base", "training_file": served.upload("alice")} | fields
    job = client.fine_tuning.jobs.create(**order)
    until(lambda: job.id in served.cluster.placed)
    served.cluster.step(job.id, 1)
    place = served.opened.services.config.directory / "jobs" / job.id
    for step in (1, 2):
        (place / f"checkpoint-{step}").mkdir(parents=True)
        (place / f"checkpoint-{step}" / "MANIFEST.json").write_text("{}")
    served.cluster.finish(job.id)
    until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    return client.fine_tuning.jobs.retrieve(job.id)


def test_metadata_is_kept_and_filters_the_list(live: tuple[Served, openai.OpenAI]) -> None:
    served, client = live
    file = served.upload("alice")
    create = client.fine_tuning.jobs.create
    blue = create(model="base", training_file=file, metadata={"team": "blue", "run": 'a"b,{}'})
    red = create(model="base", training_file=file, metadata={"team": "red"})
    bare = create(model="base", training_file=file, metadata=None)
    assert blue.metadata == {"team": "blue", "run": 'a"b,{}'} and bare.metadata is None
    assert client.fine_tuning.jobs.retrieve(red.id).metadata == {"team": "red"}

    def found(**wanted: Any) -> list[str]:
        return [job.id for job in client.fine_tuning.jobs.list(**wanted)]

    assert found(metadata={"team": "blue"}) == [blue.id]
    assert found(metadata={"team": "blue", "run": 'a"b,{}'}) == [blue.id] and found(metadata={"team": "nobody"}) == []
    assert found(extra_query={"metadata": "null"}) == [bare.id]
    assert found(metadata={"team": "red"}, after=blue.id) == [] and found(metadata={"team": "blue"}, after=red.id) == [blue.id]
    with pytest.raises(openai.BadRequestError, match="state: unknown parameter"):
        client.fine_tuning.jobs.list(extra_query={"state": "queued"})
    clone = served.ask("alice", "POST", f"/v1/jobs/{blue.id}/clone", 201, json={"set": {"r": 4}})
    assert clone["order"]["metadata"]["team"] == "blue"


def test_a_fine_tuned_model_and_a_checkpoint_are_models_to_start_from(live: tuple[Served, openai.OpenAI]) -> None:
    served, client = live
    first = trained(served, client)
    assert first.fine_tuned_model == first.id
    models = client.models.list().data
    assert [model.id for model in models] == ["base", first.id] and models[1].owned_by == "base"
    assert client.models.retrieve(first.id).id == first.id and client.models.retrieve("base").object == "model"
    second = trained(served, client, model=first.fine_tuned_model)
    order = served.ask("alice", "GET", f"/v1/jobs/{second.id}", 200)["order"]
    assert (order["base_model"], order["start_from"], second.model) == ("base", first.id, first.id)
    place = served.opened.services.config.directory / "jobs"
    checkpoint = client.fine_tuning.jobs.checkpoints.list(first.id, limit=1).data[0]
    assert checkpoint.metrics.train_loss == 1.5 and checkpoint.step_number == 2
    third = client.fine_tuning.jobs.create(model=checkpoint.fine_tuned_model_checkpoint, training_file=second.training_file)
    until(lambda: third.id in served.cluster.placed)
    with pytest.raises(openai.ConflictError, match="model 'job-[^']*': the job is"):  # it may replace it meanwhile
        (place / third.id / "checkpoint-4").mkdir(parents=True)
        (place / third.id / "checkpoint-4" / "MANIFEST.json").write_text("{}")
        client.fine_tuning.jobs.create(model=f"{third.id}:checkpoint-4", training_file=second.training_file)
    with pytest.raises(openai.NotFoundError, match="no such checkpoint") as gone:
        client.fine_tuning.jobs.create(model=f"{first.id}:checkpoint-9", training_file=second.training_file)
    assert gone.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.models.retrieve(third.id)
    bob = openai.OpenAI(base_url=client.base_url, api_key=served.key("bob"), max_retries=0)
    with bob:
        with pytest.raises(openai.NotFoundError) as foreign:
            bob.fine_tuning.jobs.create(model=checkpoint.id, training_file=served.upload("bob"))
        assert foreign.value.param == "model" and [model.id for model in bob.models.list()] == ["base"]
    spec = served.cluster.specs[third.id].spec
    assert spec.adapter_path == str(place / first.id / "checkpoint-2")


def test_metrics_come_as_events_and_as_a_result_file(live: tuple[Served, openai.OpenAI]) -> None:
    served, client = live
    job = trained(served, client)
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert len({event.id for event in events}) == len(events), "pages neither repeat nor leave out"
    assert events[0].message == "trained 10 steps" and events[-1].message == "accepted; its data will be read"
    metrics = [event for event in events if event.type == "metrics"]
    assert [event.message for event in metrics] == ["Step 2/10: training loss=1.5000", "Step 1/10: training loss=2.5000"]
    data: Any = metrics[0].data
    assert (data["step"], data["train_loss"], data["total_steps"]) == (2, 1.5, 10)
    (name,) = job.result_files
    file = client.files.retrieve(name)
    content = client.files.content(name).read()
    assert content == b"step,train_loss,valid_loss\n1,2.5,\n2,1.5,\n"
    assert (file.bytes, file.purpose, file.filename) == (len(content), "fine-tune-results", "fine-tune-metrics.csv")
    with pytest.raises(openai.ConflictError, match="goes with the job"):
        client.files.delete(name)
    waiting = client.fine_tuning.jobs.create(model="base", training_file=job.training_file)
    assert waiting.result_files == []
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(f"results-{waiting.id}")


def test_hyperparameters_are_shown_where_they_were_given(live: tuple[Served, openai.OpenAI]) -> None:
    served, client = live
    file = served.upload("alice")
    given: Any = {"n_epochs": 3, "batch_size": 4, "learning_rate_multiplier": 0.3}
    job = client.fine_tuning.jobs.create(
        model="base", training_file=file, method={"type": "supervised", "supervised": {"hyperparameters": given}}
    )
    assert job.hyperparameters.model_dump(exclude_none=True) == given
    assert job.method is not None and job.method.supervised is not None and job.method.supervised.hyperparameters is not None
    assert job.method.supervised.hyperparameters.model_dump(exclude_none=True) == given
    dpo = client.fine_tuning.jobs.create(
        model="base", training_file=file, method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5}}}
    ).method
    assert dpo is not None and dpo.dpo is not None and dpo.dpo.hyperparameters is not None and dpo.dpo.hyperparameters.beta == 0.5


def test_nulls_are_absent_and_a_suffix_has_64_characters(live: tuple[Served, openai.OpenAI]) -> None:
    served, client = live
    nulls = dict.fromkeys(("integrations", "suffix", "validation_file", "metadata", "seed", "method", "hyperparameters", "tlora"))
    job = client.fine_tuning.jobs.create(model="base", training_file=served.upload("alice"), extra_body=nulls)
    assert job.integrations == []
    named = client.fine_tuning.jobs.create(model="base", training_file=job.training_file, suffix="s" * 64)
    assert served.ask("alice", "GET", f"/v1/jobs/{named.id}", 200)["name"] == "s" * 63  # the most that a job's name has


REFUSED = {
    "a base": ({"model": "gpt-9"}, "model 'gpt-9'", "model"),
    "a fine-tuned model": ({"model": "job-00"}, "model 'job-00': there is no such fine-tuned model", "model"),
    "a training file": ({"training_file": "file-00"}, "there is no file 'file-00'", "training_file"),
    "the form of one": ({"training_file": "My File"}, "training_file: 'My File' is refused", "training_file"),
    "a validation file": ({"validation_file": "file-11"}, "there is no file 'file-11'", "validation_file"),
    "integrations": ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations: not offered here", "integrations"),
    "another method's part": (
        {"method": {"type": "supervised", "dpo": {"hyperparameters": {"beta": 0.1}}}},
        "method.dpo: method.type is 'supervised'",
        "method",
    ),
    "reinforcement": ({"method": {"type": "reinforcement"}}, "method.type: 'reinforcement' is refused", "method.type"),
    "beta of sft": ({"hyperparameters": {"beta": 0.2}}, "hyperparameters.beta: is one of method dpo", None),
    "two places": (
        {"hyperparameters": {"n_epochs": 2}, "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}}},
        "hyperparameters: are set here and in method",
        None,
    ),
    "an unknown field": (
        {"extra_body": {"n_epoch": 3}},
        "n_epoch: unknown key; known here: hyperparameters, integrations, meta",
        "n_epoch",
    ),
    "an unknown hyperparameter": (
        {"extra_body": {"hyperparameters": {"epochs": 3}}},
        "hyperparameters.epochs: unknown key; did you mean 'n_epochs'",
        "hyperparameters.epochs",
    ),
    "too much metadata": ({"metadata": {str(number): "x" for number in range(17)}}, "metadata: ", "metadata"),
    "an own field": ({"extra_body": {"tlora": {"lora_rank": 8}}}, "tlora.lora_rank: unknown key; did you mean 'r'", "tlora.lora_rank"),
    "an own rank": ({"extra_body": {"tlora": {"r": 300}}}, "tlora.r: Input should be less than or equal to 256", "tlora.r"),
    "own data": ({"extra_body": {"tlora": {"data": {"max_len": 8}}}}, "tlora.data.max_len: unknown key", "tlora.data.max_len"),
}
FIRST = ("a base", "integrations", "own data")


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FIRST else pytest.mark.soak) for case in REFUSED])
def test_a_refusal_names_the_fields_of_the_call(live: tuple[Served, openai.OpenAI], case: str) -> None:
    served, client = live
    fields, message, param = REFUSED[case]
    order: Any = {"model": "base", "training_file": served.upload("alice")} | fields
    with pytest.raises(openai.APIStatusError) as refused:
        client.fine_tuning.jobs.create(**order)
    body: Any = refused.value.body
    assert message in body["message"] and refused.value.status_code in (400, 404, 422), body
    assert "base_model" not in body["message"] and "data.file" not in body["message"] and "adam_beta1" not in body["message"]
    assert param is None or refused.value.param == param, body
