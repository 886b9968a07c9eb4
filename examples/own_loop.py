"""A training loop of one's own over the super-model's four verbs: `python examples/own_loop.py BASE_MODEL OUT TEXT_FILE...`

One adapter per text file, all of another rank, one sample a line. All share every forward and backward.
"""

import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from tlora import BatchRow, LoraConfig, SuperModel, TrainConfig, collate, save_adapter


def main(base_model: str, out: str, *files: str, steps: int = 20, batch_size: int = 4) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    model = SuperModel.from_pretrained(base_model)
    samples = {Path(f).stem: [np.array(tokenizer(line).input_ids) for line in Path(f).read_text().splitlines()] for f in files}
    loras = {name: LoraConfig(r=8 * (i + 1)) for i, name in enumerate(samples)}
    for name, lora in loras.items():
        model.join(name, lora, TrainConfig(learning_rate=1e-3, max_steps=steps))
    losses = {}
    for step in range(steps):
        rows = []
        for name, own in samples.items():
            batch = [own[(step * batch_size + i) % len(own)] for i in range(batch_size)]
            targets = sum(len(ids) - 1 for ids in batch)  # the loss is a mean over the job's whole batch
            rows += [BatchRow(name, ids, np.ones(len(ids), np.float32), targets) for ids in batch]
        losses = {name: loss.mean for name, loss in model.forward_backward(collate(rows)).items()}
        model.optim_step(losses)
        print(step, losses)  # noqa: T201
    for name, lora in loras.items():
        state = model.leave(name)
        (Path(out) / name).mkdir(parents=True, exist_ok=True)
        save_adapter(Path(out) / name, state.layout, state.params, lora, base_model)
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
