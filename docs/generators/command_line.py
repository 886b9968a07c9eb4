"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

from typer.main import get_command

from tlora.cli.commands import app


def command_line() -> str:
    commands = dict(sorted(_commands(get_command(app), "tlora")))
    index = [f"- [`{name}`](#{name.replace(' ', '-')}): {_first_sentence(command.help)}" for name, command in commands.items()]
    return "\n".join(index) + "\n\n" + "\n\n".join(_section(name, command) for name, command in commands.items())


def _commands(group: Any, name: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for word, command in group.commands.items():
        if command.hidden:
            continue
        path = f"{name} {word}"
        found += _commands(command, path) if hasattr(command, "commands") else [(path, command)]
    return found


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    rows = [record for each in command.params if not each.hidden and (record := each.get_help_record(context))]
    lines = [f"## `{name}`", "", " ".join(command.help.split()), "", "```text", usage, "```"]
    if rows:
        lines += ["", "| argument or option | |", "| --- | --- |"]
        lines += [f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
