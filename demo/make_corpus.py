"""Turns WordNet's data files into demo/corpus/wordnet.txt.xz: one gloss a line, "words: definition; examples".

Only needed to remake the excerpt that the repository ships. The files come with Debian's `wordnet-base`:
    apt-get download wordnet-base && dpkg -x wordnet-base_*.deb wn && python demo/make_corpus.py wn/usr/share/wordnet
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus" / "wordnet.txt.xz"
LEFT_OUT = {"05", "20"}  # lexicographer files of animals and plants: a quarter of the nouns, mostly Latin names


def read_glosses(path: Path) -> list[str]:
    """Lines of one `data.*` file in its own order (wndb(5WN)), in which neighbours are about the same thing."""
    lines: list[str] = []
    for row in path.read_text(encoding="utf-8").splitlines():
        if row.startswith(" "):  # the licence stands on top of each file
            continue
        fields, gloss = row.split(" | ", maxsplit=1)
        parts = fields.split(" ")
        if parts[1] in LEFT_OUT:
            continue
        num_words = int(parts[3], 16)
        words = [word.split("(")[0].replace("_", " ") for word in parts[4 : 4 + 2 * num_words : 2]]
        lines.append(f"{', '.join(words)}: {' '.join(gloss.split())}")
    return lines


def main() -> None:
    folder = Path(sys.argv[1])
    lines = [line for part in ("noun", "verb", "adj", "adv") for line in read_glosses(folder / f"data.{part}")]
    text = "\n".join(lines) + "\n"
    CORPUS.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(lines):,} glosses, {len(text):,} characters -> {CORPUS} ({CORPUS.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
