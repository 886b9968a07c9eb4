"""An objective of your own: `python examples/own_objective.py BASE_MODEL OUT PAIRS_FILE`

PAIRS_FILE holds a JSON object a line: prompt, chosen, rejected. Two jobs learn from it together, one with IPO, which this file adds, and
one with DPO. For `tlora train`, on one GPU or several, and for a server, set `TLORA_PLUGINS=own_objective` with this directory on
PYTHONPATH, and write `objective: ipo` in the jobs file.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import tlora
from tlora.objectives import TokenLogprobs, UnitLosses
from tlora.registry import OBJECTIVES, ObjectiveEntry


@dataclass(frozen=True)
class Ipo:
    """Identity preference optimisation (Azar et al., 2023, arXiv:2310.12036, equation 17): (h - 1 / (2 beta))^2 of a pair.

    h is log p - log p_reference of the chosen answer less that of the rejected one, summed over trained tokens; `beta` is the paper's tau.
    Where DPO moves a pair's margin ever further, IPO holds it at 1 / (2 beta).
    """

    beta: float = 0.1

    sequences = 2  # of a pair
    needs_reference = True
    statistic = None

    def summarise(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return means

    def __call__(self, logprobs: TokenLogprobs) -> UnitLosses:
        assert logprobs.reference_N is not None, "IPO compares with a reference"
        ratios_S = logprobs.sum_by_sequence(logprobs.policy_N - logprobs.reference_N)
        margins_U = ratios_S[0::2] - ratios_S[1::2]
        return UnitLosses((margins_U - 1 / (2 * self.beta)) ** 2, {"rewards/margins": self.beta * margins_U})


OBJECTIVES["ipo"] = ObjectiveEntry(f"{__name__}:Ipo", "pairs", ("beta",), forwards_beside=1)  # the one line


def main(base_model: str, out: str, file: str, *, steps: int = 20) -> dict[str, float | None]:
    """The last training loss of each job."""
    fields = {"data": file, "learning_rate": 1e-3, "batch_size": 4, "max_steps": steps}
    jobs = [tlora.JobSpec.model_validate({"name": name, "objective": name, **fields}) for name in ("ipo", "dpo")]
    results = tlora.train(jobs, base_model=base_model, output_dir=out)
    return {name: result.train_loss for name, result in results.items()}


if __name__ == "__main__":
    print(main(*sys.argv[1:]))  # noqa: T201
