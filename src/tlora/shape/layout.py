"""How a job's computation lies on GPUs: the form of the frozen base, replicas, stages, and each replica's share of the work.

It stands here, and not in `parallel/` or `engine/`, as the predictions of this room are functions of it, and who plans loads no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from tlora.errors import ConfigError
from tlora.wording.numbers import quantity

Form = Literal["whole", "shared", "streamed", "stages"]
FORMS: tuple[Form, ...] = get_args(Form)
_ROUNDING = 1e-6  # of the sum of weights


@dataclass(frozen=True, slots=True)
class Layout:
    """`replicas` copies of a computation through `stages` stages, on replicas * stages GPUs: stage s of replica r is on rank
    r * stages + s.

    `form` of the base: "whole" on each GPU; "shared", a part of each decoder layer on each; "streamed" from the host's memory to each;
    "stages", some of the layers on each. `weights` is each replica's share of a global batch, by predicted seconds; left out, they are
    equal. One GPU is `Layout()`. Raises ConfigError for a value that breaks a rule.
    """

    form: Form = "whole"
    replicas: int = 1
    stages: int = 1
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"layout: form {self.form!r} is unknown; take one of {', '.join(FORMS)}")
        for name, count in (("replicas", self.replicas), ("stages", self.stages)):
            if count < 1:
                raise ConfigError(f"layout: {name} is {count}, and must be at least 1")
        if (self.form == "stages") != (self.stages > 1):
            rule = 'the form "stages" has at least 2, and each other form 1'
            raise ConfigError(
                f"layout: {quantity(self.stages, 'stage')} of a base that is {self.form}: {rule}. Change the form or the stages"
            )
        if self.form == "shared" and self.replicas == 1:
            raise ConfigError("layout: a base is shared by at least 2 GPUs, and replicas is 1. Give more replicas, or take the form whole")
        if not self.weights:
            object.__setattr__(self, "weights", (1 / self.replicas,) * self.replicas)
        if len(self.weights) != self.replicas:
            raise ConfigError(
                f"layout: {quantity(len(self.weights), 'weight')} for {quantity(self.replicas, 'replica')}; give one for each, or none"
            )
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights) or abs(sum(self.weights) - 1) > _ROUNDING:
            raise ConfigError(f"layout: weights {self.weights} must be above 0 and sum to 1; divide each by their sum")

    @property
    def gpus(self) -> int:
        return self.replicas * self.stages

    @property
    def is_even(self) -> bool:
        """Whether all replicas have equal shares."""
        return max(self.weights) - min(self.weights) <= _ROUNDING

    def __str__(self) -> str:
        """For logs.

        >>> print(Layout(), "|", Layout("shared", 4), "|", Layout("stages", 2, 4, (0.6, 0.4)))
        whole on 1 GPU | shared on 4 GPUs | stages on 8 GPUs: 2 replicas of 4 stages, weights 0.600 0.400
        """
        text = f"{self.form} on {quantity(self.gpus, 'GPU')}"
        if self.stages > 1:
            text += f": {quantity(self.replicas, 'replica')} of {self.stages} stages"
        if not self.is_even:
            text += f"{',' if self.stages > 1 else ':'} weights {' '.join(f'{weight:.3f}' for weight in self.weights)}"
        return text
