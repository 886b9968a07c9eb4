"""The pages' HTML, as Jinja2 templates with autoescape: all text is escaped unless it was made as `Markup` here."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tlora.report.looks import mark
from tlora.wording.numbers import shorten


def render(template: str, /, **values: Any) -> Markup:
    """A file of `templates/` with `values` put in, each escaped unless it is `Markup`."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tlora.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"mark": mark, "shorten": shorten}
    return environment
