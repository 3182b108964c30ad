"""A search as a page and as JSON types: what was chosen, what everything costs, and what other budgets would buy."""

from collections import Counter
from typing import Any

from toolchain.errors import GateFailed
from toolchain.report import Bars, Curve, Heat, Page, Table
from toolchain.search.stage import SearchResult, Trial

ESTIMATED = "KL (nats)"
COUNTED = "tensors and one full cache, without the header of the weights file"


def search_document(result: SearchResult) -> dict[str, Any]:
    """The result as JSON types; equal searches give equal documents.

    `bytes`: of weights (tensors alone, without the file's header: `counted`) and of the cache of one sequence of
    `cache_tokens`, `cache_bytes` of the latter alone.
    `sensitivity`: measured KL (nats) of each unit in each format, all else in float; `heads`: of each KV head's cache,
    null where it was not asked for. `trials`: mixes quantized for real, `kl` and `rise` measured, `estimated_kl` the
    sum of sensitivities. `frontier`: estimated.
    """
    problem = result.problem
    return {
        "verdict": _verdict(result),
        "budget": {"kind": result.budget.kind, "most": result.budget.most},
        "base": result.base,
        "formats": list(result.formats),
        "text": result.text,
        "cache_tokens": result.capacity,
        "counted": COUNTED,
        "chosen": None if result.best is None else _trial(result.best),
        "trials": [_trial(trial) for trial in result.trials],
        "sensitivity": [
            {"unit": unit, "format": fmt, "bytes": problem.bytes[unit][fmt], "kl": kl}
            for unit, formats in problem.loss.items()
            for fmt, kl in formats.items()
        ],
        "heads": None if result.heads is None else [{"layer": i, "kl": losses} for i, losses in result.heads.items()],
        "fixed": {"bytes": problem.fixed_bytes, "kl": problem.fixed_loss},
        "frontier": [{"bytes": problem.bytes_of(m), "estimated_kl": problem.loss_of(m)} for m in result.frontier],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    sizes = {"bytes": trial.bytes, "cache_bytes": trial.cache_bytes}
    return sizes | {"kl": trial.kl, "rise": trial.rise, "estimated_kl": trial.estimated_kl, "mix": trial.mix}


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
    """The chosen mix, the frontier it lies near, the trials, and the sensitivity of every unit and KV head."""
    best = result.best
    assert best is not None
    weights = (best.bytes - best.cache_bytes) / 1e6
    facts = (
        ("budget", result.budget.text()),
        ("size", f"{best.bytes / 1e6:.2f} MB: weights {weights:.2f}, KV cache {best.cache_bytes / 1e6:.2f}"),
        ("counted", COUNTED),
        ("weights", _chosen(result, best, caches=False)),
        ("KV cache", f"{_chosen(result, best, caches=True)}; counted for one sequence of {result.capacity} tokens"),
        ("KL", f"{best.kl:.4g} nats measured, {best.estimated_kl:.4g} estimated"),
        ("rise of the NLL", f"{best.rise:.4g} nats measured"),
        ("text", result.text),
        ("time", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.seconds.items())),
    )
    parts = (_frontier(result, best), _trials(result), *_heads(result), _sensitivities(result), _units(result, best))
    return Page("Search for the cheapest mix", _verdict(result), facts, parts)


def _chosen(result: SearchResult, best: Trial, *, caches: bool) -> str:
    """How many units got each format."""
    counts = Counter(best.mix[unit.name] for unit in result.found if unit.is_cache == caches)
    parts = (f"{fmt} ({n} {'layers' if caches else 'units'})" for fmt, n in sorted(counts.items()))
    return ", ".join(parts) or "no choice"


def _sensitivities(result: SearchResult) -> Bars:
    problem = result.problem
    smallest = problem.extremes()[0]
    bars = tuple((f"{unit}, {smallest[unit]}", formats[smallest[unit]]) for unit, formats in problem.loss.items())
    return Bars("KL of each unit alone in its smallest format", "nats", bars)


def _units(result: SearchResult, best: Trial) -> Table:
    loss = result.problem.loss
    taken = dict.fromkeys(fmt for formats in loss.values() for fmt in formats)
    columns = ("unit", "chosen", *(f"{fmt} KL" for fmt in taken))
    rows = tuple((unit, best.mix[unit], *(formats.get(fmt) for fmt in taken)) for unit, formats in loss.items())
    return Table("Units", columns, rows, "Mean KL to the float model with that unit alone in that format, measured.")


def _heads(result: SearchResult) -> tuple[Heat, ...]:
    if result.heads is None:
        return ()
    rows = tuple((str(layer), tuple(losses)) for layer, losses in result.heads.items())
    note = "Mean KL to the float model with the keys and values of that KV head alone rounded, measured."
    return (Heat("KL of each KV head's cache alone", ESTIMATED, ("layer", "KV head"), rows, note),)


def _trials(result: SearchResult) -> Table:
    met = [result.budget.is_met(t.bytes, t.kl, t.rise) for t in result.trials]
    rows = tuple(
        (i, t.bytes / 1e6, t.cache_bytes / 1e6, t.estimated_kl, t.kl, t.rise, met[i - 1])
        for i, t in enumerate(result.trials, 1)
    )
    columns = ("round", "MB", "of it cache", "KL estimated", "KL measured", "rise measured", "meets the budget")
    return Table("Mixes quantized for real", columns, rows)


def _frontier(result: SearchResult, best: Trial) -> Curve:
    """Megabytes against KL: what other budgets would buy, the uniform mixes, and the chosen one as measured."""
    problem = result.problem
    line = tuple((problem.bytes_of(mix) / 1e6, problem.loss_of(mix)) for mix in result.frontier)
    uniform = [(fmt, problem.uniform(fmt)) for fmt in result.formats]
    marks = [(f"all {fmt}", problem.bytes_of(mix) / 1e6, problem.loss_of(mix)) for fmt, mix in uniform]
    marks.append(("chosen, measured", best.bytes / 1e6, best.kl))
    note = "Line and uniform mixes: sums of sensitivities. Chosen: the recipe as written, quantized and measured."
    return Curve("What other budgets would buy", "MB of weights and cache", ESTIMATED, line, tuple(marks), note)
