import re

import pytest

from toolchain.report import Bars, Page, Table, format_cell, render_html, render_text

PAGE = Page(
    "Parity of <tiny> & [bold]co",
    "failed",
    (("recipe", "int8"), ("note", "[red]not markup[/red]")),
    (
        Table(
            "Gates",
            ("metric", "value", "count", "passed"),
            (("kl_mean", 0.0123456, 2048, True), ("top1", None, 7, False)),
            "KL in nats",
        ),
        Bars("Decode", "tok/s", (("engine", 120.0), ("eager", 30.0), ("broken", float("nan")))),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "\N{EN DASH}"), (True, "pass"), (False, "fail"), (5, "5"), (538090432, "538,090,432"), ("word", "word"),
        (0.0, "0"), (5.0, "5.000"), (0.999999, "1.000"), (123456.7, "123,500"), (12.3456, "12.35"),
        (0.00012344, "0.0001234"), (1.5e-7, "1.500e-07"), (3e12, "3.000e+12"), (float("inf"), "inf"), (-2.5, "-2.500"),
    ],
)  # fmt: skip
def test_cells_are_shown_with_four_digits(cell, text):
    assert format_cell(cell) == text


def test_text_is_plain_and_says_everything():
    text = render_text(PAGE, width=80)
    assert "\x1b" not in text
    assert text.startswith("Parity of <tiny> & [bold]co: FAILED\nrecipe  int8\nnote    [red]not markup[/red]\n")
    for word in ("0.01235", "2,048", "pass", "fail", "KL in nats", "120.0 tok/s"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80
    lengths = [line.count("█") for line in text.splitlines() if "tok/s" in line]
    assert lengths == [40, 10, 0]


def test_html_is_self_contained_escaped_and_the_same_every_time():
    html = render_html(PAGE)
    assert html == render_html(PAGE)
    assert "Parity of &lt;tiny&gt; &amp; [bold]co" in html
    assert not re.search(r"<script|<link|src=|href=|url\(|https?:", html)
    assert "prefers-color-scheme: dark" in html
    assert '<span class="verdict failed">failed</span>' in html
    assert '<td class="pass">pass</td>' in html
    assert '<td class="n">0.01235</td>' in html


def test_bars_are_drawn_to_scale():
    widths = re.findall(r'class="bar"[^>]* width="([\d.]+)"', render_html(PAGE))
    assert widths == ["576.0", "144.0", "0.0"]


def test_an_empty_page_renders():
    page = Page("Nothing", parts=(Table("None", ("a",), ()), Bars("No bars", "ms", ())))
    assert "Nothing" in render_text(page)
    assert "verdict" not in render_html(page).split("</style>")[1]
