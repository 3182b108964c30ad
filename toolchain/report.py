"""Results as one page: the same parts rendered as terminal text or as a self-contained HTML file."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

TEMPLATE = Path(__file__).with_name("report.html.jinja")
SIGNIFICANT = 4
"""Digits of a measured number. float32 sums in another order, as other processors form them, agree in about five: more
would say nothing of the model or of the machine, and make equal reports differ."""
TEXT_BAR_COLUMNS, TEXT_HEAT_ROWS = 40, 8
SVG_WIDTH, SVG_VALUE_WIDTH, SVG_ROW_HEIGHT, SVG_LETTER_WIDTH = 800, 160, 30, 8
HEAT_CELL, HEAT_DARKEST = 90, 0.8
"""Cells that wide have room for their value, which must stay legible on the darkest."""
PLOT = {"left": 64, "right": 690, "top": 100, "bottom": 440, "height": 490}
"""Edges of a roofline's axes in its picture; outside them stand the names of the loads (above) and roofs (right)."""
INTERVAL_HEIGHT, SMALLEST_SHARE = 44, 1e-4
"""Pixels of a row, and the least share of a gate that is drawn: what is below stands at the edge."""
ROOF_NAME_GAP, LOAD_NAME_GAP = 17, 20

Cell = str | int | float | bool | None


def significant(value: float, digits: int = SIGNIFICANT) -> float:
    """A measured number with the digits that mean something, as documents hold it."""
    return float(f"{value:.{digits}g}")


Measured = Annotated[float, pydantic.PlainSerializer(significant)]
"""A field that keeps all digits, for gates and formulas, and is written with those that mean something."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column heads; floats are shown with four significant digits, True/False as pass/fail."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Labelled horizontal bars in one unit."""

    title: str
    unit: str
    bars: tuple[tuple[str, float], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Roof:
    """A machine's two limits: FLOP/s and bytes/s."""

    label: str
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Work of an `intensity` in FLOP per byte, and the FLOP/s it attains under each roof; None: not possible there.

    Loads of one `series` have one colour.
    """

    label: str
    series: str
    intensity: float
    attained: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Roofline:
    """Log-log plot of FLOP/s over FLOP per byte: under its roof a machine is bound by memory or by compute."""

    title: str
    roofs: tuple[Roof, ...]
    loads: tuple[Load, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of (x, y > 0) points in order of x, and named points (label, x, y); y is logarithmic."""

    title: str
    x_name: str
    y_name: str
    line: tuple[tuple[float, float], ...]
    marks: tuple[tuple[str, float, float], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Heat:
    """One value per row and column, all of one unit; a plot on a logarithmic scale, in text the largest few."""

    title: str
    unit: str
    names: tuple[str, str]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """One gated value: its place and its bounds as shares of what the gate allows, 1 being the gate.

    `low` and `high` may be None, where the value has no bound. `text` is the value with its unit, bounds and gate.
    """

    label: str
    low: float | None
    value: float
    high: float | None
    text: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Intervals:
    """Values with their uncertainty against one line, the gate; left of it is passed. Shares are on a log scale."""

    title: str
    rows: tuple[Interval, ...]
    note: str = ""


Part = Table | Bars | Roofline | Curve | Heat | Intervals


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report: a verdict ("passed", "failed" or none), key facts, then tables, bars and plots."""

    title: str
    verdict: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    parts: tuple[Part, ...] = field(default=())


def render_text(page: Page, *, width: int = 110) -> str:
    """The page for a terminal: plain text of at most `width` columns, no colour codes."""
    from rich import box, console, table

    out = io.StringIO()
    screen = console.Console(file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    screen.print(page.title + (f": {page.verdict.upper()}" if page.verdict else ""))
    facts = table.Table.grid(padding=(0, 2))
    for name, text in page.facts:
        facts.add_row(_plain(name), _plain(text))
    screen.print(facts)
    for part in page.parts:
        shown = part if isinstance(part, Bars) else _as_table(part)
        screen.print()
        screen.print(_plain(shown.title))
        if isinstance(shown, Bars):
            grid = table.Table.grid(padding=(0, 2))
            for row in _text_bars(shown):
                grid.add_row(*(_plain(cell) for cell in row))
            screen.print(grid)
        else:
            body = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            for name, numeric in zip(shown.columns, _numeric_columns(shown), strict=True):
                body.add_column(_plain(name), justify="right" if numeric else "left")
            for row in shown.rows:
                body.add_row(*(_plain(format_cell(cell)) for cell in row))
            screen.print(body)
        if part.note:
            screen.print(_plain(part.note))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _plain(text: str):  # noqa: ANN202 - rich is imported late
    """Text that rich prints as it stands: brackets in a name are no markup."""
    from rich.text import Text

    return Text(text)


def _text_bars(bars: Bars) -> list[tuple[str, str, str]]:
    return [
        (label, f"{format_cell(value)} {bars.unit}", "█" * round(share * TEXT_BAR_COLUMNS))
        for (label, value), share in zip(bars.bars, _shares(bars), strict=True)
    ]


def _as_table(part: Table | Roofline | Curve | Heat | Intervals) -> Table:
    """A plot as its numbers."""
    if isinstance(part, Intervals):
        lines = tuple((row.label, row.text, row.verdict) for row in part.rows)
        return Table(part.title, ("what", "value", "verdict"), lines)
    if isinstance(part, Roofline):
        return _roofline_table(part)
    if isinstance(part, Curve):
        rows = sorted([("", *point) for point in part.line] + list(part.marks), key=lambda row: row[1:])
        return Table(part.title, ("", part.x_name, part.y_name), tuple(rows))
    if isinstance(part, Heat):
        cells = [(row, str(i), value) for row, values in part.rows for i, value in enumerate(values)]
        most = tuple(sorted(cells, key=lambda cell: -cell[2])[:TEXT_HEAT_ROWS])
        return Table(f"{part.title}: the {len(most)} largest of {len(cells)}", (*part.names, part.unit), most)
    return part


def _roofline_table(plot: Roofline) -> Table:
    """The plot as numbers: each roof's limits, and what every load attains under it."""
    columns = ("TFLOP/s", "peak", "TB/s", "ridge", *(load.label for load in plot.loads))
    intensities = ("FLOP/byte", None, None, None, *(load.intensity for load in plot.loads))
    rows: list[tuple[Cell, ...]] = []
    for i, roof in enumerate(plot.roofs):
        attained = (load.attained[i] for load in plot.loads)
        limits = (roof.flops_per_s / 1e12, roof.bytes_per_s / 1e12, roof.flops_per_s / roof.bytes_per_s)
        rows.append((roof.label, *limits, *(None if rate is None else rate / 1e12 for rate in attained)))
    return Table(plot.title, columns, (intensities, *rows))


def _shares(bars: Bars) -> list[float]:
    """Each bar's share 0..1 of the longest; what is not a positive number has no length."""
    lengths = [value if math.isfinite(value) and value > 0 else 0.0 for _, value in bars.bars]
    longest = max(lengths, default=0.0)
    return [length / longest if longest else 0.0 for length in lengths]


def format_cell(cell: Cell) -> str:
    """A cell as text: four significant digits, pass/fail, grouped integers, a dash for nothing."""
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, bool):
        return "pass" if cell else "fail"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return _format_float(cell)
    return cell


def _format_float(value: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{SIGNIFICANT - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if not -SIGNIFICANT <= exponent <= 8:
        return f"{value:.{SIGNIFICANT - 1}e}"
    return f"{rounded:,.{max(0, SIGNIFICANT - 1 - exponent)}f}"


def _numeric_columns(table: Table) -> list[bool]:
    """Which columns hold numbers only (bools are words)."""
    return [
        any(_is_number(c) for c in column) and all(c is None or _is_number(c) for c in column)
        for column in ([row[i] for row in table.rows] for i in range(len(table.columns)))
    ]


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def render_html(page: Page) -> str:
    """The page as one HTML file without scripts or outside resources; deterministic."""
    import jinja2

    # Text from recipes and paths lands in the page: everything is escaped.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    parts = [_html_part(part) for part in page.parts]
    return template.render(page=page, parts=parts, svg_width=SVG_WIDTH, plot=PLOT) + "\n"


def _html_part(part: Part) -> dict[str, Any]:
    common: dict[str, Any] = {"title": part.title, "note": part.note}
    if isinstance(part, Bars):
        return common | _html_bars(part)
    if isinstance(part, Roofline):
        return common | _html_roofline(part)
    if isinstance(part, Curve):
        return common | _html_curve(part)
    if isinstance(part, Heat):
        return common | _html_heat(part)
    if isinstance(part, Intervals):
        return common | _html_intervals(part)
    numeric = _numeric_columns(part)
    heads = [{"text": name, "number": number} for name, number in zip(part.columns, numeric, strict=True)]
    rows = [[_html_cell(c, number=n) for c, n in zip(row, numeric, strict=True)] for row in part.rows]
    return common | {"heads": heads, "rows": rows}


def _html_bars(part: Bars) -> dict[str, Any]:
    longest = max((len(label) for label, _ in part.bars), default=0)
    left = min(SVG_WIDTH // 2, SVG_LETTER_WIDTH * (longest + 2))
    track = SVG_WIDTH - SVG_VALUE_WIDTH - left
    rows = [
        {
            "label": label,
            "value": f"{format_cell(value)} {part.unit}",
            "width": f"{share * track:.1f}",
            "y": SVG_ROW_HEIGHT * i,
        }
        for i, ((label, value), share) in enumerate(zip(part.bars, _shares(part), strict=True))
    ]
    return {"bars": rows, "height": SVG_ROW_HEIGHT * len(rows), "left": left, "track": track}


def _html_roofline(part: Roofline) -> dict[str, Any]:
    """Everything of the plot in pixels: ticks, roofs with their points, and a guide down from every load's name."""
    ridges = [roof.flops_per_s / roof.bytes_per_s for roof in part.roofs]
    rates = [rate for load in part.loads for rate in load.attained if rate is not None]
    peaks = [roof.flops_per_s for roof in part.roofs]
    x_low, x_high = _log_range([*ridges, *(load.intensity for load in part.loads)])
    y_low, y_high = _log_range([*peaks, *rates])
    x = _log_scale(x_low, x_high, PLOT["left"], PLOT["right"])
    y = _log_scale(y_low, y_high, PLOT["bottom"], PLOT["top"])
    name_ys = _spread([y(peak) for peak in peaks], ROOF_NAME_GAP, PLOT["top"] + 4, PLOT["bottom"])
    name_xs = _spread([x(load.intensity) for load in part.loads], LOAD_NAME_GAP, PLOT["left"], PLOT["right"])
    series = list(dict.fromkeys(load.series for load in part.loads))
    roofs: list[dict[str, Any]] = []
    for i, roof in enumerate(part.roofs):
        start = max(x_low, y_low / roof.bytes_per_s)
        corners = [(start, start * roof.bytes_per_s), (ridges[i], peaks[i]), (x_high, peaks[i])]
        points = [
            {"x": _px(x(load.intensity)), "y": _px(y(rate)), "series": series.index(load.series), "load": load.label}
            | {"rate": si_text(rate), "intensity": format_cell(load.intensity)}
            for load in part.loads
            if (rate := load.attained[i]) is not None
        ]
        limits = f"{si_text(peaks[i])}FLOP/s, {si_text(roof.bytes_per_s)}B/s, ridge {format_cell(ridges[i])} FLOP/byte"
        path = " ".join(f"{_px(x(a))},{_px(y(b))}" for a, b in corners)
        places = {"y": _px(name_ys[i]), "end": _px(y(peaks[i])), "path": path}
        roofs.append({"label": roof.label, "limits": limits, "points": points} | places)
    guides = [
        {"label": load.label, "x": _px(x(load.intensity)), "name_x": _px(at), "series": series.index(load.series)}
        for load, at in zip(part.loads, name_xs, strict=True)
    ]
    ticks = {
        "x_ticks": [{"at": _px(x(v)), "text": si_text(v).strip()} for v in _decades(x_low, x_high)],
        "y_ticks": [{"at": _px(y(v)), "text": si_text(v).strip()} for v in _decades(y_low, y_high)],
    }
    return {"roofs": roofs, "guides": guides} | ticks


def _html_curve(part: Curve) -> dict[str, Any]:
    """The line, the named points and ticks, in pixels; what is not above zero cannot be drawn and is left out."""
    line = [(a, b) for a, b in part.line if b > 0 and math.isfinite(b)]
    marks = [(name, a, b) for name, a, b in part.marks if b > 0 and math.isfinite(b)]
    points = [*line, *(mark[1:] for mark in marks)] or [(1.0, 1.0)]
    low, high = min(a for a, _ in points), max(a for a, _ in points)
    room = (high - low or high or 1.0) * 0.06
    step = (PLOT["right"] - PLOT["left"]) / (high - low + 2 * room)
    y_low, y_high = _log_range([b for _, b in points])
    y = _log_scale(y_low, y_high, PLOT["bottom"], PLOT["top"])

    def place(a: float, b: float) -> dict[str, str]:
        return {"x": _px(PLOT["left"] + (a - low + room) * step), "y": _px(y(b))}

    ticks = [low + (high - low) * i / 4 for i in range(5)] if high > low else [low]
    return {
        "frontier": [place(*point) for point in line],
        "marks": [
            {"label": name, "value": f"{format_cell(a)}, {format_cell(b)}"} | place(a, b) for name, a, b in marks
        ],
        "x_ticks": [{"at": place(v, y_low)["x"], "text": format_cell(float(v))} for v in ticks],
        "y_ticks": [{"at": _px(y(v)), "text": f"{v:g}"} for v in _decades(y_low, y_high)],
        "names": (part.x_name, part.y_name),
    }


def _html_heat(part: Heat) -> dict[str, Any]:
    """A cell for every value, the darker the larger; what is not above zero is not drawn, inf as the largest is."""
    drawn = [v for _, values in part.rows for v in values if v > 0 and math.isfinite(v)] or [1.0]
    darkness = _log_scale(*_log_range(drawn), 0.0, HEAT_DARKEST)
    columns = max((len(values) for _, values in part.rows), default=1)
    width = min(HEAT_CELL, (SVG_WIDTH - PLOT["left"]) / columns)
    cells = [
        {"x": _px(PLOT["left"] + width * i), "y": y, "opacity": f"{darkness(min(value, max(drawn))):.2f}"}
        | {"label": f"{part.names[0]} {row}, {part.names[1]} {i}", "value": f"{format_cell(value)} {part.unit}"}
        | {"text": f"{value:.1e}" if width == HEAT_CELL else "", "middle": _px(PLOT["left"] + width * (i + 0.5))}
        for y, (row, values) in enumerate(part.rows)
        for i, value in enumerate(values)
        if value > 0
    ]
    heads = [
        {"x": _px(PLOT["left"] + width * (i + 0.5)), "text": str(i)} for i in range(0, columns, math.ceil(20 / width))
    ]
    return {"heat": cells, "rows": [row for row, _ in part.rows], "columns": heads, "width": width, "names": part.names}


def _html_intervals(part: Intervals) -> dict[str, Any]:
    """Every value as a dot with its bounds, and the gate as a line, in pixels."""
    drawn = [share for row in part.rows for share in (row.low, row.value, row.high) if share is not None]
    drawn = [share for share in drawn if share > 0 and math.isfinite(share)]
    low, high = _log_range([1.0, *drawn])
    low = max(low, SMALLEST_SHARE)
    longest = max((len(row.label) for row in part.rows), default=0)
    left, right = SVG_LETTER_WIDTH * (longest + 1), SVG_WIDTH - 24
    x = _log_scale(low, high, left, right)

    def place(share: float | None, missing: float) -> str:
        if share is None:
            return _px(missing)
        return _px(x(min(max(share, low), high)))

    rows = [
        {"label": row.label, "text": row.text, "verdict": row.verdict, "y": INTERVAL_HEIGHT * i + 30}
        | {"low": place(row.low, x(max(row.value, low))), "at": place(row.value, left)}
        | {"high": place(row.high, right)}
        for i, row in enumerate(part.rows)
    ]
    height = INTERVAL_HEIGHT * len(rows) + 34
    return {"intervals": rows, "gate": _px(x(1.0)), "height": height, "left": left, "right": right}


def _log_range(values: list[float]) -> tuple[float, float]:
    """The least and greatest value, with room around them."""
    return min(values) / 1.6, max(values) * 1.6


def _log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The map of low..high to start..end by the logarithm."""
    step = (end - start) / math.log(high / low)
    return lambda value: start + math.log(value / low) * step


def _decades(low: float, high: float) -> list[float]:
    """The powers of ten from low to high."""
    return [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones and at least `gap` apart, from `low` on; up to `high` where that leaves the gap."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    places, edge = dict.fromkeys(order, 0.0), low
    for i in order:
        places[i] = max(wanted[i], edge)
        edge = places[i] + gap
    edge = max(high, low + gap * (len(order) - 1))
    for i in reversed(order):
        places[i] = min(places[i], edge)
        edge = places[i] - gap
    return [places[i] for i in range(len(wanted))]


def _px(value: float) -> str:
    return f"{value:.1f}"


def si_text(value: float) -> str:
    """A number with its SI prefix, to stand before a unit: "2.25 P", "10 "."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10.0**power:
            return f"{value / 10.0**power:.4g} {prefix}"
    return f"{float(f'{value:.4g}'):,g} "


def _html_cell(cell: Cell, *, number: bool) -> dict[str, str]:
    text = format_cell(cell)
    if isinstance(cell, bool):
        return {"text": text, "style": text}
    return {"text": text, "style": "n" if number else ""}
