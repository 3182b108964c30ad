"""Results as one page: the same parts rendered as terminal text or as a self-contained HTML file."""

import io
import math
from dataclasses import dataclass, field
from typing import Any

SIGNIFICANT = 4
TEXT_BAR_COLUMNS = 40
SVG_WIDTH, SVG_VALUE_WIDTH, SVG_ROW_HEIGHT, SVG_LETTER_WIDTH = 800, 160, 30, 8

Cell = str | int | float | bool | None


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
class Page:
    """A whole report: a verdict ("passed", "failed" or none), key facts, then tables and bars."""

    title: str
    verdict: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    parts: tuple[Table | Bars, ...] = field(default=())


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
        screen.print()
        screen.print(_plain(part.title))
        if isinstance(part, Bars):
            grid = table.Table.grid(padding=(0, 2))
            for row in _text_bars(part):
                grid.add_row(*(_plain(cell) for cell in row))
            screen.print(grid)
        else:
            body = table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
            for name, numeric in zip(part.columns, _numeric_columns(part), strict=True):
                body.add_column(_plain(name), justify="right" if numeric else "left")
            for row in part.rows:
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
    parts = [_html_part(part) for part in page.parts]
    return environment.from_string(HTML).render(page=page, parts=parts, svg_width=SVG_WIDTH) + "\n"


def _html_part(part: Table | Bars) -> dict[str, Any]:
    common: dict[str, Any] = {"title": part.title, "note": part.note}
    if isinstance(part, Bars):
        return common | _html_bars(part)
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


def _html_cell(cell: Cell, *, number: bool) -> dict[str, str]:
    text = format_cell(cell)
    if isinstance(cell, bool):
        return {"text": text, "style": text}
    return {"text": text, "style": "n" if number else ""}


HTML = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="dtool">
<title>{{ page.title }}</title>
<style>
:root { --ink: #1c2430; --soft: #5d6878; --line: #dfe4ea; --page: #f6f7f9; --card: #ffffff;
  --bar: #3b73c8; --track: #e9edf3; --good: #14713d; --good-bg: #dcf3e5; --bad: #a3231d; --bad-bg: #fbe2e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a3b3; --line: #2e3643; --page: #12161c;
  --card: #1a2029; --bar: #6ea0ee; --track: #262e3a; --good: #7fdca4; --good-bg: #143524;
  --bad: #ff9d96; --bad-bg: #43201f; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 2.5rem 1.25rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 60rem; margin: 0 auto; }
header { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; margin-bottom: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .75rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.25rem;
  margin: 1rem 0; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.5rem; margin: 0; }
dt, th, .note { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 600; font-size: .85rem; text-align: left; border-bottom: 2px solid var(--line); }
th, td { padding: .4rem 1.5rem .4rem 0; vertical-align: top; }
tbody tr + tr td { border-top: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: .25rem; }
.n { text-align: right; white-space: nowrap; }
.pass, .fail { font-weight: 600; }
.pass { color: var(--good); }
.fail { color: var(--bad); }
.verdict { font-weight: 700; border-radius: 999px; padding: .15rem .9rem; text-transform: uppercase;
  letter-spacing: .04em; font-size: .85rem; background: var(--track); }
.verdict.passed { color: var(--good); background: var(--good-bg); }
.verdict.failed { color: var(--bad); background: var(--bad-bg); }
.note { font-size: .85rem; margin: .75rem 0 0; }
svg { width: 100%; max-width: 52rem; height: auto; display: block; }
svg text { fill: var(--ink); font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .track { fill: var(--track); }
svg .bar { fill: var(--bar); }
</style>
</head>
<body>
<main>
<header>
<h1>{{ page.title }}</h1>
{% if page.verdict %}
<span class="verdict {{ page.verdict }}">{{ page.verdict }}</span>
{% endif %}
</header>
{% if page.facts %}
<section>
<dl>
{% for name, text in page.facts %}
<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}
</dl>
</section>
{% endif %}
{% for part in parts %}
<section>
<h2>{{ part.title }}</h2>
{% if part.bars is defined %}
<svg viewBox="0 0 {{ svg_width }} {{ part.height }}" role="img" aria-label="{{ part.title }}">
{% for bar in part.bars %}
<text x="0" y="{{ bar.y + 19 }}">{{ bar.label }}</text>
<rect class="track" x="{{ part.left }}" y="{{ bar.y + 5 }}" width="{{ part.track }}" height="20" rx="4"/>
<rect class="bar" x="{{ part.left }}" y="{{ bar.y + 5 }}" width="{{ bar.width }}" height="20" rx="4"/>
<text x="{{ svg_width }}" y="{{ bar.y + 19 }}" text-anchor="end">{{ bar.value }}</text>
{% endfor %}
</svg>
{% else %}
<table>
<thead>
<tr>
{% for head in part.heads %}
<th{% if head.number %} class="n"{% endif %}>{{ head.text }}</th>
{% endfor %}
</tr>
</thead>
<tbody>
{% for row in part.rows %}
<tr>
{% for cell in row %}
<td{% if cell.style %} class="{{ cell.style }}"{% endif %}>{{ cell.text }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
{% endif %}
{% if part.note %}
<p class="note">{{ part.note }}</p>
{% endif %}
</section>
{% endfor %}
</main>
</body>
</html>"""
