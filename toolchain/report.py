"""Results as one page: the same parts rendered as terminal text or as a self-contained HTML file."""

from dataclasses import dataclass, field

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
    """The page for a terminal."""
    raise NotImplementedError


def render_html(page: Page) -> str:
    """The page as one HTML file without scripts or outside resources; deterministic."""
    raise NotImplementedError
