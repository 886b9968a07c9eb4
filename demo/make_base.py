"""Pre-trains the demo's tiny base model on WordNet's glosses and writes it to demo/base: 2,554 steps of about 0.2 s on 2 idle cores.

The model sees nothing but the glosses, many of them twice in a row. Only the tokenizer also sees the words of the demo's jobs,
so that each is one token; the turn markers of its chat template are never trained here, the adapters learn what they mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from words import CITIES, FRAME, GOODS, LIMITS, NAMES, PRIORITIES, REMEDIES, TABLES, TEAMS, TOP

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "wordnet.txt.xz"
BASE = HERE / "base"
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEQUENCE_LENGTH = 128
BATCH_SEQUENCES = 16
PEAK_LEARNING_RATE = 3e-3
RARE_COUNT = 20
SEED = 7
# A run of spaces and letters, one digit group, or punctuation; a leading space belongs to what follows.
SPLIT = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+")


def _words_of_the_jobs() -> list[str]:
    """Each word of the demo's jobs with a space before it, and by itself where an answer quotes it or a sentence begins with it."""
    of_jobs = [*TABLES, *itertools.chain(*TABLES.values(), *TEAMS.values()), *TEAMS, *FRAME, *GOODS, *map(str, LIMITS), *map(str, TOP)]
    quoted = [*NAMES, *CITIES, *(f"{thing}s" for thing in GOODS)]
    in_sentences = " ".join([*REMEDIES, *REMEDIES.values(), *PRIORITIES]).split()
    return [*(f" {word}" for word in [*of_jobs, *quoted, *in_sentences]), *quoted, *FRAME]


def make_tokenizer(glosses: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 3,072 tokens over the glosses and the words of the demo's jobs."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(SPLIT, behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3072, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*glosses, *_words_of_the_jobs() * 3000], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1], padding_side="left")
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.model_max_length = 512
    return wrapped


def special_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Of the end of a text, and of padding."""
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(end, int) and isinstance(padding, int)
    return end, padding


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    end, padding = special_ids(tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def make_blocks(tokenizer: PreTrainedTokenizerFast, glosses: list[str]) -> np.ndarray:
    """[blocks, SEQUENCE_LENGTH + 1] token ids out of one pass over the glosses in WordNet's order, <|end|> after each.

    A third of the blocks are glosses as they stand. The others hold half as many, and then the same ones again in another order:
    a model this small learns to look back and copy from that within minutes, and from plain text not at all.
    """
    (end, _), rng = special_ids(tokenizer), np.random.default_rng(SEED)
    blocks: list[list[int]] = []
    group: list[list[int]] = []
    room = plain_room = SEQUENCE_LENGTH
    for row in tokenizer(glosses)["input_ids"]:
        group.append([*row, end])
        if sum(map(len, group)) < room:
            continue
        again = [group[i] for i in rng.permutation(len(group))] if room < plain_room else []
        blocks.append([end, *(token for gloss in [*group, *again] for token in gloss)][: SEQUENCE_LENGTH + 1])
        group, room = [], plain_room // (1 if rng.random() < 1 / 3 else 2)
    return np.asarray(blocks, dtype=np.int64)


def train(model: LlamaForCausalLM, blocks: np.ndarray, epochs: float) -> list[dict[str, float]]:
    """AdamW with warm-up and cosine over shuffled blocks; returns a row every 50 steps."""
    per_epoch = len(blocks) // BATCH_SEQUENCES
    total, rng, rows, started = int(epochs * per_epoch), np.random.default_rng(SEED), [], time.monotonic()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    order = np.concatenate([rng.permutation(len(blocks))[: per_epoch * BATCH_SEQUENCES] for _ in range(math.ceil(epochs))])
    recent: list[float] = []
    for step in range(total):
        rate = min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * rate
        ids = torch.from_numpy(blocks[order[step * BATCH_SEQUENCES : (step + 1) * BATCH_SEQUENCES]])
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == total:
            seconds = time.monotonic() - started
            rows.append({"step": step + 1, "of": total, "loss": round(float(np.mean(recent)), 4), "seconds": round(seconds, 1)})
            print(rows[-1], flush=True)
            recent.clear()
    return rows


@torch.no_grad()
def renew_rare_tokens(model: LlamaForCausalLM, counts: np.ndarray) -> int:
    """Draw the embeddings of tokens that the glosses hardly use anew, from the normal distribution of the others; returns how many.

    Adam pushes the rows of tokens that never come all the same way, to a norm of 3.4 against 1.1: such tokens cannot be told apart
    any more, and an adapter could not learn to say them (no logit of theirs reaches the others').
    """
    rows: Any = model.get_input_embeddings().weight
    rare = torch.from_numpy(counts < RARE_COUNT)
    common = rows[~rare]
    spread = torch.linalg.cholesky(torch.cov(common.T) + 1e-6 * torch.eye(rows.shape[1]))
    noise = torch.randn(int(rare.sum()), rows.shape[1], generator=torch.Generator().manual_seed(SEED))
    rows[rare] = common.mean(0) + noise @ spread.T
    return len(noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=BASE)
    parser.add_argument("--epochs", type=float, default=1.3, help="passes over the glosses")
    arguments = parser.parse_args()
    glosses = lzma.decompress(CORPUS.read_bytes()).decode().splitlines()
    tokenizer = make_tokenizer(glosses)
    blocks = make_blocks(tokenizer, glosses)
    model = make_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {blocks.size:,} tokens of text, vocabulary {len(tokenizer):,}", flush=True)
    rows = train(model, blocks, arguments.epochs)
    counts = np.bincount(blocks.flatten(), minlength=len(tokenizer))
    print(f"{renew_rare_tokens(model, counts)} rare tokens drawn anew", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(arguments.output)
    # Stored as bfloat16 (half the bytes in git); config.json says float32, which is what it computes in.
    stored: Any = model
    stored.to(torch.bfloat16).save_pretrained(arguments.output)
    config_path = arguments.output / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n")
    (arguments.output / "pretraining.json").write_text(json.dumps(rows, indent=0) + "\n")


if __name__ == "__main__":
    main()
