"""The fused kernels in a training loop that is PEFT's own: `python examples/peft_plugin.py BASE_MODEL OUT TEXT_FILE`

One line more than without: `accelerate_peft(model)`. The same line serves transformers' Trainer, TRL or accelerate.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlora import accelerate_peft


def main(base_model: str, out: str, file: str, *, steps: int = 20, batch_size: int = 4) -> tuple[float, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    base: Any = AutoModelForCausalLM.from_pretrained(base_model)
    base.to(device)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    print(accelerate_peft(model))  # noqa: T201
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    lines = [tokenizer(line).input_ids for line in Path(file).read_text().splitlines()]
    losses = []
    for step in range(steps):
        batch = [torch.tensor(lines[(step * batch_size + i) % len(lines)]) for i in range(batch_size)]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True).to(device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in batch], batch_first=True).to(device)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(step, losses[-1])  # noqa: T201
    model.save_pretrained(out)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
