"""Reading a page back: its elements and cells as a browser would see them, its figures as its script would draw them."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "link", "input", "br", "polyline", "line"}


class PageReader(HTMLParser):
    """Collects elements and the text of each table row's cells; refuses elements that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(str(page))  # Markup would escape what is added to it
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            return
        self.text += data
        if "td" in self._open or "tr" in self._open:
            self.tables[-1][-1][-1] += data

    def table(self, *heads: str) -> list[list[str]]:
        """The rows under the heads of the one table that begins with `heads`."""
        (found,) = [table for table in self.tables if tuple(table[0][: len(heads)]) == heads]
        return found[1:]

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.elements for key, value in attrs.items() if key == name and value is not None]


def unpack(page: str, element: str) -> str:
    packed = re.findall(rf"id='{element}'>([A-Za-z0-9+/=]*)</script>", page)
    assert len(packed) == 1
    return gzip.decompress(base64.b64decode(packed[0])).decode()


def read_figures(page: str) -> list[dict[str, Any]]:
    """The figures of a page, with the shared lists put back as the page's script does."""
    payload = json.loads(unpack(page, "payload"), parse_constant=_refuse)

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return payload["shared"][value["$"]] if "$" in value else {key: whole(entry) for key, entry in value.items()}
        return [whole(entry) for entry in value] if isinstance(value, list) else value

    return [whole(figure) for figure in payload["figures"]]


def _refuse(constant: str) -> None:
    raise AssertionError(f"a browser's JSON.parse refuses {constant}")


def read_charts(page: str) -> dict[str, dict[str, Any]]:
    """Figures by the title that stands over them."""
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    return dict(zip(titles, read_figures(page), strict=True))
