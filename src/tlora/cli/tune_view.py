"""The output of `tlora tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from tlora.cli.terminal import open_table, path_text

if TYPE_CHECKING:
    from tlora.engine.tune import Tuned


def print_tuned(console: Console, tuned: Tuned) -> None:
    """A row per launch: the chosen tile, its time and its gain; then the path of the table."""
    from tlora.engine.tune import key_text, tile_text

    table = open_table()
    table.add_column("launch", no_wrap=True)
    table.add_column("tile", no_wrap=True)
    for heading in ("us by rule", "us", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for choice in tuned.choices:
        by_rule = choice.tile == choice.rule
        table.add_row(
            key_text(choice.key),
            "by rule" if by_rule else tile_text(choice.tile),
            f"{1e6 * choice.rule_seconds:.1f}",
            f"{1e6 * choice.seconds:.1f}",
            "" if by_rule else f"{choice.gain:.1%}",
        )
    console.print(table)
    for choice in tuned.choices:
        for fault in choice.faults:
            console.print(f"rejected for {key_text(choice.key)}: {fault}", style="dim", soft_wrap=True)
    better = sum(choice.tile != choice.rule for choice in tuned.choices)
    console.print(f"\n{tuned.gpu}: {better} of {len(tuned.choices)} launches are faster than by rule", soft_wrap=True)
    console.print(f"in {tuned.seconds:.0f} s; table: {path_text(tuned.path)}", soft_wrap=True)
