"""A loop of one's own in which one adapter learns from pairs: `python examples/own_loop_dpo.py BASE_MODEL OUT PAIRS_FILE`

PAIRS_FILE holds a JSON object a line: prompt, chosen, rejected. An objective of one's own is any callable like `tlora.objectives.Dpo`.
"""

import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from tlora import BatchRow, LoraConfig, SuperModel, TrainConfig, collate, save_adapter
from tlora.objectives import Dpo


def main(base_model: str, out: str, file: str, *, steps: int = 20, batch_size: int = 4) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    pairs = [json.loads(line) for line in Path(file).read_text().splitlines()]

    def row(pair: dict[str, str]) -> BatchRow:
        """Both answers, each after the prompt, are one row of two sequences; the loss is a mean over the batch's pairs."""
        prompt, ends = tokenizer(pair["prompt"]).input_ids, [tokenizer(pair[key]).input_ids for key in ("chosen", "rejected")]
        ids = np.array([token for end in ends for token in prompt + end])
        weights = np.array([weight for end in ends for weight in [0] * len(prompt) + [1] * len(end)], np.float32)
        return BatchRow("ranked", ids, weights, batch_size, lengths=tuple(len(prompt) + len(end) for end in ends))

    model, lora, metrics = SuperModel.from_pretrained(base_model), LoraConfig(r=8), dict[str, float]()
    model.join("ranked", lora, TrainConfig(learning_rate=1e-3, max_steps=steps))
    for step in range(steps):
        batch = [row(pairs[(step * batch_size + i) % len(pairs)]) for i in range(batch_size)]
        loss = model.forward_backward(collate(batch), {"ranked": Dpo(beta=0.1)})["ranked"]
        model.optim_step(["ranked"])
        metrics = {"loss": loss.mean, **{name: float(total) / batch_size for name, total in loss.metrics.items()}}
        print(step, metrics)  # noqa: T201
    state = model.leave("ranked")
    Path(out).mkdir(parents=True, exist_ok=True)
    save_adapter(Path(out), state.layout, state.params, lora, base_model)
    return metrics


if __name__ == "__main__":
    main(*sys.argv[1:])
