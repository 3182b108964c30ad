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

from toolchain.recipe_sections import Gates
from toolchain.report import Measured

Array = np.ndarray[Any, Any]
CHUNK_POSITIONS = 64
NO_TARGET = -1
SMALLER_IS_BETTER = ("kl_mean", "kl_p99", "max_abs_logit", "layer_error_median")
LARGER_IS_BETTER = ("top1_agreement",)


class Row(pydantic.BaseModel, frozen=True, extra="forbid"):
    """One number of the report. `gate` None: not gated. `value` None: not finite (no error, or no number)."""

    reference: str
    phase: str
    metric: str
    value: Measured | None
    unit: str
    gate: float | None = None
    passed: bool = True


@dataclass(slots=True)
class LogitComparison:
    """Collects positions of one phase against one reference, then gives the metrics.

    The collected numbers are plain Python ones: small tensors kept alive between the large
    temporaries of each chunk would split the heap, which then grows by a chunk every time.
    """

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, reference_NV: Array, candidate_NV: Array, targets_N: Array) -> None:
        """Add N positions; `targets_N` int64 is the token that came next, NO_TARGET where unknown."""
        for i in range(0, len(targets_N), CHUNK_POSITIONS):
            window = slice(i, i + CHUNK_POSITIONS)
            chunk = compare_positions(reference_NV[window], candidate_NV[window], targets_N[window])
            for name, values_N in chunk.items():
                self.parts.setdefault(name, []).extend(values_N.tolist())

    def metrics(self, tolerance: Callable[[float], float]) -> dict[str, tuple[float, str]]:
        """{metric: (value, unit)}. `tolerance` maps max|reference| to what rounding explains of a logit."""
        p = {name: torch.tensor(values, dtype=torch.float64) for name, values in self.parts.items()}
        largest = float(p["largest"].max())
        tie_below = tolerance(largest) if math.isfinite(largest) else 0.0
        flips_N = p["flipped"] > 0
        ties_N = flips_N & (p["margin"] < tie_below)
        flip_margins = p["margin"][flips_N]
        nll_reference, nll_candidate = (_mean(p[name]) for name in ("nll_reference", "nll_candidate"))
        return {
            "kl_mean": (_mean(p["kl"]), "nats"),
            "kl_p99": (float(torch.quantile(p["kl"], 0.99)), "nats"),
            "top1_agreement": (1.0 - float((flips_N & ~ties_N).sum()) / len(flips_N), "fraction"),
            "top1_flips": (float(flips_N.sum()), "positions"),
            "top1_ties": (float(ties_N.sum()), "positions"),
            "flip_margin_max": (float(flip_margins.max()) if len(flip_margins) else 0.0, "logit"),
            "tie_tolerance": (tie_below, "logit"),
            "nll_reference": (nll_reference, "nats"),
            "nll_candidate": (nll_candidate, "nats"),
            "perplexity_reference": (_exp(nll_reference), "per token"),
            "perplexity_candidate": (_exp(nll_candidate), "per token"),
            "perplexity_rise": (100 * (_exp(nll_candidate - nll_reference) - 1), "%"),
            "max_abs_logit": (float(p["max_abs"].max()), "logit"),
            "sqnr_db": (sqnr_db(float(p["signal"].sum()), float(p["noise"].sum())), "dB"),
            "nonfinite_logits": (float(p["nonfinite"].sum()), "values"),
            "positions": (float(len(flips_N)), "positions"),
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


def gate_rows(reference: str, phase: str, metrics: Mapping[str, tuple[float, str]], gates: Gates) -> list[Row]:
    """The report's rows of one phase. Non-finite logits fail without any gate."""
    bounds = gates.model_dump()
    rows = []
    for metric, (value, unit) in metrics.items():
        gate = 0.0 if metric == "nonfinite_logits" else bounds.get(metric)
        passed = gate is None or (value >= gate if metric in LARGER_IS_BETTER else value <= gate)
        shown = value if math.isfinite(value) else None
        row = Row(reference=reference, phase=phase, metric=metric, value=shown, unit=unit, gate=gate, passed=passed)
        rows.append(row)
    return rows


def _mean(values_N: torch.Tensor) -> float:
    return float(values_N.mean()) if len(values_N) else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
