"""What benchmarks of one worker over a base have in common: options, the base, and the file of what was found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.machine import facts, write
from bench.shapes import DEMO_BASE, SHAPES, write_base


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--shape", choices=sorted(SHAPES), help="of a base that is made here; the demo's base without it")
    base.add_argument("--base", type=Path, default=DEMO_BASE, help="a directory")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    return parser


def find_base(args: argparse.Namespace, directory: Path) -> Path:
    """The base that is named, or one of the shape, made in `directory`."""
    return write_base(args.shape, directory / "base", torch.device(args.device)) if args.shape else args.base


def write_result(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """With where it was measured and by which settings."""
    settings = {key: str(value) for key, value in vars(args).items()}
    write(args.json, facts(torch.device(args.device), args.commit) | {"settings": settings} | found)
