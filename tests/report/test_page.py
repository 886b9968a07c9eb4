"""The page's shell: whole HTML, nothing loaded from anywhere, figures that come back as they went in."""

from __future__ import annotations

import math
import re

from markupsafe import Markup
from pages import PageReader, read_figures, unpack
from plotly.offline import get_plotlyjs

from tlora.report.line_styles import LineStyle
from tlora.report.page import ROWS_SHOWN, Chart, LegendEntry, Section, render_page
from tlora.report.tables import Cell, TableRow, table

X = list(range(20))


def make_page() -> str:
    trace = {
        "type": "scatter",
        "legendgroup": "a",
        "x": X,
        "y": [math.nan, 1.23456789, math.inf, 1e300] + [0.5] * 16,
        "meta": {"x": {"step": X}},
    }
    chart = Chart("Loss <1>", {"data": [trace, trace | {"y": X}], "layout": {"height": 200}}, note="a < b", log=True)
    legend = [LegendEntry('<a> "b"', LineStyle("#123456"))]
    return render_page('Run "x" & <y>', [Section("One", Markup("<p>two</p>")), Section("Three", charts=[chart], legend=legend)])


def test_figures_come_back_with_gaps_for_what_is_not_finite() -> None:
    (figure,) = read_figures(make_page())
    first, second = figure["data"]
    assert first["x"] == X and second["y"] == X and first["meta"]["x"]["step"] == X
    assert first["y"][:4] == [None, 1.2346, None, 1e300]


def test_a_list_that_several_traces_share_is_written_once() -> None:
    assert unpack(make_page(), "payload").count("17,18,19") == 1


def test_the_library_is_inside_once_with_its_licence_named() -> None:
    page = make_page()
    assert unpack(page, "library") == get_plotlyjs()
    assert re.search(r"<!--[^>]*plotly\.js v[\d.]+[^>]*MIT license[^>]*-->", page)
    assert len(page) < 2.5e6


def test_nothing_is_loaded() -> None:
    reader = PageReader(make_page())
    assert [value for key in ("src", "srcset", "action", "data", "poster") for value in reader.attributes(key)] == []
    assert reader.attributes("href") == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", make_page())
    (policy,) = [attrs["content"] for tag, attrs in reader.elements if tag == "meta" and "http-equiv" in attrs]
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy


def test_titles_and_groups_are_escaped() -> None:
    page = make_page()
    reader = PageReader(page)
    assert "<h3>Loss &lt;1&gt;</h3>" in page and 'Run "x" & <y>' in reader.text and "a < b" in reader.text
    assert reader.attributes("data-group") == ['<a> "b"'] and not [tag for tag, _ in reader.elements if tag in ("a", "y")]


def test_text_is_escaped_unless_it_was_made_as_markup() -> None:
    reader = PageReader(render_page("x", [Section("", "<script>alert(1)</script>"), Section("", Markup("<em>ready</em>"))]))
    assert "<script>alert(1)</script>" in reader.text and [tag for tag, _ in reader.elements].count("em") == 1
    cells = [Cell("<a>", 1.0), Cell(Markup("<b>{}</b>").format("<c>"), math.nan)]
    page = str(table(("policy", "#<d>"), [TableRow(cells)]))
    assert "&lt;a&gt;" in page and "<b>&lt;c&gt;</b>" in page and "&lt;d&gt;" in page and "data-value" not in page


def test_a_page_without_charts_needs_no_library() -> None:
    page = render_page("Nothing yet", [Section("", "<p>empty</p>")])
    assert unpack(page, "library") == "" and read_figures(page) == [] and len(page) < 30_000


def test_a_scale_switch_starts_as_the_figure_does_and_tells_what_a_log_axis_leaves_out() -> None:
    def page(scale: str, values: list[float]) -> PageReader:
        raw = {"type": "scatter", "y": values, "meta": {"role": "raw"}}
        figure = {"data": [raw, raw | {"meta": {"role": "mean"}}], "layout": {"yaxis": {"type": scale}}}
        return PageReader(render_page("x", [Section("", charts=[Chart("Loss", figure, log=True)])]))

    def pressed(reader: PageReader) -> list[str | None]:
        return [attrs["data-scale"] for _, attrs in reader.elements if "data-scale" in attrs and attrs["aria-pressed"] == "true"]

    def hidden(reader: PageReader) -> list[bool]:
        return ["hidden" in attrs for _, attrs in reader.elements if attrs.get("class") == "unshown"]

    log, linear = page("log", [0.0, -1.0, 2.0, math.nan]), page("linear", [0.0, 1.0])
    assert pressed(log) == ["log"] and "2 values of zero or below are left out: see linear." in log.text and hidden(log) == [False]
    assert pressed(linear) == ["linear"] and hidden(linear) == [True]
    assert hidden(page("log", [1.0, 2.0])) == []


def test_the_fold_of_a_long_table_hides_what_its_button_counts() -> None:
    page = make_page()
    assert f"ROWS_SHOWN = {ROWS_SHOWN};" in page and f".folded tbody tr:nth-child(n+{ROWS_SHOWN + 1}){{display:none" in page


def test_without_scripts_a_page_says_where_its_numbers_are() -> None:
    assert "<noscript><style>.legend,.charts{display:none}</style></noscript>" in make_page()
    assert "the tables hold all results" in make_page()
