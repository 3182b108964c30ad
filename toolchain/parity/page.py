"""The parity report as a page that needs no other reading."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolchain.parity.kv_contract import PHASE as KV_PHASE
from toolchain.parity.layerwise import PHASE as LAYER_PHASE
from toolchain.parity.metrics import LARGER_IS_BETTER, Row
from toolchain.parity.statistics import combine
from toolchain.parity.weights import PHASE as WEIGHT_PHASE
from toolchain.report import Bars, Cell, Curve, Interval, Intervals, Page, Part, Table

COLUMNS = (
    ("kl_mean", "KL mean"),
    ("kl_p99", "KL p99"),
    ("top1_agreement", "same top"),
    ("top1_flips", "flips"),
    ("top1_ties", "ties"),
    ("perplexity_rise", "ppl (%)"),
    ("max_abs_logit", "max diff"),
)
QUESTIONS = (
    "eager: what did quantization cost against the float32 checkpoint? fake_quant: does the graph compute what its "
    "rounding says? self: do chunks and decode steps equal one-shot prefill? prompt: the three ways of prefill as one "
    "sample. KL 0 and agreement 1 mean the same model; a flip whose margin is below rounding is a tie. KL in nats; "
    "ppl: the rise of perplexity; max diff: of any logit."
)
GATES = (
    "The dot is the estimate and the bar its bounds over rows of text, each held at the confidence of the proof; left "
    "of the line is within the gate, on a logarithmic scale. A dot without a bar is the largest value that was seen."
)
LAYERS = (
    "Each torch layer is fed what the candidate's layer was fed, so that nothing adds up: the relative error of what a "
    "layer adds, the median token of the worst layer and the worst token of all (where a code flipped)."
)
STORED = (
    "Every stored matrix against the checkpoint's, rotations and smoothing undone, no text involved: gain error 0 is "
    "the right scale, alignment 1 the right row."
)
CONTRACT = "Bit for bit: what the cache must never do, whatever the model."
REFERENCES = {"eager": "with float32 torch", "fake_quant": "with its exact arithmetic in torch"}
RUN_BY = ", run by "
FIXED = (KV_PHASE, LAYER_PHASE, WEIGHT_PHASE)
"""Phases that compare no logits."""


def parity_title(facts: Mapping[str, str]) -> str:
    """What was compared with what, from the facts of a report: the line that ends in the verdict."""
    stage, _, runner = facts["candidate"].partition(RUN_BY)
    others = [REFERENCES[name] for name in facts["references"].split(", ") if name in REFERENCES]
    return f"Parity of the {stage} artifact ({runner}) {' and '.join(others) or 'with itself alone'}"


def parity_page(
    verdict: str,
    rows: Sequence[Row],
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    divergence: str,
    profile: Mapping[str, Any],
) -> Page:
    """The gates as a picture, where the loss lies, then all numbers."""
    parts: list[Part] = []
    gated = [row for row in rows if row.gate is not None and row.phase != KV_PHASE and row.metric != "nonfinite_logits"]
    if gated:
        parts.append(Intervals("Gates", tuple(_interval(row) for row in gated), GATES))
    curve = tuple((float(place), kl) for place, kl in profile["kl_by_position"] if kl > 0)
    if len(curve) > 1:
        parts.append(Curve("Loss by position", "position in the row", "KL (nats)", curve, ()))
    if profile["layer_error"]:
        bars = tuple((f"layer {i}", error) for i, error in enumerate(profile["layer_error"]))
        parts.append(Bars("Error of each layer on its own, median token", "", bars, LAYERS))
    pairs = dict.fromkeys((row.reference, row.phase) for row in rows if row.phase not in FIXED)
    columns = ("reference", "phase", *(head for _, head in COLUMNS), "gates")
    parts.append(Table("Logits", columns, tuple(_phase_line(rows, *pair) for pair in pairs), QUESTIONS))
    for phase, title, note in (
        (LAYER_PHASE, "Layers on their own", LAYERS),
        (WEIGHT_PHASE, "Stored matrices", STORED),
    ):
        lines = tuple((_words(r.metric), _short(r.value), r.where, r.verdict) for r in rows if r.phase == phase)
        if lines:
            parts.append(Table(title, ("metric", "value", "where", "verdict"), lines, note))
    kept = tuple((_words(r.metric), r.passed) for r in rows if r.phase == KV_PHASE)
    parts.append(Table("Cache contract", ("promise", "kept"), kept, CONTRACT))
    shown = (*facts, *(("note", note) for note in notes), *((("divergence", divergence),) if divergence else ()))
    return Page(parity_title(dict(facts)), verdict, shown, tuple(parts))


def interval_text(row: Row) -> str:
    """The value of a row with its bounds where it has some: `0.0107 (0.0088 to 0.0129)`."""
    if row.value is None:
        return "not finite"
    if row.low is None:
        return f"{row.value:.3g}"
    high = "no bound" if row.high is None else f"{row.high:.3g}"
    return f"{row.value:.3g} ({row.low:.3g} to {high})"


def _interval(row: Row) -> Interval:
    """Express a gated row in shares of its gate. For an agreement both are turned into disagreement first."""
    assert row.gate is not None
    shares = [None if value is None else _share(value, row) for value in (row.low, row.value, row.high)]
    low, value, high = shares if row.metric not in LARGER_IS_BETTER else reversed(shares)
    label = f"{row.reference}, {_words(row.phase)}: {_words(row.metric)}"
    text = f"{interval_text(row)} {row.unit}, gate {row.gate:.3g}"
    bounded = row.low is not None
    return Interval(
        label,
        low if bounded else value,
        math.inf if value is None else value,
        high if bounded else value,
        text,
        row.verdict,
    )


def _share(value: float, row: Row) -> float:
    gate = row.gate or 0.0
    if row.metric in LARGER_IS_BETTER:
        value, gate = 1.0 - value, 1.0 - gate
    if gate > 0:
        return value / gate
    return 0.0 if value <= 0 else math.inf


def _phase_line(rows: Sequence[Row], reference: str, phase: str) -> tuple[Cell, ...]:
    mine = {row.metric: row for row in rows if (row.reference, row.phase) == (reference, phase)}
    cells = [_short(mine[metric].value) if metric in mine else None for metric, _ in COLUMNS]
    return (reference, _words(phase), *cells, combine([row.verdict for row in mine.values()]))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _short(value: float | None) -> str:
    """Three digits: the exact numbers are in the document."""
    return "not finite" if value is None else f"{value:.3g}"
