import itertools
import re

import pytest

from toolchain.report import (
    Bars,
    Curve,
    Heat,
    Interval,
    Intervals,
    Load,
    Page,
    Roof,
    Roofline,
    Table,
    format_cell,
    render_html,
    render_text,
    si_text,
)

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


PLOT = Roofline(
    "Roofs & loads",
    (Roof("big <1>", 1e15, 1e13), Roof("small", 1e14, 1e12)),
    (
        Load("prefill", "prefill", 1e3, (1e15, 1e14)),
        Load("decode x 1", "decode", 1.0, (1e13, 1e12)),
        Load("decode x 64", "decode", 1.01, (1.01e13, None)),
    ),
    "left is memory",
)


def svg_of(plot):
    html = render_html(Page("Plot", parts=(plot,)))
    assert html == render_html(Page("Plot", parts=(plot,)))
    assert not re.search(r"<script|<link|src=|href=|url\(|https?:", html)
    return html.split("</style>")[1]


def test_a_roofline_bends_at_its_ridge_and_its_points_lie_on_it():
    svg = svg_of(PLOT)
    paths = re.findall(r'<polyline points="([^"]+)"/>', svg)
    assert len(paths) == 2
    for path in paths:
        (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, corner.split(","))) for corner in path.split()]
        assert x0 < x1 < x2
        assert y0 > y1 == y2  # it rises and is flat from the ridge on: y grows downwards
    # one decade is as far for every roof, on log axes, and both ridges are at 100 FLOP per byte
    assert len({path.split()[1].split(",")[0] for path in paths}) == 1
    circles = [(float(x), float(y)) for x, y in re.findall(r'<circle class="s\d" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert len(circles) == 5
    flat = [tuple(map(float, path.split()[2].split(",")))[1] for path in paths]
    assert [circles[0][1], circles[3][1]] == flat
    assert circles[1][1] - circles[0][1] == pytest.approx(circles[4][1] - circles[3][1], abs=0.2)


def test_a_roofline_names_its_roofs_and_loads_without_overlap():
    svg = svg_of(PLOT)
    assert 'aria-label="Roofs &amp; loads"' in svg
    assert "big &lt;1&gt;, decode x 64: 10.1 TFLOP/s at 1.010 FLOP/byte" in svg
    assert "small, decode x 64" not in svg
    names = [float(x) for x in re.findall(r'class="guide-name" transform="translate\(([\d.]+) ', svg)]
    assert abs(names[1] - names[2]) >= 20
    assert {"s0", "s1"} == set(re.findall(r'<circle class="(s\d)"', svg))
    assert "left is memory" in svg


def test_a_roofline_in_text_is_a_table_of_what_is_attained():
    text = render_text(Page("Plot", parts=(PLOT,)))
    rows = [line.split() for line in text.splitlines()]
    assert ["FLOP/byte", "–", "–", "–", "1,000", "1.000", "1.010"] in rows  # noqa: RUF001
    assert ["small", "100.0", "1.000", "100.0", "100.0", "1.000", "–"] in rows  # noqa: RUF001
    assert "left is memory" in text


def test_many_roofs_stay_apart_and_a_plot_without_points_renders():
    roofs = tuple(Roof(f"roof {i}", 1e12 * (1 + i / 1000), 1e11) for i in range(18))
    svg = svg_of(Roofline("many", roofs, (Load("decode", "decode", 5.0, (None,) * 18),)))
    names = sorted(float(y) for y in re.findall(r'<text x="\d+" y="([\d.]+)" dy="4">roof', svg))
    assert len(names) == 18
    assert min(b - a for a, b in itertools.pairwise(names)) >= 16.9
    assert "<circle" not in svg


FRONTIER = Curve(
    "Mixes & losses",
    "MB",
    "KL (nats)",
    ((80.0, 0.5), (100.0, 0.05), (140.0, 0.005)),
    (("all <int8>", 135.0, 0.006), ("exact", 270.0, 0.0)),
)


def test_a_frontier_falls_to_the_right_on_a_logarithmic_axis():
    svg = svg_of(FRONTIER)
    assert 'aria-label="Mixes &amp; losses"' in svg
    (points,) = re.findall(r'<polyline[^>]*points="([^"]+)"', svg)
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    xs, ys = zip(*places, strict=True)
    assert list(xs) == sorted(xs)
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.2)  # a decade each
    assert (xs[2] - xs[1]) / (xs[1] - xs[0]) == pytest.approx(2, rel=0.02)
    assert "all &lt;int8&gt;" in svg
    assert "exact" not in svg  # no loss at all has no place on a logarithmic axis


def test_a_frontier_in_text_is_its_points_and_names_in_order():
    rows = [line.split() for line in render_text(Page("Mixes", parts=(FRONTIER,))).splitlines()]
    numbers = [row[-2:] for row in rows if row and row[-1].replace(".", "").isdigit()]
    assert [row[0] for row in numbers] == sorted((row[0] for row in numbers), key=float)
    assert any(row[:2] == ["all", "<int8>"] for row in rows)
    assert any(row[0] == "exact" for row in rows if row)


def test_a_frontier_of_one_point_or_none_renders():
    for line in ((), ((1.0, 0.5),)):
        assert "NaN" not in svg_of(Curve("few", "MB", "KL", line, ()))


HEAT = Heat(
    "Rows & columns",
    "nats",
    ("layer", "head"),
    (("0", (1e-4, 1e-3, 0.0)), ("7", (1e-2, 1.0, float("inf")))),
)


def test_a_heat_is_darker_by_the_decade():
    cells = re.findall(
        r'<rect class="bar" x="(.+?)" y="(\d+)".*?fill-opacity="(.+?)"><title>(.*?)</title>', svg_of(HEAT)
    )
    shown = {title: (float(x), int(y), float(dark)) for x, y, dark, title in cells}
    assert list(shown) == [
        "layer 0, head 0: 0.0001000 nats",
        "layer 0, head 1: 0.001000 nats",
        "layer 7, head 0: 0.01000 nats",
        "layer 7, head 1: 1.000 nats",
        "layer 7, head 2: inf nats",
    ]
    dark = [place[2] for place in shown.values()]
    assert 0.1 < dark[1] - dark[0] == pytest.approx(dark[2] - dark[1], abs=0.02)
    assert dark[3] - dark[2] == pytest.approx(2 * (dark[2] - dark[1]), abs=0.02)
    assert dark[4] == dark[3] < 1
    xs, ys, _ = zip(*shown.values(), strict=True)
    assert xs[0] == xs[2] < xs[1] == xs[3] < xs[4] < 800
    assert ys[0] == ys[1] < ys[2] == ys[4]


def test_a_heat_in_text_is_its_largest():
    many = Heat("many", "nats", ("layer", "head"), (("3", tuple(float(i) for i in range(20))),))
    lines = render_text(Page("page", parts=(many,))).splitlines()
    assert "many: the 8 largest of 20" in lines
    assert [line.split()[:2] for line in lines[-8:]] == [["3", str(i)] for i in range(19, 11, -1)]


@pytest.mark.parametrize("columns", [1, 70])
def test_a_heat_of_any_width_keeps_its_names_apart(columns):
    svg = svg_of(Heat("wide", "nats", ("layer", "head"), (("0", (0.1,) * columns),)))
    names = [float(x) for x in re.findall(r'<text class="tick" x="([\d.]+)" y="30" text-anchor="middle">', svg)]
    assert all(b - a > 19 for a, b in itertools.pairwise(names))
    assert all(0 < x < 800 for x in names)
    assert svg.count('<rect class="bar"') == columns
    assert svg.count(">1.0e-01</text>") == (columns == 1)  # there is no room for more


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.25e15, "2.25 P"), (989.5e12, "989.5 T"), (4.8e9, "4.8 G"), (7e6, "7 M"), (14290.0, "14,290 "), (0.5, "0.5 ")],
)
def test_si_prefixes_stand_before_the_unit(value, text):
    assert si_text(value) == text


GATES = Intervals(
    "Gates",
    (
        Interval("eager, prompt: kl mean", 0.3, 0.5, 0.8, "0.0125 (0.0075 to 0.02) nats, gate 0.025", "passed"),
        Interval("eager, decode: kl mean", 0.8, 1.1, None, "0.0275 (0.02 to no bound) nats, gate 0.025", "undecided"),
        Interval("self, decode: max abs logit", 0.0, 0.0, 0.0, "0 logit, gate 0.001", "passed"),
        Interval("fake_quant, layers: error", 3.0, float("inf"), 5.0, "not finite, gate 0.01", "failed"),
    ),
)


def test_gates_are_dots_with_their_bounds_against_one_line():
    page = Page("a proof", "undecided", parts=(GATES,))
    html = render_html(page)
    line = float(re.search(r'<line class="axis" x1="([\d.]+)"', html)[1])
    dots = [float(x) for x in re.findall(r'<circle class="value" cx="([\d.]+)"', html)]
    reach = [tuple(map(float, pair)) for pair in re.findall(r'class="reach-of" x1="([\d.]+)" x2="([\d.]+)"', html)]
    assert dots[0] < line < dots[1]
    assert dots[2] < dots[0]
    assert dots[3] > dots[1]
    assert all(low <= high for low, high in reach)
    assert reach[1][1] > line
    assert "nan" not in html.lower()
    assert re.findall(r'<g class="(passed|undecided|failed)">', html) == ["passed", "undecided", "passed", "failed"]


def test_gates_in_a_terminal_are_a_table_of_values_and_verdicts():
    text = render_text(Page("a proof", parts=(GATES,)))
    assert "0.0125 (0.0075 to 0.02) nats, gate 0.025" in text
    assert "undecided" in text
