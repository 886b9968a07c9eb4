"""What a jobs file chooses by name and is a file of its own: objectives, and forms of the base's frozen weights.

A new one is its file and one entry here. One from outside this package makes its entry in a module that the environment variable
`TLORA_PLUGINS` names (docs/how-to/own-parts.md), so that every process of a run has it. Loads nothing until a name is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Rows = Literal["samples", "pairs", "labelled"]


@dataclass(frozen=True, slots=True)
class ObjectiveEntry:
    """What is known of an objective where no torch is loaded.

    `place`: `module:Class` of a `tlora.objectives.Objective`; "" for cross-entropy, which the super-model has fused. `learns_from`: the
    kind of rows. `settings`: the fields of `job.TrainConfig` that the class takes. `whole_batch`: whether its losses depend on a number of
    the whole global batch (`Objective.statistic`), which then must be computed in one place. `forwards_beside`: forwards of a batch beside
    the one that trains (of its reference; of its statistic, which may have one too), by which seconds are predicted.
    """

    place: str
    learns_from: Rows
    settings: tuple[str, ...] = ()
    whole_batch: bool = False
    forwards_beside: int = 0

    def load(self) -> Any:
        """The class."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


OBJECTIVES: dict[str, ObjectiveEntry] = {
    "sft": ObjectiveEntry("", "samples"),
    "dpo": ObjectiveEntry("tlora.objectives.dpo:Dpo", "pairs", ("beta",), forwards_beside=1),
    "orpo": ObjectiveEntry("tlora.objectives.orpo:Orpo", "pairs", ("beta",)),
    "kto": ObjectiveEntry(
        "tlora.objectives.kto:Kto", "labelled", ("beta", "desirable_weight", "undesirable_weight"), whole_batch=True, forwards_beside=3
    ),
}

BASE_PRECISIONS: dict[str, str] = {"fp8": "tlora.kernels.fp8_weight", "nf4": "tlora.kernels.nf4"}
"""By the names of `base_precision`: modules that are a `tlora.kernels.frozen.WeightForm`."""


def load_plugins() -> None:
    """Import the modules that `TLORA_PLUGINS` names, separated by commas. Raises ImportError."""
    for name in filter(None, os.environ.get("TLORA_PLUGINS", "").split(",")):
        try:
            import_module(name)
        except ImportError as error:
            raise ImportError(
                f"TLORA_PLUGINS: module {name!r} cannot be imported: {error}. Install it, or put its directory on PYTHONPATH"
            ) from error
