"""The parity report as a page that needs no other reading."""

from collections.abc import Mapping, Sequence

from toolchain.parity.kv_contract import PHASE as KV_PHASE
from toolchain.parity.layerwise import PHASE as LAYER_PHASE
from toolchain.parity.metrics import Row
from toolchain.report import Cell, Page, Table

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
    "rounding says? self: do decode steps equal one-shot prefill? KL 0 and agreement 1 mean the same model; a flip "
    "whose margin is below rounding is a tie. KL in nats; ppl: the rise of perplexity; max diff: of any logit."
)
LAYERS = (
    "Each torch layer is fed what the candidate's layer was fed, so that nothing adds up: the relative error of what a "
    "layer adds, the median token of the worst layer and the worst token of all (where a code flipped)."
)
CONTRACT = "Bit for bit: what the cache must never do, whatever the model."
REFERENCES = {"eager": "with float32 torch", "fake_quant": "with its exact arithmetic in torch"}
RUN_BY = ", run by "


def parity_title(facts: Mapping[str, str]) -> str:
    """What was compared with what, from the facts of a report: the line that ends in the verdict."""
    stage, _, runner = facts["candidate"].partition(RUN_BY)
    others = [REFERENCES[name] for name in facts["references"].split(", ") if name in REFERENCES]
    return f"Parity of the {stage} artifact ({runner}) {' and '.join(others) or 'with itself alone'}"


def parity_page(
    verdict: str, rows: Sequence[Row], facts: Sequence[tuple[str, str]], notes: Sequence[str], divergence: str
) -> Page:
    """One line per reference and phase, one per gate, one per promise of the cache."""
    pairs = dict.fromkeys((row.reference, row.phase) for row in rows if row.phase not in (KV_PHASE, LAYER_PHASE))
    parts = [
        Table(
            "Logits",
            ("reference", "phase", *(head for _, head in COLUMNS), "gates"),
            tuple(_phase_line(rows, *pair) for pair in pairs),
            QUESTIONS,
        )
    ]
    gated = [row for row in rows if row.gate is not None and row.phase != KV_PHASE and row.metric != "nonfinite_logits"]
    if gated:
        lines = tuple((r.reference, r.phase, r.metric, r.value, r.gate, r.passed) for r in gated)
        parts.append(Table("Gates of the recipe", ("reference", "phase", "metric", "value", "gate", "passed"), lines))
    layers = tuple((r.metric.replace("_", " "), _short(r.value), r.passed) for r in rows if r.phase == LAYER_PHASE)
    if layers:
        parts.append(Table("Layers on their own", ("metric", "value", "passed"), layers, LAYERS))
    kept = tuple((r.metric.replace("_", " "), r.passed) for r in rows if r.phase == KV_PHASE)
    parts.append(Table("Cache contract", ("promise", "kept"), kept, CONTRACT))
    shown = (*facts, *(("note", note) for note in notes), *((("divergence", divergence),) if divergence else ()))
    return Page(parity_title(dict(facts)), verdict, shown, tuple(parts))


def _phase_line(rows: Sequence[Row], reference: str, phase: str) -> tuple[Cell, ...]:
    mine = {row.metric: row for row in rows if (row.reference, row.phase) == (reference, phase)}
    cells = [_short(mine[metric].value) if metric in mine else None for metric, _ in COLUMNS]
    return (reference, phase.replace("_", " "), *cells, all(row.passed for row in mine.values()))


def _short(value: float | None) -> str:
    """Three digits: the exact numbers are in the document."""
    return "not finite" if value is None else f"{value:.3g}"
