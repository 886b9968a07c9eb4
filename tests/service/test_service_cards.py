"""A model card that is downloaded from a server speaks of jobs, files and bases as their tenant does."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from tests.service.served import Served, until
from tlora.store.model_card import model_card
from tlora.wording.card_seal import CARD_FILE, rename, seal, unsealed

REPORT = {"rows": 8, "format": "prompt and completion", "tokens": 80, "trained_tokens": 40}
RESULT: dict[str, Any] = dict.fromkeys(
    ("steps", "num_tokens", "train_loss_first", "train_loss", "eval_loss_first", "eval_loss", "best_step"), 1
)


def trained(served: Served, card: bool = True, **order: object) -> tuple[str, str, str]:
    """A job that has ended with a card as its worker makes it; its id, the card, and the card in its archive."""
    job = served.submit("alice", **order)["id"]
    until(lambda: job in served.cluster.specs)
    directory = served.opened.services.config.directory / "jobs" / job
    directory.mkdir(parents=True, exist_ok=True)
    text = model_card(served.cluster.specs[job].spec, "/srv/models/base-v2", None, REPORT, RESULT, directory) if card else f"# {job}\n"
    (directory / CARD_FILE).write_text(text)
    until(lambda: job in served.cluster.placed)
    served.cluster.finish(job)
    served.wait("alice", job, "succeeded")
    content = served.ask("alice", "GET", f"/v1/jobs/{job}/adapter", 200)
    assert len(content.content) == int(content.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(content.content)) as archive:
        found = archive.extractfile(f"{order['name']}/{CARD_FILE}")
        assert found is not None
        return job, text, found.read().decode()


def test_a_downloaded_card_has_its_tenants_names(served_slowly: Served) -> None:
    served = served_slowly
    file = served.upload("alice", name="our chats, v2.jsonl")
    first, text, card = trained(served, name="polite", data={"file": file})
    (stored,) = [path for path in served.opened.services.config.directory.glob("files/**/*.jsonl") if path.is_file()]
    assert first in text and stored.name in text
    assert card.count("# polite\n") == 1 and "Trained on `our chats, v2.jsonl`" in card
    assert first not in card and stored.stem not in card and unsealed(card) is not None, card
    later, text, card = trained(served, name="politer", data={"file": file}, start_from=first)
    assert f"| started from | {first} |" in text and "| started from | polite |" in card
    assert later not in card and first not in card


def test_a_card_that_was_edited_goes_as_it_is(served_slowly: Served) -> None:
    job, _, card = trained(served_slowly, card=False, name="mine")
    assert card == f"# {job}\n"


def test_names_are_changed_where_they_are_names_alone() -> None:
    card = seal("---\nbase_model: a\n---\n# a\n\nFor `base` and `a base`, a model.\n\n| started from | a |\n| steps | a |\n")
    assert rename(card, {"a": "job", "base": "tiny"}) == seal(
        "---\nbase_model: a\n---\n# job\n\nFor `tiny` and `a base`, a model.\n\n| started from | job |\n| steps | a |\n"
    )
    assert rename(card[:-5], {"a": "job"}) == card[:-5] and unsealed(Path(__file__).read_text()) is None
