"""Logits against logits: how far a candidate is from a reference, position by position.

    KL(p || q) = sum_v p_v (ln p_v - ln q_v),   p = softmax(reference), q = softmax(candidate)
    SQNR       = 10 log10( sum reference^2 / sum (reference - candidate)^2 )
    margin     = the reference's largest logit minus its second largest

A token that changes at the top counts against the candidate only where the margin exceeds what
rounding explains; below it the order of the two is not information (a tie). Everything is computed
in float64, a few positions at a time, so a large vocabulary costs no memory. Sampled text is never
compared: one early near-tie makes two equal models write different texts.

Legend: N positions, V vocab.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pydantic
import torch

from toolchain.parity.statistics import Estimate, Verdict, decide, exactly, positive_mean, quantile, share
from toolchain.recipe_sections import Gates
from toolchain.report import Measured

Array = np.ndarray[Any, Any]
CHUNK_POSITIONS = 64
NO_TARGET = -1
LARGER_IS_BETTER = ("top1_agreement", "weight_alignment_min")


class Row(pydantic.BaseModel, frozen=True, extra="forbid"):
    """One number of the report, and what it says of its gate.

    `low` and `high` are one-sided bounds at the report's confidence; None where a number has none, or is not
    finite. `gate` None: not gated, and `verdict` is "passed". `value` None: not finite (no error, or no number).
    `where` names the layer or the matrix that the value is of.
    """

    reference: str
    phase: str
    metric: str
    value: Measured | None
    unit: str
    low: float | None = None
    high: float | None = None
    gate: float | None = None
    verdict: Verdict = "passed"
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether the gate is met for certain; True without a gate."""
        return self.verdict == "passed"


@dataclass(frozen=True, slots=True)
class Metric:
    """A value with its unit and its bounds; without sampling error both bounds are the value."""

    estimate: Estimate
    unit: str
    sampled: bool = False
    where: str = ""

    @property
    def value(self) -> float:
        """The estimate without its bounds."""
        return self.estimate.value


def fact(value: float, unit: str, where: str = "") -> Metric:
    """A number that was counted or is the largest seen: there is nothing to estimate."""
    return Metric(exactly(value), unit, where=where)


@dataclass(slots=True)
class LogitComparison:
    """Collects positions of one sample against one reference, then gives the metrics.

    The collected numbers are plain Python ones: small tensors kept alive between the large
    temporaries of each chunk would split the heap, which then grows by a chunk every time.
    """

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, reference_NV: Array, candidate_NV: Array, targets_N: Array, rows_N: Array, places_N: Array) -> None:
        """Add N positions.

        `targets_N` int64 is the token that came next, NO_TARGET where unknown; `rows_N` is the row of text and
        `places_N` the place in it of each position.
        """
        for i in range(0, len(targets_N), CHUNK_POSITIONS):
            window = slice(i, i + CHUNK_POSITIONS)
            chunk = compare_positions(reference_NV[window], candidate_NV[window], targets_N[window])
            for name, values_N in chunk.items():
                self.parts.setdefault(name, []).extend(values_N.tolist())
        self.parts.setdefault("row", []).extend(rows_N.tolist())
        self.parts.setdefault("place", []).extend(places_N.tolist())

    def joined(self, other: "LogitComparison") -> "LogitComparison":
        """Both samples as one; neither is changed."""
        names = {**self.parts, **other.parts}
        return LogitComparison({name: self.parts.get(name, []) + other.parts.get(name, []) for name in names})

    def metrics(self, tolerance: Callable[[float], float], confidence: float) -> dict[str, Metric]:
        """Every metric by name. `tolerance` maps max|reference| to what rounding explains of a logit."""
        p = {name: np.asarray(values, np.float64) for name, values in self.parts.items()}
        largest = float(p["largest"].max())
        tie_below = tolerance(largest) if math.isfinite(largest) else 0.0
        flips_N = p["flipped"] > 0
        ties_N = flips_N & (p["margin"] < tie_below)
        flip_margins = p["margin"][flips_N]
        nll_reference, nll_candidate = (_mean(p[name]) for name in ("nll_reference", "nll_candidate"))
        _, index_N = np.unique(p["row"], return_inverse=True)
        positions_R = np.bincount(index_N).astype(np.float64)
        kl_R = np.bincount(index_N, weights=p["kl"])
        distinct = len(set(zip(self.parts["row"], self.parts["place"], strict=True)))
        agreeing_R = np.bincount(index_N, weights=~(flips_N & ~ties_N))
        return {
            "kl_mean": Metric(positive_mean(kl_R, positions_R, confidence), "nats", sampled=True),
            "kl_p99": Metric(quantile(p["kl"], p["row"], distinct, 0.99, confidence), "nats", sampled=True),
            "top1_agreement": Metric(share(agreeing_R, positions_R, distinct, confidence), "fraction", sampled=True),
            "top1_flips": fact(float(flips_N.sum()), "positions"),
            "top1_ties": fact(float(ties_N.sum()), "positions"),
            "flip_margin_max": fact(float(flip_margins.max()) if len(flip_margins) else 0.0, "logit"),
            "tie_tolerance": fact(tie_below, "logit"),
            "largest_logit": fact(largest, "logit"),
            "nll_reference": fact(nll_reference, "nats"),
            "nll_candidate": fact(nll_candidate, "nats"),
            "perplexity_reference": fact(_exp(nll_reference), "per token"),
            "perplexity_candidate": fact(_exp(nll_candidate), "per token"),
            "perplexity_rise": fact(100 * (_exp(nll_candidate - nll_reference) - 1), "%"),
            "max_abs_logit": fact(float(p["max_abs"].max()), "logit"),
            "sqnr_db": fact(sqnr_db(float(p["signal"].sum()), float(p["noise"].sum())), "dB"),
            "nonfinite_logits": fact(float(p["nonfinite"].sum()), "values"),
            "positions": fact(float(len(flips_N)), "positions"),
            "rows": fact(float(len(positions_R)), "rows"),
        }


def compare_positions(reference_NV: Array, candidate_NV: Array, targets_N: Array) -> dict[str, torch.Tensor]:
    """What each of N positions contributes, as tensors [N] (float64, counts int64, flags bool)."""
    ref_NV, cand_NV = (torch.from_numpy(np.ascontiguousarray(x)).double() for x in (reference_NV, candidate_NV))
    log_p_NV, log_q_NV = ref_NV.log_softmax(-1), cand_NV.log_softmax(-1)
    difference_NV = ref_NV - cand_NV
    top2_N2 = ref_NV.topk(min(2, ref_NV.shape[-1])).values
    targets = torch.from_numpy(np.ascontiguousarray(targets_N))
    known_N = targets != NO_TARGET
    picked_N1 = targets.clamp_min(0)[:, None]
    return {
        "kl": (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1).clamp_min(0.0),
        "flipped": ref_NV.argmax(-1) != cand_NV.argmax(-1),
        "margin": top2_N2[:, 0] - top2_N2[:, -1],
        "largest": ref_NV.abs().amax(-1),
        "nll_reference": -log_p_NV.gather(1, picked_N1)[:, 0][known_N],
        "nll_candidate": -log_q_NV.gather(1, picked_N1)[:, 0][known_N],
        "max_abs": difference_NV.abs().amax(-1),
        "signal": ref_NV.square().sum(-1),
        "noise": difference_NV.square().sum(-1),
        "nonfinite": (~torch.isfinite(cand_NV)).sum(-1) + (~torch.isfinite(ref_NV)).sum(-1),
    }


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise."""
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise / signal) else math.nan


def gate_rows(
    reference: str, phase: str, metrics: Mapping[str, Metric], gates: Gates, rounding: float = 0.0
) -> list[Row]:
    """The report's rows of one sample. Non-finite logits fail without any gate.

    `rounding` is what the compute type explains of a logit: the bound of a gate that says "rounding".
    """
    bounds: dict[str, float | str | None] = {"nonfinite_logits": 0.0} | gates.model_dump()
    rows = []
    for name, metric in metrics.items():
        asked = bounds.get(name)
        gate = rounding if isinstance(asked, str) else asked
        verdict: Verdict = "passed"
        if gate is not None:
            verdict = decide(metric.estimate, gate, larger_is_better=name in LARGER_IS_BETTER)
        row = Row(
            reference=reference,
            phase=phase,
            metric=name,
            value=_finite(metric.value),
            unit=metric.unit,
            low=_finite(metric.estimate.low) if metric.sampled else None,
            high=_finite(metric.estimate.high) if metric.sampled else None,
            gate=gate,
            verdict=verdict,
            where=metric.where,
        )
        rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values_N: Array) -> float:
    return float(values_N.mean()) if len(values_N) else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
