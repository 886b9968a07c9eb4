"""Output of the commands: consoles, text made safe for a terminal, sizes in words, errors in one message."""

from __future__ import annotations

import codecs
import inspect
import json
import os
import shlex
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from errno import ENAMETOOLONG, EPIPE
from functools import wraps
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from tlora.errors import ConfigError, TloraError
from tlora.file_identity import FileIdentity, identity_of
from tlora.wording.numbers import DASH, MINUS

if TYPE_CHECKING:
    from pydantic import BaseModel

_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_PLAIN_WIDTH = 200  # of a file or a pipe: tables must not be cut to 80 columns there
_KEPT_CONTROLS = "\n\t"
_SPELLED_OUT = "tlora.spelled-out"
_IN_ASCII = {"→": "->", "…": "...", DASH: "-", MINUS: "-", "—": "-", "∞": "inf", "\u00d7": "x", "·": "-"}


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the stream's encoding lacks, so that printing an arrow cannot fail a run."""
    assert isinstance(error, UnicodeEncodeError), f"only writing replaces characters: {error}"
    return "".join(_IN_ASCII.get(char, "?") for char in error.object[error.start : error.end]), error.end


codecs.register_error(_SPELLED_OUT, _spell_out)


class _Console(Console):
    """Raises ConfigError if stdout cannot be written (a full disk, for example) and BrokenPipeError if its reader has closed it. It raises
    once: later output is discarded.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if self.stderr:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the rest of the buffer fails again at exit
            if error.errno == EPIPE:
                raise
            raise ConfigError(f"stdout cannot be written ({error.strerror}). Free space there, or redirect it elsewhere") from error

    def on_broken_pipe(self) -> None:
        """rich would exit the program here."""
        raise BrokenPipeError(EPIPE, "stdout was closed by its reader")


def open_console(stderr: bool = False) -> Console:
    """The console of stdout (or stderr). Markup, emoji and highlighting are off: names, paths and data are printed unchanged."""
    stream = cast("TextIO | None", sys.stderr if stderr else sys.stdout)  # None if it was closed: rich then prints nothing
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors=_SPELLED_OUT)
    width = None if (stream and stream.isatty()) or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return _Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, tab_size=4)


def open_table(**options: Any) -> Table:
    """An empty table without lines, as all commands print them; `options` are rich's."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", **options)


_LEAST_NAME, _LEAST_FOLDED = 12, 8  # characters of a line to which what can be folded may shrink


def print_table(console: Console, table: Table) -> None:
    """Print the table; where it is wider than the console as several, each with its first column."""
    for part in tables_within(table, console.width):
        console.print(part)


def tables_within(table: Table, width: int) -> list[Table]:
    """The table, cut between columns into as few as have room in `width`. All begin with its first column, which names the rows; columns
    that do not wrap are whole.
    """
    first, *others = table.columns
    name = min(_width(first), max(_LEAST_NAME, width // 4))
    parts, taken = list[list[Column]](), width
    for column in others:
        needed = _width(column) if column.no_wrap else _least_width(column)
        if taken + needed > width:
            parts.append([])
            taken = name + 2
        parts[-1].append(column)
        taken += needed + 2
    tables: list[Table] = []
    for columns in parts or [[]]:
        part = copy(table)
        part.columns = [replace(column, _index=index) for index, column in enumerate([replace(first, min_width=name), *columns])]
        part.title = None if tables else table.title
        tables.append(part)
    return tables


def _width(column: Column) -> int:
    return column.width or max((cell_len(line) for text in _texts(column) for line in text.split("\n")), default=0)


def _least_width(column: Column) -> int:
    if column.overflow == "fold":
        return min(_width(column), _LEAST_FOLDED)
    return column.width or max((cell_len(word) for text in _texts(column) for word in text.split()), default=0)


def _texts(column: Column) -> list[str]:
    return [str(cell) for cell in (column.header, column.footer, *column.cells) if isinstance(cell, str | Text)]


def shows_live(console: Console) -> bool:
    """Whether a table may be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal


def close_stdin() -> None:
    """From now on, reading stdin gives end of file."""
    if cast("TextIO | None", sys.stdin) is not None:  # if it was closed, descriptor 0 may be another file by now
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def printable(text: str) -> str:
    """`text` without control characters: data and models can contain escape sequences and marks that change the writing direction."""
    return "".join(
        char if char in _KEPT_CONTROLS or unicodedata.category(char) not in ("Cc", "Cf", "Cs") or char in "\u200c\u200d" else "\ufffd"
        for char in text
    )


def bytes_text(count: int) -> str:
    """1.2 GiB."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def path_text(path: str | Path) -> str:
    """The path relative to the current directory, unless it lies outside."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return relative if not relative.startswith("..") else str(path)


def say(text: str, style: str = "", *, stderr: bool = False) -> None:
    """Print a line to stdout or stderr, without control characters."""
    open_console(stderr).print(printable(text), style=style, soft_wrap=True)


def note(text: str) -> None:
    """Print to stderr what a script does not read."""
    say(text, "dim", stderr=True)


def say_error(text: str) -> None:
    say(f"error: {text}", "red", stderr=True)


def say_json(answer: BaseModel | Sequence[BaseModel]) -> None:
    """Print the server's answer, including keys that this version does not know."""
    content: Any = [item.model_dump(mode="json") for item in answer] if isinstance(answer, Sequence) else answer.model_dump(mode="json")
    say(json.dumps(content, indent=2, ensure_ascii=True))


class Command(TyperCommand):
    """Refuses an option that is given more than once and takes one value: all but the last would be dropped without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in dict.fromkeys(given):
            count = given.count(option)
            if count > 1 and isinstance(option, TyperOption) and not (option.multiple or option.is_flag):
                takes = f"takes one value ({option.metavar})" if option.metavar else "takes one value"
                ctx.fail(f"{option.opts[0]} is given {count} times and {takes}: all but the last would be dropped. Give it once")
        return super().parse_args(ctx, args)


def add_command(app: typer.Typer, run: Callable[..., None], name: str | None = None, panel: str | None = None) -> None:
    """Make `run` a command of `app` with the option --debug; its errors are reported by `exit_on_error`."""

    @wraps(run)
    def reported(*, debug: bool, **options: Any) -> None:
        with exit_on_error(debug):
            run(**options)

    signature = inspect.signature(run, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Debug)
    signature = signature.replace(parameters=[*signature.parameters.values(), option])
    reported.__signature__ = signature  # type: ignore[attr-defined]
    # evaluated once: typer evaluates strings twice a command, which was most of the time of `tlora --help`
    reported.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    app.command(name, cls=Command, rich_help_panel=panel)(reported)


@contextmanager
def exit_on_error(debug: bool) -> Iterator[None]:
    """Prints an error that the user can fix as one message, exit code 2; a bug keeps its traceback. `debug` shows both tracebacks."""
    try:
        if cast("TextIO | None", sys.stdout) is None:
            raise ConfigError("stdout is closed, and results are printed there. Redirect it to a file, a pipe or /dev/null")
        yield
    except TloraError as error:
        if debug:
            raise
        say_error(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        if debug or error.errno != ENAMETOOLONG or error.filename is None:
            raise
        say_error(f"{os.fsdecode(error.filename)!r}: {error.strerror}. Give a shorter path")
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stop:  # before or after training; during training the engine saves checkpoints
        if stop.args:  # what is kept
            say(str(stop), stderr=True)
        raise typer.Exit(130) from None


@contextmanager
def keep_interrupts() -> Iterator[None]:
    """Around imports of large libraries: a Ctrl-C that one of them catches, around an optional import, is raised again at the end."""
    if threading.current_thread() is not threading.main_thread():  # other threads receive no signals
        yield
        return
    swallowed: list[int] = []

    def interrupt(number: int, _: object) -> None:
        swallowed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if swallowed:
        raise KeyboardInterrupt


@contextmanager
def say_how_to_resume(directory: Path, command: Sequence[str]) -> Iterator[None]:
    """A Ctrl-C that ends a run at once also says how to resume it, by `tlora` with the arguments `command`. `directory` has the run's
    `run.json`. Before the run has begun, and this file with it, there is nothing to resume.
    """
    file = directory / "run.json"
    before = _identity(file)
    try:
        yield
    except KeyboardInterrupt:
        if _identity(file) == before:
            raise
        kept = "each unfinished job goes on from its last checkpoint, or from step 0 if it has none"
        raise KeyboardInterrupt(f"Quit at once; {kept}. Resume with: {shlex.join(['tlora', *command])}") from None


def _identity(file: Path) -> FileIdentity | None:
    try:
        return identity_of(file.stat())
    except OSError:
        return None
