"""Rows a second that become tokens, with one core and with more, through the data worker of `tlora train`.

    python -m bench.tokenize_rows [--rows 50000] [--cores 1,2] [--repeats 3] [--json FILE]

Seeded chats of one to three rounds, a BPE tokenizer with a ChatML template, a fresh cache for each measurement. The numbers of cores take
turns within each repeat, so that a change of the machine's speed meets all of them; medians are printed. The clock starts with the first
report of progress, when the libraries are loaded, and stops when the set is on the disk. Memory is what the worker and its processes have
at their peak, each shared page counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tlora.data.prepare import Prepared, PrepareProgress, prepare
from tlora.data.request import PrepareRequest
from tlora.job import DataConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SYLLABLES = ("ba", "con", "der", "e", "fi", "gen", "ho", "in", "ka", "lo", "men", "nis", "o", "per", "ra", "ste", "ti", "un", "ver", "za")
_LOOK_SECONDS = 0.2


def _text(generator: random.Random, words: int) -> str:
    return " ".join("".join(generator.choices(_SYLLABLES, k=generator.randint(1, 4))) for _ in range(words))


def write_rows(path: Path, rows: int, seed: int = 0) -> None:
    """Chats of about 570 bytes."""
    generator = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            messages = []
            for _ in range(generator.randint(1, 3)):
                messages.append({"role": "user", "content": _text(generator, generator.randint(5, 15))})
                messages.append({"role": "assistant", "content": _text(generator, generator.randint(10, 50))})
            file.write(json.dumps({"messages": messages}) + "\n")


def save_tokenizer(directory: Path) -> None:
    tokenizer, generator = Tokenizer(models.BPE()), random.Random(1)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((_text(generator, 50) for _ in range(2000)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(directory)


def measure(directory: Path, cores: int) -> dict[str, Any]:
    """Of one run over all rows with so many cores."""
    peak, ended, begun = [0], threading.Event(), list[float]()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            found = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    found += process.memory_full_info().pss
                except psutil.Error:  # it has ended since
                    continue
            peak[0] = max(peak[0], found)

    def progress(_: PrepareProgress) -> None:
        if not begun:
            begun.append(time.perf_counter())

    usable = os.sched_getaffinity(0)
    watcher = threading.Thread(target=watch)
    watcher.start()
    os.sched_setaffinity(0, sorted(usable)[:cores])
    try:
        with tempfile.TemporaryDirectory(dir=directory) as cache:
            data = DataConfig(path="rows.jsonl", max_length=2048)
            request = PrepareRequest("rows", data, str(directory / "tokenizer"), 4200, Path(cache), directory)
            made = prepare([request], progress)["rows"]
            seconds = time.perf_counter() - begun[0]
    finally:
        os.sched_setaffinity(0, usable)
        ended.set()
        watcher.join()
    assert isinstance(made, Prepared), made
    return {"cores": cores, "seconds": seconds, "rows_per_second": made.report.rows / seconds, "peak_bytes": peak[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--cores", default="", help="such as 1,2,4 (default: 1, 2, 4 ... and all that there are)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    usable = len(os.sched_getaffinity(0))
    counts = [int(part) for part in options.cores.split(",") if part] or sorted({usable, *(1 << i for i in range(usable.bit_length()))})
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_rows(directory / "rows.jsonl", options.rows)
        save_tokenizer(directory / "tokenizer")
        found = [
            measure(directory, cores) | {"load": os.getloadavg()[0]} for _ in range(options.repeats) for cores in counts if cores <= usable
        ]
        size = (directory / "rows.jsonl").stat().st_size
    table, alone = [], 0.0
    for cores in dict.fromkeys(each["cores"] for each in found):
        same = [each for each in found if each["cores"] == cores]
        rate, peak = (statistics.median(each[key] for each in same) for key in ("rows_per_second", "peak_bytes"))
        alone = alone or rate / cores
        table.append({"cores": cores, "rows_per_second": rate, "share_of_cores": rate / alone / cores, "peak_bytes": peak})
        print(
            f"{cores} core{'s' * (cores > 1)}: {rate:,.0f} rows/s, {rate / alone / cores:.2f} of one core's each, {peak / 2**20:,.0f} MiB"
        )
    if options.json:
        facts = {"benchmark": "tokenize_rows", "rows": options.rows, "bytes": size, "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps(facts | {"table": table, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
