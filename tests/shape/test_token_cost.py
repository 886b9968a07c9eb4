"""What a micro-batch costs besides its tokens, beside runs that were measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tlora.kernels.cards import HOPPER
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import token_cost_on
from tlora.shape.work import LAYER_OF_8B

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PLAIN = MemoryModel(1, (), 32, 2, 4, 5, *LAYER_OF_8B)
IN_4_BITS = MemoryModel(1, (), 32, 2, 4, 5, *LAYER_OF_8B, unpacked_weights=LAYER_OF_8B[0])


def pairs() -> Iterator[tuple[int, float]]:
    """Tokens of a micro-batch, and tokens a second of an 8B in nf4 over those in bf16, of runs of one file."""
    rows = json.loads((RESULTS / "h200_f960408_plan_measurements_a.json").read_text())["rows"]
    for packed in (row for row in rows if row["group"] == "8b-nf4"):
        for plain in (row for row in rows if row["group"] == "8b" and {**row["work"], "fitted": False} == packed["work"]):
            yield packed["work"]["token_budget"], packed["tokens_per_second"] / plain["tokens_per_second"]
    for name, tokens in (("2048", 2048), ("2048_again", 2048), ("8192", 8192)):
        launches = json.loads((RESULTS / f"h100_2ecdd65_nf4_{name}_8b.json").read_text())["launches"]
        speeds = {case: [each["steady_tokens_per_second"] for each in launches if each["case"] == case] for case in ("plain", "nf4")}
        for plain in speeds["plain"]:
            yield tokens, median(speeds["nf4"]) / plain


def test_unpacking_takes_what_was_measured() -> None:
    plain, packed = (token_cost_on("cuda", HOPPER.smallest_rows, memory) for memory in (PLAIN, IN_4_BITS))
    measured = list(pairs())
    with_it = [abs(plain.at(tokens, 0) / packed.at(tokens, 0) / ratio - 1) for tokens, ratio in measured]
    without = [abs(1 / ratio - 1) for _, ratio in measured]
    assert len(measured) == 6 and median(with_it) <= 0.02 < 0.05 < median(without), measured
    assert all(error < left for error, left in zip(with_it, without, strict=True)), measured


def test_layers_that_are_computed_again_are_unpacked_again() -> None:
    plain, packed = (token_cost_on("cuda", HOPPER.smallest_rows, memory) for memory in (PLAIN, IN_4_BITS))
    besides = [packed.at(1024, layers) - plain.at(1024, layers) for layers in (0, 32)]
    assert besides[1] > besides[0] > 0
