"""`dtool parity`: is the candidate still the model? Two references, two questions, one verdict.

`eager` is the checkpoint in float32: what did quantization cost. `fake_quant` is the torch decoder
with the artifact's exact rounding: is the implementation right. `self` compares the candidate's own
decode steps with its own one-shot prefill, and holds the cache to its contract.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from toolchain.artifact import Artifact, open_artifact
from toolchain.errors import DtoolError
from toolchain.graph_io import GRAPH_FILES
from toolchain.model.config import DecoderConfig
from toolchain.numerics import logit_tolerance
from toolchain.parity import layerwise
from toolchain.parity.bisect import find_divergence, largest_growth, logits_tolerance
from toolchain.parity.compare import Batch, PhaseLogits, logits_at, plan_batches, run_phases
from toolchain.parity.kv_contract import PHASE as KV_PHASE
from toolchain.parity.kv_contract import check_kv_contract
from toolchain.parity.metrics import LogitComparison, Row, gate_rows
from toolchain.parity.page import RUN_BY, parity_page
from toolchain.parity.rows import NO_TOKENIZER, RANDOM, fit_rows, held_out_ids, text_facts
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Gates
from toolchain.report import Page
from toolchain.runners.eager import EagerRunner
from toolchain.runners.open import eager_runner, fake_quant_runner, open_runner
from toolchain.runners.runner import Runner, artifact_limits

Array = np.ndarray[Any, Any]
Report = Callable[[str], None]
SELF, SELF_PHASE = "self", "self_consistency"
DECODE_PHASES = {"decode", SELF_PHASE}
DECODE_DEPARTS = (
    "no prefill missed a gate, only decode steps did: look at the decode graph and what it reads from the cache; "
    "where sums depend on the tokens of a call (rotation, experts, a cache with scales of tokens in ONNX Runtime), "
    "gate parity.self_consistency by its kl_mean"
)
GATES_MET = "every gate of [parity] met"
WAYS_OUT = "a loss that is the price of a format takes a finer one, or a wider gate in [parity]; else it is a fault"
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class ParityReport(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The outcome of a proof. `facts` say what ran over what; `divergence` is where a failure lies, as far as known."""

    verdict: Literal["passed", "failed"]
    rows: tuple[Row, ...]
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    divergence: str = ""

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows whose gate was not met."""
        return tuple(row for row in self.rows if not row.passed)

    def document(self) -> dict[str, Any]:
        """The report as plain JSON types, for parity.json."""
        return {
            "verdict": self.verdict,
            "rows": [row.model_dump() for row in self.rows],
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "divergence": self.divergence,
        }

    def page(self) -> Page:
        """The report for people."""
        return parity_page(self.verdict, self.rows, self.facts, self.notes, self.divergence)

    def failure_text(self) -> str:
        """The failed gates, one a line, each with its value and bound."""
        lines = [
            f"{row.reference} / {row.phase}: {row.metric} {_number(row.value)} {row.unit}, gate {_number(row.gate)}"
            for row in self.failures
        ]
        return "\n".join([*lines, *([self.divergence] if self.divergence else [])])


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    runner: Runner
    gates: Gates


def run_parity(
    candidate: Path,
    recipe: Recipe,
    *,
    model: Path | None,
    source: Path | None = None,
    threads: int = 0,
    report: Report = print,
) -> ParityReport:
    """Prove an export, quantized or engine artifact against its references.

    `model` is the checkpoint folder (reference `eager`); `source` the artifact with weights that an
    engine was built from (reference `fake_quant`; for the others it is the candidate itself). The
    report's verdict is "failed" when any gate is missed, any logit is not finite or the cache breaks
    its contract. Raises DtoolError when a reference that has gates cannot be had, when it is not the
    candidate's model, or when the text is missing or too short.
    """
    artifact = open_artifact(candidate, ("export", "quantize", "engine"))
    config = DecoderConfig.model_validate(artifact.json("decoder.json"))
    _check_positions(candidate, config, recipe)
    weights = candidate_source(artifact, source)
    _check_references(artifact, recipe, model, weights)
    sizes = fit_rows(str(candidate), recipe.parity, artifact_limits(artifact), config.context_len)
    blocks, what = held_out_ids(candidate, recipe.parity, sizes.seq_len, config)
    facts, notes = text_facts(blocks, what), [*sizes.notes, *([NO_TOKENIZER] if what == RANDOM else [])]
    runner = open_runner(candidate, threads=threads)
    device = getattr(runner, "torch_device", "cpu")
    references = _references(artifact, recipe, notes, model=model, weights=weights, device=device)
    for reference in references:
        _check_same_model(reference, runner)
    self_gates = _self_gates(runner, recipe, notes)
    for label, text in (*(("note", note) for note in notes), *facts):
        report(f"{label}: {text}")
    batches = plan_batches(blocks, sizes.batch)
    collected = _walk(runner, references, batches, recipe.parity.decode_steps, report)
    gates = {r.name: r.gates for r in references} | {SELF: self_gates}
    rows = _rows(artifact, runner, collected, gates)
    rows += _layer_rows(artifact, references, blocks)
    finite_slots = bool(artifact.manifest.kv_contract.get("finite_slots", False))
    rows += check_kv_contract(runner, logits_tolerance(artifact, config), finite_slots=finite_slots)
    failed = any(not row.passed for row in rows)
    divergence = _divergence(artifact, references, rows, report) if failed else ""
    names = ", ".join(r.name for r in references) or "none"
    return ParityReport(
        verdict="failed" if failed else "passed",
        rows=tuple(rows),
        facts=(("candidate", f"{artifact.manifest.stage}{RUN_BY}{runner.name}"), ("references", names), *facts),
        notes=tuple(notes),
        divergence=divergence,
    )


def _self_gates(runner: Runner, recipe: Recipe, notes: list[str]) -> Gates:
    """The gates of decode against one-shot prefill, which experts cannot promise once anything is rounded.

    Their float sums depend on the number of tokens in the call, by last bits; a rounded value on an edge, or
    a router's near-tie, makes a whole code or another expert of one.
    """
    gates = recipe.parity.self_consistency
    if not (runner.config.num_experts and recipe.quantizes and _gated(gates)):
        return gates
    notes.append("self_consistency is not gated: experts' sums differ by last bits with the tokens of a call")
    return Gates()


def _check_references(artifact: Artifact, recipe: Recipe, model: Path | None, weights: Path | None) -> None:
    """Refuse gates against a reference that cannot be had, before any model is loaded."""
    if model is None and _gated(recipe.parity.eager):
        raise _no_reference("eager", "the checkpoint", "give the checkpoint with --model")
    if weights is None and _gated(recipe.parity.fake_quant):
        raise _no_reference("fake_quant", "the artifact with weights", "give what the engine was built from")
    layer_gate = recipe.parity.fake_quant.layer_error_median
    if layer_gate is not None and not _has_graphs(artifact):
        raise layers_are_hidden(f"plans by {artifact.manifest.target.get('backend')} in {artifact.path}")


def _references(
    artifact: Artifact, recipe: Recipe, notes: list[str], *, model: Path | None, weights: Path | None, device: str
) -> list[_Reference]:
    gates = recipe.parity
    found = []
    if model is not None:
        context_len = DecoderConfig.model_validate(artifact.json("decoder.json")).context_len
        found.append(_Reference("eager", eager_runner(model, device, context_len), gates.eager))
    else:
        notes.append("eager skipped: no checkpoint was given, and the recipe has no gate for it")
    if weights is None:
        notes.append("fake_quant skipped: an engine holds no weights by name, and no source was given")
    elif model is not None and not _gated(gates.fake_quant) and _is_plain(artifact):
        notes.append("fake_quant skipped: nothing is rounded, so it would compute what eager computes")
    else:
        found.append(_Reference("fake_quant", fake_quant_runner(weights), gates.fake_quant))
    return found


def candidate_source(artifact: Artifact, source: Path | None) -> Path | None:
    """The artifact whose weights the candidate computes with; None for an engine without a source.

    Raises DtoolError when the engine was built from another artifact.
    """
    if artifact.manifest.stage != "engine":
        return artifact.path
    if source is None:
        return None
    built_from = artifact.manifest.lineage.get("source")
    if built_from not in (None, found := open_artifact(source).identity):
        raise DtoolError(
            f"{artifact.path} was not built from {source}",
            expected=f"the artifact with sha256 {built_from}",
            found=f"sha256 {found}",
            fix="give the artifact the engine was built from",
        )
    return source


def _gated(gates: Gates) -> bool:
    return any(bound is not None for bound in gates.model_dump().values())


def _is_plain(artifact: Artifact) -> bool:
    """Whether the artifact is the checkpoint in float32, nothing rounded."""
    details = artifact.manifest.details
    rounded = details.get("quantized") or details.get("kv_format", "none") != "none"
    return details.get("compute_dtype") == "float32" and not rounded


def _no_reference(name: str, what: str, fix: str) -> DtoolError:
    return DtoolError(
        f"parity.{name} has gates, and there is no {name} reference",
        expected=what,
        found="none",
        fix=f"{fix}, or remove the gates",
    )


def _check_positions(candidate: Path, config: DecoderConfig, recipe: Recipe) -> None:
    if recipe.context_len not in (None, config.context_len):
        raise DtoolError(
            "the candidate serves other positions than the recipe asks for",
            expected=f"context_len {recipe.context_len}",
            found=f"context_len {config.context_len} in {candidate}",
            fix="leave --set context_len out, or export again with it",
        )


def _check_same_model(reference: _Reference, runner: Runner) -> None:
    theirs, ours = reference.runner.config, runner.config
    other = [name for name in SHAPE_FIELDS if getattr(theirs, name) != getattr(ours, name)]
    if other:
        raise DtoolError(
            f"the {reference.name} reference is another model than the candidate",
            expected=", ".join(f"{n} {getattr(ours, n)}" for n in other),
            found=", ".join(f"{n} {getattr(theirs, n)}" for n in other),
            fix="give the checkpoint the candidate was exported from",
        )


def _walk(
    runner: Runner, references: list[_Reference], batches: list[Batch], decode_steps: int, report: Report
) -> dict[tuple[str, str], LogitComparison]:
    """Take all models through every phase of every batch in step: {(reference, phase): comparison}."""
    collected: dict[tuple[str, str], LogitComparison] = {}
    models = [runner, *(r.runner for r in references)]
    for i, batch in enumerate(batches, 1):
        whole: PhaseLogits | None = None
        for ours, *theirs in zip(*(run_phases(m, batch, decode_steps) for m in models), strict=True):
            targets_N = batch.targets(ours.rows, ours.positions)
            for reference, their in zip(references, theirs, strict=True):
                comparison = collected.setdefault((reference.name, ours.phase), LogitComparison())
                comparison.add(their.logits, ours.logits, targets_N)
            whole = ours if ours.phase == "prefill" else whole
            if ours.phase == "decode" and whole is not None:
                own_NV = logits_at(whole, ours.rows, ours.positions)
                collected.setdefault((SELF, SELF_PHASE), LogitComparison()).add(own_NV, ours.logits, targets_N)
        report(f"batch {i} of {len(batches)} compared")
    return collected


def _rows(
    artifact: Artifact, runner: Runner, collected: dict[tuple[str, str], LogitComparison], gates: dict[str, Gates]
) -> list[Row]:
    """The metrics of every comparison against its gates, references in the order of `gates`.

    A choice that half precision turns is a tie where the implementation is asked, but a cost where the
    reference is float32.
    """
    stated = str(artifact.manifest.details.get("compute_dtype", "float32"))
    layers, width = runner.config.num_hidden_layers, max(runner.config.hidden_size, runner.config.intermediate_size)
    rows: list[Row] = []
    for name, bounds in gates.items():
        dtype = "float32" if name == "eager" else stated
        tolerance = functools.partial(_tolerance, dtype, layers, width)
        for (reference, phase), comparison in collected.items():
            if reference == name:
                rows += gate_rows(name, phase, comparison.metrics(tolerance), bounds)
    return rows


def _tolerance(dtype: str, layers: int, width: int, largest: float) -> float:
    return logit_tolerance(dtype, layers=layers, width=width, largest=largest)


def _layer_rows(artifact: Artifact, references: list[_Reference], blocks: Array) -> list[Row]:
    """Every layer fed the candidate's own input, against the exact arithmetic.

    None without that reference, or where the candidate's layers cannot be looked into.
    """
    rows: list[Row] = []
    if not _has_graphs(artifact):
        return rows
    for reference in references:
        runner = reference.runner
        if reference.name == "fake_quant" and isinstance(runner, EagerRunner):
            ids_BT = blocks[: layerwise.ROWS, : layerwise.TOKENS]
            errors = layerwise.layer_errors(artifact, runner.decoder, ids_BT)
            rows += layerwise.layer_rows(errors, reference.gates)
    return rows


def _has_graphs(artifact: Artifact) -> bool:
    """Whether the candidate holds graphs whose inner values can be read; compiled plans do not."""
    return GRAPH_FILES["evaluation"] in artifact.manifest.files


def layers_are_hidden(found: str) -> DtoolError:
    """Of a gate on layers where only compiled plans are run; `found`: what they are."""
    return DtoolError(
        "parity.fake_quant.layer_error_median cannot be measured on a compiled engine",
        expected="an artifact whose graphs can be looked into",
        found=found,
        fix="remove the gate, or prove the artifact the engine was built from",
    )


def _divergence(artifact: Artifact, references: list[_Reference], rows: list[Row], report: Report) -> str:
    """A line about where the failure lies, bisect's where prefill failed; empty when there is nothing to say."""
    lost = [row for row in rows if not row.passed and row.phase != KV_PHASE]
    if lost and {row.phase for row in lost} <= DECODE_PHASES:
        return DECODE_DEPARTS
    failed = {row.reference for row in lost}
    runners = {r.name: r.runner for r in references}
    if artifact.manifest.stage == "engine" or not failed & set(runners):
        return ""
    # What is rounded is wrong against eager everywhere: only fake_quant tells a fault from the rounding.
    name = "fake_quant" if not _is_plain(artifact) or "eager" not in failed else "eager"
    report(f"looking for the first tensor that departs from {name}")
    reference = runners[name]
    assert isinstance(reference, EagerRunner)
    found = find_divergence(artifact, reference.decoder)
    if found is not None:
        return f"against {name}, {found.text()}"
    agrees = f"no tensor of the evaluation graph departs from {name}"
    eager = runners.get("eager")
    if name == "eager" or "eager" not in failed or not isinstance(eager, EagerRunner):
        return f"{agrees}: look at the graphs of the failed phases"
    tensor, before, there = largest_growth(artifact, eager.decoder)
    return (
        f"{agrees}, so the loss lies in the stored values; against eager the relative error grows most at "
        f"{tensor}, from {before:.2g} to {there:.2g}"
    )
