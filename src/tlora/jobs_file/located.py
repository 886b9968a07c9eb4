"""YAML text as values with their lines. Rejects repeated keys, tags and files that expand without end; `read.py` knows what a key means.

Built on PyYAML's nodes. ruamel.yaml's round-trip tree, which knows its lines, was tried: 103 statements instead of 109, a file of 0.8 MB in
20 s (it has no C parser), and of 462 files 71 were read otherwise (merge keys, keys that are numbers, `!!binary`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import yaml
from yaml.constructor import SafeConstructor

from tlora.errors import ConfigError

MAX_DEPTH = 16  # a jobs file needs 5
MAX_VALUES = 100_000  # after aliases are expanded: a file of nine lines can otherwise ask for a billion
_LOADER: type[yaml.SafeLoader] = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml reads 1 MiB in 0.1 s, the Python one in 10 s; not every build has it
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels, or an alias (*name) refers to its own anchor; 5 are enough"
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML 1.1 reads 1e-4, without a dot, as text

_OCTAL = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Located:
    """A value and where it was written; `line` is 0 for what came from the command line."""

    value: dict[str, Located] | list[Located] | Scalar
    line: int
    where: str

    @property
    def fields(self) -> dict[str, Located]:
        """The keys of a mapping; none for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def with_value(self, value: dict[str, Located] | list[Located] | Scalar) -> Located:
        """Another value at this place."""
        return Located(value, self.line, self.where)

    def problem(self, text: str) -> Problem:
        """A problem at this place."""
        return Problem(self.line, self.where, text)


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to fix, with its place."""

    line: int
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def join_problems(problems: Sequence[object]) -> str:
    """One message: the only problem, or a list of all under their count."""
    return str(problems[0]) if len(problems) == 1 else f"{len(problems)} problems:\n" + "\n".join(f"  {item}" for item in problems)


def plain(tree: Located) -> object:
    """The value without its places, for pydantic."""
    if isinstance(tree.value, dict):
        return {key: plain(item) for key, item in tree.value.items()}
    if isinstance(tree.value, list):
        return [plain(item) for item in tree.value]
    return tree.value


def read_yaml(text: str, where: Callable[[int], str], problems: list[Problem]) -> Located | None:
    """The one document in `text`, or None for an empty one. `where` turns a line's number into its place.

    Raises ConfigError where the text is not valid YAML; adds every other problem to `problems`.
    """
    try:
        _refuse_depth(text, where)
        node = _LOADER(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        if "maximum nesting depth" in str(error.problem):  # libyaml's own from 0.2.6 on, which reads ahead of the check
            raise ConfigError(f"{where(line)}: {_TOO_DEEP}") from None
        if error.problem_mark and re.match(r" *\t", "".join(text.split("\n")[line - 1 : line])):  # which libyaml does not say
            raise ConfigError(f"{where(line)}: the line begins with a tab, and YAML takes spaces alone; indent it with spaces") from None
        raise ConfigError(
            f"{where(line)}: this is not valid YAML: {error.problem or error.context}; check indentation, quotes and brackets there"
        ) from None
    except (yaml.reader.ReaderError, UnicodeEncodeError) as error:  # of a character that no YAML may hold
        code = error.character if isinstance(error, yaml.reader.ReaderError) else ord(error.object[error.start])
        line = text.count("\n", 0, text.find(chr(code))) + 1
        raise ConfigError(f"{where(line)}: this is not valid YAML: the character U+{code:04X} is not allowed; remove it there") from None
    if node is None:
        return None
    return _Builder(where, problems).build(node, _line(node))


def _refuse_depth(text: str, where: Callable[[int], str]) -> None:
    """libyaml composes recursively in C: half a million brackets crash the process."""
    depth = 0
    for event in cast("Iterator[yaml.Event]", yaml.parse(text, Loader=_LOADER)):  # pyright: ignore[reportUnknownMemberType]
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            mark = cast("yaml.Mark", event.start_mark)  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(f"{where(mark.line + 1)}: {_TOO_DEEP}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _misread(text: str) -> str:
    """What YAML 1.1 makes of a number that most people read otherwise: octal digits, and minutes and seconds."""
    if _OCTAL.fullmatch(text):
        sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text.lstrip("+"))
        return (
            f"{text}: YAML reads a number that begins with 0 as octal, here {sign}{int(digits, 8)}; "
            f'write {sign}{digits.replace("_", "").lstrip("0")}, or "{text}" in quotes if it is a name'
        )
    if ":" in text:
        return f'{text}: YAML reads digits with a colon as a number to the base of 60; write the number itself, or "{text}" in quotes'
    return ""


class _Builder:
    """Turns composed nodes into `Located` values and counts them: aliases of aliases can expand exponentially."""

    def __init__(self, where: Callable[[int], str], problems: list[Problem]) -> None:
        self._where, self._problems, self._values, self._depth = where, problems, 0, 0

    def build(self, node: yaml.Node, line: int) -> Located:
        self._values += 1
        if self._values > MAX_VALUES:
            raise ConfigError(f"{self._where(line)}: the file holds more than {MAX_VALUES} values, aliases (*name) counted; split the file")
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"{self._where(line)}: {_TOO_DEEP}")
        self._depth += 1
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node)
        elif isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq")
            value = [self.build(item, _line(item)) for item in node.value]
        else:
            value = self._scalar(node)
        self._depth -= 1
        return Located(value, line, self._where(line))

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        self._check_tag(node, "map")
        fields: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            value = self.build(value_node, line)
            if key_node.tag == _TAG + "merge":
                for source in reversed(value.value if isinstance(value.value, list) else [value]):
                    merged |= source.fields
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.append(Problem(line, self._where(line), "a key must be a word, not a list or a mapping"))
                continue
            key = str(key_node.value)
            if key in fields:
                earlier = fields[key].line
                self._problems.append(Problem(line, self._where(line), f"{key}: given twice, first on line {earlier}; keep one of the two"))
                continue
            fields[key] = value
        return {key: value for key, value in merged.items() if key not in fields} | fields

    def _scalar(self, node: yaml.Node) -> Scalar:
        text = str(node.value)
        tag = node.tag.removeprefix(_TAG)
        if tag == "str" and isinstance(node, yaml.ScalarNode) and not node.style and _EXPONENT.fullmatch(text):
            return float(text)
        if tag in ("int", "float") and isinstance(node, yaml.ScalarNode) and not node.style and (meant := _misread(text)):
            line = _line(node)
            self._problems.append(Problem(line, self._where(line), meant))
            if _OCTAL.fullmatch(text):
                return text
        if tag in ("int", "float", "bool", "null"):
            try:
                return cast("Scalar", SafeConstructor().construct_object(node))  # pyright: ignore[reportUnknownMemberType]
            except ValueError:  # `!!int x`, or a number of thousands of digits
                return text
        if tag not in ("str", "timestamp", "value"):
            self._check_tag(node, "str")
        return text  # a date stays text: it can only be a name or a path

    def _check_tag(self, node: yaml.Node, expected: str) -> None:
        if node.tag != _TAG + expected:
            line = _line(node)
            self._problems.append(Problem(line, self._where(line), f"{node.tag}: YAML tags are not supported; remove it"))
