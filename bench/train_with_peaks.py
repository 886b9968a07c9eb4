"""`tlora` with its arguments, which at its end writes the peaks of its GPU's memory, in bytes.

python -m bench.train_with_peaks FILE train jobs.yaml ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tlora.cli import main as run_tlora


def main() -> None:
    file = Path(sys.argv.pop(1))
    try:
        run_tlora()
    finally:
        _write_peaks(file)


def _write_peaks(file: Path) -> None:
    """Nothing where this process has used no GPU, as where the devices are those of other processes."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks = {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        file.write_text(json.dumps(peaks), encoding="utf-8")


if __name__ == "__main__":
    main()
