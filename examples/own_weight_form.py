"""A form of the base's frozen weights of your own: `python examples/own_weight_form.py BASE_MODEL OUT DATA_FILE`

This file is the form: 8 bits, one scale for each row (LLM.int8(), Dettmers et al., 2022, arXiv:2208.07339, section 2.1, on weights alone).
DATA_FILE is as in a jobs file. For `tlora train`, on one GPU or several, and for a server, set `TLORA_PLUGINS=own_weight_form` with this
directory on PYTHONPATH, and write `base_precision: int8` in the jobs file.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import tlora
from tlora.registry import BASE_PRECISIONS

CARD = "8 bits: whole numbers with a scale for each output."


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`weight` int8 [N, K] times `scale_N` fp32 [N], rounded to `value_dtype`. Products compute in `dtype`."""

    weight: Tensor
    scale_N: Tensor
    value_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight, "scale_N": self.scale_N}

    def operand(self) -> Tensor:
        return self.dense(self.dtype)

    @property
    def row_scale_N(self) -> None:  # noqa: N802
        return None  # the scale is in the operand

    @property
    def scratch_bytes(self) -> int:
        return self.weight.numel() * self.dtype.itemsize

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.float() * self.scale_N[:, None]).to(self.value_dtype).to(dtype)


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Any device and dtype will do."""


def check_widths(name: str, in_features: int, out_features: int, by_rows: bool) -> None:
    """Any widths will do; rows can be cut, since each has its own scale."""


def quantize(weight_NK: Tensor, value_dtype: torch.dtype) -> Int8Weight:
    scale_N = weight_NK.abs().amax(1).float() / 127
    codes = torch.round(weight_NK.float() / scale_N.clamp(min=1e-38)[:, None]).to(torch.int8)
    return Int8Weight(codes, scale_N, value_dtype, weight_NK.dtype)


BASE_PRECISIONS["int8"] = __name__  # the one line


def main(base_model: str, out: str, file: str, *, steps: int = 20) -> float | None:
    """The last training loss."""
    fields = {"name": "int8", "data": file, "learning_rate": 1e-3, "batch_size": 4, "max_steps": steps}
    results = tlora.train([tlora.JobSpec.model_validate(fields)], base_model=base_model, output_dir=out, base_precision="int8")
    return results["int8"].train_loss


if __name__ == "__main__":
    print(main(*sys.argv[1:]))  # noqa: T201
