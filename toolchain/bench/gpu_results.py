"""Results of the GPU check: verdicts, the time budget, the table that ends the output, the JSON document."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["pass", "FAIL", "info", "skip"]
EXIT_PASSED, EXIT_NO_GPU, EXIT_FAILED = 0, 1, 3
TABLE_LINES = 40
TABLE_WIDTH = 220
SCHEMA = 1
COLUMNS = ("check", "case", "value", "unit", "bar", "verdict")
_WIDTHS = (13, 68, 14, 12, 9)
_OMITTED_FIRST: tuple[Verdict, ...] = ("info", "pass", "skip", "FAIL")


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `value` None: there is none. `reason`: why it failed or was skipped.

    `details` go to the JSON document alone.
    """

    check: str
    case: str
    value: float | str | None = None
    unit: str = ""
    bar: str = ""
    verdict: Verdict = "info"
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def judge(
    check: str,
    case: str,
    value: float,
    unit: str,
    *,
    most: float | None = None,
    least: float | None = None,
    failed: str = "",
    details: dict[str, Any] | None = None,
) -> Result:
    """A value against its bar, `most` or `least`; NaN fails any bar, and so does a reason in `failed`."""
    met, bar = True, ""
    if most is not None:
        met, bar = value <= most, f"<= {most:g}"
    if least is not None:
        met, bar = met and value >= least, f">= {least:g}"
    reason = failed or ("not a number" if math.isnan(value) else "")
    return Result(check, case, value, unit, bar, "pass" if met and not reason else "FAIL", reason, details or {})


def skipped(check: str, reason: str, case: str = "") -> Result:
    """A check that was not run, and why."""
    return Result(check, case, verdict="skip", reason=first_line(reason))


def crashed(check: str, case: str, error: BaseException) -> Result:
    """A check that raised."""
    return Result(check, case, verdict="FAIL", reason=f"{type(error).__name__}: {first_line(str(error))}")


def first_line(text: str) -> str:
    """The first line of a message that is not empty, in plain ASCII."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line.encode("ascii", "replace").decode()


class Budget:
    """Seconds of wall time a run may take; the clock is one's own in tests."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._begin = clock()

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """Seconds that remain; negative when overrun."""
        return self.seconds - self.used


def exit_code(results: Iterable[Result]) -> int:
    """0 when no bar failed and nothing crashed, 3 otherwise; what was skipped fails nothing."""
    return EXIT_FAILED if any(r.verdict == "FAIL" for r in results) else EXIT_PASSED


def render_table(results: Sequence[Result], *, lines: int = TABLE_LINES) -> str:
    """The results in plain ASCII, at most `lines` lines of `TABLE_WIDTH` columns, the verdict of all of them last.

    When there are too many, information is left out first and failures last, with their number said.
    """
    kept = _fit(list(results), lines - 3)
    rows = [_line(COLUMNS), "-" * min(TABLE_WIDTH, sum(_WIDTHS) + len(_WIDTHS) * 2 + 8)]
    rows += [_line(_cells(result)) for result in kept]
    counts = {v: sum(r.verdict == v for r in results) for v in ("pass", "FAIL", "info", "skip")}
    left_out = len(results) - len(kept)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    more = f" ({left_out} more in the JSON document)" if left_out else ""
    rows.append(f"{'FAILED' if counts['FAIL'] else 'PASSED'}: {words}{more}")
    return "\n".join(rows)


def _fit(results: list[Result], room: int) -> list[Result]:
    for verdict in _OMITTED_FIRST:
        for index in range(len(results) - 1, -1, -1):
            if len(results) <= room:
                return results
            if results[index].verdict == verdict:
                del results[index]
    return results


def _cells(result: Result) -> tuple[str, ...]:
    verdict = f"{result.verdict}: {result.reason}" if result.reason else result.verdict
    return (result.check, result.case, _number(result.value), result.unit, result.bar, verdict)


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    *head, last = (cell.encode("ascii", "replace").decode().replace("\n", " ") for cell in cells)
    padded = [cell[:width].ljust(width) for cell, width in zip(head, _WIDTHS, strict=True)]
    return "  ".join([*padded, last])[:TABLE_WIDTH].rstrip()


def write_document(path: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """The results as JSON, replaced whole; numbers JSON lacks (NaN, infinity) become words."""
    document = {"schema": SCHEMA, **facts, "exit_code": exit_code(results), "results": [asdict(r) for r in results]}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(_plain(document), indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
