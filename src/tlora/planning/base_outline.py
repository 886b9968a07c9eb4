"""A base's shape as JSON, for a server that has no torch: `python -m tlora.planning.base_outline BASE OUT DTYPE PRECISION DEVICE UNUSED`.

With it a job's profile is arithmetic (`data/profile.py`, `adapters/targets.py`).
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import cast

from tlora.libraries import begin_imports

if __name__ == "__main__":
    begin_imports()

import torch

from tlora import durable
from tlora.errors import TloraError
from tlora.job import BasePrecision, DType, LayoutSetting, UnusedWeights
from tlora.planning.memory import count_base
from tlora.shape.base_shape import BaseShape
from tlora.supermodel.base_config import learned_positions, longest_safe_sequence, max_positions
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused


def describe_base(
    base_model: str,
    dtype: DType,
    base_precision: BasePrecision | None,
    device: str,
    unused_weights: UnusedWeights = "refuse",
    layout: LayoutSetting = "auto",
) -> BaseShape:
    """For those who train over the base on a `device`. Raises ModelError."""
    settled, line = settle_dtype(base_model, dtype, device)
    base = outline(base_model, settled, base_precision)
    notes = check_unused(base_model, base.model.config, unused_weights, "set unused_weights: ignore in the server's settings")
    notes += [f"{line} in the server's settings"] if line else []  # it ends with the dtype to set
    modules, experts = tuple(name for name, _ in base.model.named_modules()), tuple(expert_modules(base.model))  # before adapters are in it
    model = SuperModel(base)
    return BaseShape(
        model.targets(),
        modules,
        experts,
        base.num_bytes,
        base.vocab_size,
        learned_positions(base.model),
        longest_safe_sequence(base.model),
        max_positions(base.model),
        count_base(model, torch.device(device), layout),
        tuple(note.replace(base_model, "the base") for note in notes),  # a tenant does not see where it lies
    )


def main() -> int:
    """Write the outline of the base in argv. The exit status, with the reason on stderr: 2 for a base that cannot be had, ENOSPC where
    there is no room for its outline now.
    """
    base_model, out, dtype, precision, device, unused, layout = sys.argv[1:]
    try:
        held = cast("DType", dtype), cast("BasePrecision | None", precision or None)
        found = describe_base(base_model, *held, device, cast("UnusedWeights", unused), cast("LayoutSetting", layout))
        durable.write_file(Path(out), json.dumps(found.to_json()))
    except TloraError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return errno.ENOSPC if durable.is_full(error) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
