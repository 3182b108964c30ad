"""A search as a page and as JSON types: what was chosen, what everything costs, and what other budgets would buy."""

from typing import Any

from toolchain.errors import GateFailed
from toolchain.report import Bars, Frontier, Page, Table
from toolchain.search.stage import SearchResult, Trial

ESTIMATED = "KL (nats)"


def search_document(result: SearchResult) -> dict[str, Any]:
    """The result as JSON types; equal searches give equal documents.

    `sensitivity`: measured KL (nats) of each unit in each format, all else in float. `trials`: mixes quantized for
    real, `kl` and `rise` measured, `estimated_kl` the sum of sensitivities. `frontier`: estimated.
    """
    problem = result.problem
    return {
        "verdict": _verdict(result),
        "budget": {"kind": result.budget.kind, "most": result.budget.most},
        "base": result.base,
        "formats": list(result.formats),
        "text": result.text,
        "chosen": None if result.best is None else _trial(result.best),
        "trials": [_trial(trial) for trial in result.trials],
        "sensitivity": [
            {"unit": unit, "format": fmt, "bytes": problem.bytes[unit][fmt], "kl": kl}
            for unit, formats in problem.loss.items()
            for fmt, kl in formats.items()
        ],
        "fixed": {"bytes": problem.fixed_bytes, "kl": problem.fixed_loss},
        "frontier": [{"bytes": problem.bytes_of(m), "estimated_kl": problem.loss_of(m)} for m in result.frontier],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    measured = {"bytes": trial.bytes, "kl": trial.kl, "rise": trial.rise, "estimated_kl": trial.estimated_kl}
    return measured | {"mix": trial.mix}


def _verdict(result: SearchResult) -> str:
    return "passed" if result.passed else "failed"


def require_passed(result: SearchResult) -> None:
    """Raise GateFailed (exit 3) for a budget that no mix was found to meet, naming the nearest."""
    if result.passed or result.best is None:
        return
    best, reached = result.best, result.budget.measured(result.best.kl, result.best.rise)
    raise GateFailed(
        "no mix was found that meets the budget",
        expected=result.budget.text(),
        found=f"at least {reached:.4g} nats, measured at {best.bytes / 1e6:.1f} MB; that recipe was written",
        fix="a larger budget, or more exact formats: --formats none,...",
    )


def search_page(result: SearchResult) -> Page:
    """The chosen mix, the frontier it lies near, the trials, and the sensitivity of every unit."""
    best, problem = result.best, result.problem
    assert best is not None
    facts = (
        ("budget", result.budget.text()),
        ("weights", f"{best.bytes / 1e6:.2f} MB"),
        ("KL", f"{best.kl:.4g} nats measured, {best.estimated_kl:.4g} estimated"),
        ("rise of the NLL", f"{best.rise:.4g} nats measured"),
        ("text", result.text),
        ("formats", ", ".join(f"{fmt} ({_count(best, fmt)} units)" for fmt in result.formats)),
        ("time", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())),
    )
    smallest = min(result.formats, key=lambda fmt: problem.bytes_of(problem.uniform(fmt)))
    bars = tuple((unit, formats.get(smallest, 0.0)) for unit, formats in problem.loss.items())
    columns = ("unit", "chosen", *(f"{fmt} KL" for fmt in result.formats))
    rows = tuple(
        (unit, best.mix[unit], *(formats.get(fmt) for fmt in result.formats)) for unit, formats in problem.loss.items()
    )
    parts = (_frontier(result, best), _trials(result), Bars(f"KL of each unit in {smallest} alone", "nats", bars))
    table = Table("Units", columns, rows, "Mean KL to the float model with that unit alone in that format, measured.")
    return Page("Search for the cheapest mix", _verdict(result), facts, (*parts, table))


def _count(trial: Trial, fmt: str) -> int:
    return sum(taken == fmt for taken in trial.mix.values())


def _trials(result: SearchResult) -> Table:
    rows = tuple(
        (i, t.bytes / 1e6, t.estimated_kl, t.kl, t.rise, result.budget.is_met(t.bytes, t.kl, t.rise))
        for i, t in enumerate(result.trials, 1)
    )
    columns = ("round", "MB", "KL estimated", "KL measured", "rise measured", "meets the budget")
    return Table("Mixes quantized for real", columns, rows)


def _frontier(result: SearchResult, best: Trial) -> Frontier:
    """Megabytes against KL: what other budgets would buy, the uniform mixes, and the chosen one as measured."""
    problem = result.problem
    line = tuple((problem.bytes_of(mix) / 1e6, problem.loss_of(mix)) for mix in result.frontier)
    uniform = [(fmt, problem.uniform(fmt)) for fmt in result.formats]
    marks = [(f"all {fmt}", problem.bytes_of(mix) / 1e6, problem.loss_of(mix)) for fmt, mix in uniform]
    marks.append(("chosen, measured", best.bytes / 1e6, best.kl))
    note = "Line and uniform mixes: sums of sensitivities. Chosen: the recipe as written, quantized and measured."
    return Frontier("What other budgets would buy", "MB of weights", ESTIMATED, line, tuple(marks), note)
