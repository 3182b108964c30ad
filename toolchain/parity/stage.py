"""`dtool parity`: is the candidate still the model? Two references, two questions, one verdict.

`eager` is the checkpoint in float32: what did quantization cost. `fake_quant` is the torch decoder
with the artifact's exact rounding: is the implementation right. `self` compares the candidate's own
chunks and decode steps with its own one-shot prefill, and holds the cache to its contract.

What involves no text is proved first: the stored matrices and the cache contract. Then rows of text are
taken until every gate is decided (`statistics`). Phases that see the same positions are one sample:
`prompt` is prefill, chunked prefill and the last position of prefill together, `decode` the other.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from toolchain.artifact import Artifact, open_artifact
from toolchain.errors import DtoolError, GateFailed, name_list
from toolchain.graph_io import GRAPH_FILES
from toolchain.model.config import DecoderConfig
from toolchain.numerics import logit_tolerance
from toolchain.parity import layerwise
from toolchain.parity.bisect import find_divergence, largest_growth, logits_tolerance
from toolchain.parity.compare import DECODE, PROMPT, PROMPT_PHASES, PhaseLogits, logits_at, plan_batches, run_phases
from toolchain.parity.kv_contract import PHASE as KV_PHASE
from toolchain.parity.kv_contract import check_kv_contract
from toolchain.parity.metrics import LARGER_IS_BETTER, LogitComparison, Row, gate_rows
from toolchain.parity.page import RUN_BY, interval_text, parity_page
from toolchain.parity.rows import NO_TOKENIZER, RANDOM, Sizes, fit_rows, held_out_ids, text_facts
from toolchain.parity.statistics import Estimate, Verdict, combine, look_confidence, rows_to_decide
from toolchain.parity.weights import PartMatch, match_weights, weight_rows
from toolchain.recipe import Recipe
from toolchain.recipe_sections import Gates
from toolchain.report import Page
from toolchain.runners.eager import EagerRunner
from toolchain.runners.open import eager_runner, fake_quant_runner, open_runner
from toolchain.runners.runner import Runner, artifact_limits

Array = np.ndarray[Any, Any]
Report = Callable[[str], None]
EAGER, FAKE_QUANT, SELF = "eager", "fake_quant", "self"
DECODE_DEPARTS = (
    "no prefill missed a gate, only decode steps did: look at the decode graph and what it reads from the cache; "
    "where sums depend on the tokens of a call (rotation, experts, a cache with scales of tokens in ONNX Runtime), "
    "gate parity.self_consistency by its kl_mean"
)
GATES_MET = "every gate of [parity] met"
WAYS_OUT = "a loss that is the price of a format takes a finer one, or a wider gate in [parity]; else it is a fault"
POSITION_GROUPS = 16
"""Points of the curve of KL by position."""
SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class Profile(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Where the loss lies: (last position of a group, KL in nats), and the relative error of every layer."""

    kl_by_position: tuple[tuple[int, float], ...] = ()
    layer_error: tuple[float, ...] = ()


class ParityReport(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The outcome of a proof.

    `confidence` is that of the whole proof, `rows_of_text` what it took. `facts` say what ran over what;
    `divergence` is where a failure lies, as far as known.
    """

    verdict: Verdict
    rows: tuple[Row, ...]
    rows_of_text: int
    confidence: float
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    divergence: str = ""
    profile: Profile = Profile()

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows whose gate was not met, or not decided."""
        return tuple(row for row in self.rows if not row.passed)

    def document(self) -> dict[str, Any]:
        """The report as plain JSON types, for parity.json."""
        return {
            "verdict": self.verdict,
            "confidence": self.confidence,
            "rows_of_text": self.rows_of_text,
            "rows": [row.model_dump() | {"passed": row.passed} for row in self.rows],
            "facts": dict(self.facts),
            "notes": list(self.notes),
            "divergence": self.divergence,
            "profile": self.profile.model_dump(mode="json"),
        }

    def page(self) -> Page:
        """The report for people."""
        return parity_page(self.verdict, self.rows, self.facts, self.notes, self.divergence, self.profile.model_dump())

    def failure_text(self) -> str:
        """The gates that were not met, one a line, each with its value, its bounds and what would decide it."""
        lines = [
            f"{row.reference} / {row.phase}: {row.metric} {interval_text(row)} {row.unit}, gate "
            f"{_number(row.gate)}: {self._outcome(row)}"
            for row in self.failures
        ]
        return "\n".join([*lines, *([self.divergence] if self.divergence else [])])

    def _outcome(self, row: Row) -> str:
        place = f" in {row.where}" if row.where else ""
        if row.verdict != "undecided" or row.value is None or row.gate is None:
            return f"{row.verdict}{place}"
        low = 0.0 if row.low is None else row.low
        high = float("inf") if row.high is None else row.high
        larger = row.metric in LARGER_IS_BETTER
        needed = rows_to_decide(Estimate(row.value, low, high), row.gate, self.rows_of_text, larger_is_better=larger)
        if needed is None or needed <= self.rows_of_text:
            return f"undecided{place} after {self.rows_of_text} rows"
        return f"undecided{place} after {self.rows_of_text} rows, about {needed} would decide"

    def failure(self, fix: str) -> GateFailed | None:
        """The error that a command ends with; None where the proof passed."""
        if self.verdict == "passed":
            return None
        if self.verdict == "undecided":
            fix = f"raise parity.max_blocks, with more text in parity.data where it is too short; {fix}"
        problem = "parity failed" if self.verdict == "failed" else "parity is undecided"
        return GateFailed(problem, expected=GATES_MET, found=self.failure_text(), fix=fix)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    runner: Runner
    gates: Gates


@dataclass(slots=True)
class _Sample:
    """What the rows of text taken so far have shown."""

    rows: int = 0
    logits: dict[tuple[str, str], LogitComparison] = field(default_factory=dict)
    """By reference and phase."""
    layers: list[Array] = field(default_factory=list)
    """Relative errors [layers, rows, tokens] of each layer on its own, by group of rows."""


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
    report's verdict is "failed" when any gate is missed, any logit is not finite, a stored matrix is not the
    checkpoint's or the cache breaks its contract, and "undecided" when the text that the recipe allows
    does not decide a gate. Raises DtoolError when a reference that has gates cannot be had, when it is not the
    candidate's model, or when the text is missing or too short.
    """
    artifact = open_artifact(candidate, ("export", "quantize", "engine"))
    config = artifact.read("decoder.json", DecoderConfig)
    _check_positions(candidate, config, recipe)
    weights = candidate_source(artifact, source)
    _check_references(artifact, recipe, model, weights)
    parity = recipe.parity
    sizes = fit_rows(str(candidate), parity, artifact_limits(artifact), config.context_len)
    blocks, what = held_out_ids(candidate, parity, sizes.seq_len, config)
    looks = look_sizes(len(blocks), parity.blocks)
    facts, notes = text_facts(blocks, what, looks), [*sizes.notes, *([NO_TOKENIZER] if what == RANDOM else [])]
    runner = open_runner(candidate, threads=threads)
    device = getattr(runner, "torch_device", "cpu")
    references = _references(artifact, recipe, notes, model=model, weights=weights, device=device)
    for reference in references:
        _check_same_model(reference, runner)
    self_gates = _self_gates(runner, recipe, notes)
    for label, text in (*(("note", note) for note in notes), *facts):
        report(f"{label}: {text}")
    matches = _match_weights(artifact, references)
    finite_slots = bool(artifact.manifest.kv_contract.get("finite_slots", False))
    tolerance = logits_tolerance(artifact, config)
    fixed = weight_rows(matches) + check_kv_contract(runner, tolerance, finite_slots=finite_slots)
    sample, confidence = _Sample(), look_confidence(parity.confidence, len(looks))
    rows, verdict = fixed, "undecided"
    for end in looks:
        _take_rows(sample, blocks[sample.rows : end], sizes, artifact, runner, references, recipe, report)
        rows = _sampled_rows(artifact, runner, sample, references, self_gates, confidence) + fixed
        verdict = combine([row.verdict for row in rows])
        if verdict != "undecided":
            break
        report(f"undecided after {sample.rows} rows")
    divergence = _divergence(artifact, references, rows, matches, report) if verdict == "failed" else ""
    names = ", ".join(r.name for r in references) or "none"
    taken = f"{sample.rows} of at most {len(blocks)}, confidence {100 * parity.confidence:g} %"
    return ParityReport(
        verdict=verdict,
        rows=tuple(rows),
        rows_of_text=sample.rows,
        confidence=parity.confidence,
        facts=(
            ("candidate", f"{artifact.manifest.stage}{RUN_BY}{runner.name}"),
            ("references", names),
            *facts,
            ("rows taken", taken),
        ),
        notes=tuple(notes),
        divergence=divergence,
        profile=_profile(sample),
    )


def look_sizes(available: int, first: int) -> list[int]:
    """How many rows each look at the gates has: `first`, then twice as many, while the text has them."""
    looks = [first]
    while 2 * looks[-1] <= available:
        looks.append(2 * looks[-1])
    return looks


def _match_weights(artifact: Artifact, references: list[_Reference]) -> list[PartMatch]:
    """The stored matrices against the checkpoint's; none where one of the two is not there."""
    runners = {reference.name: reference.runner for reference in references}
    stored, checkpoint = runners.get(FAKE_QUANT), runners.get(EAGER)
    if not isinstance(stored, EagerRunner) or not isinstance(checkpoint, EagerRunner):
        return []
    recipe = artifact.manifest.recipe
    rotation, smoothing = recipe.get("rotation", {}), recipe.get("smoothing", {})
    return match_weights(
        stored.decoder,
        checkpoint.decoder,
        rotates_values=bool(rotation.get("values", False)),
        smooths=smoothing.get("algorithm", "none") != "none",
        smooths_keys=bool(smoothing.get("keys", False)),
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
        context_len = artifact.read("decoder.json", DecoderConfig).context_len
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


def _take_rows(
    sample: _Sample,
    blocks: Array,
    sizes: Sizes,
    artifact: Artifact,
    runner: Runner,
    references: list[_Reference],
    recipe: Recipe,
    report: Report,
) -> None:
    """Take all models through every phase of more rows in step, and every layer on its own.

    Rows come in groups of `parity.blocks`, so that every group has batches of the same sizes.
    """
    group = recipe.parity.blocks
    for start in range(0, len(blocks), group):
        rows = blocks[start : start + group]
        _compare_logits(sample, rows, sizes.batch, runner, references, recipe.parity.decode_steps)
        for reference in references:
            if reference.name == FAKE_QUANT and _has_graphs(artifact) and isinstance(reference.runner, EagerRunner):
                ids_RT = rows[:, : layerwise.TOKENS]
                sample.layers.append(layerwise.layer_errors(artifact, reference.runner.decoder, ids_RT))
        sample.rows += len(rows)
        report(f"{sample.rows} rows compared")


def _compare_logits(
    sample: _Sample, rows: Array, batch_rows: int, runner: Runner, references: list[_Reference], decode_steps: int
) -> None:
    """Compare the logits of one group of rows with every reference and with the candidate itself."""
    models = [runner, *(r.runner for r in references)]
    first_row = sample.rows
    for batch in plan_batches(rows, batch_rows):
        whole: PhaseLogits | None = None
        for ours, *theirs in zip(*(run_phases(m, batch, decode_steps) for m in models), strict=True):
            targets_N = batch.targets(ours.rows, ours.positions)
            places = (first_row + ours.rows, ours.positions)
            for reference, their in zip(references, theirs, strict=True):
                comparison = sample.logits.setdefault((reference.name, ours.phase), LogitComparison())
                comparison.add(their.logits, ours.logits, targets_N, *places)
            if whole is None:
                whole = ours  # one-shot prefill comes first
                continue
            own_NV = logits_at(whole, ours.rows, ours.positions)
            comparison = sample.logits.setdefault((SELF, ours.phase), LogitComparison())
            comparison.add(own_NV, ours.logits, targets_N, *places)
        first_row += len(batch.ids)


def _sampled_rows(
    artifact: Artifact,
    runner: Runner,
    sample: _Sample,
    references: list[_Reference],
    self_gates: Gates,
    confidence: float,
) -> list[Row]:
    """The metrics of every comparison against its gates, as far as the rows taken so far tell.

    A choice that half precision turns is a tie where the implementation is asked, but a cost where the
    reference is float32.
    """
    stated = str(artifact.manifest.details.get("compute_dtype", "float32"))
    layers, width = runner.config.num_hidden_layers, max(runner.config.hidden_size, runner.config.intermediate_size)
    rounding = functools.partial(_tolerance, stated, layers, width)
    rows: list[Row] = []

    def add(name: str, phase: str, comparison: LogitComparison, gates: Gates) -> None:
        ties = functools.partial(_tolerance, "float32", layers, width) if name == EAGER else rounding
        metrics = comparison.metrics(ties, confidence)
        nonlocal rows
        rows += gate_rows(name, phase, metrics, gates, rounding(metrics["largest_logit"].value))

    for reference in references:
        phases = {phase: c for (name, phase), c in sample.logits.items() if name == reference.name}
        for phase in PROMPT_PHASES:
            add(reference.name, phase, phases[phase], Gates())
        prompt = functools.reduce(LogitComparison.joined, (phases[phase] for phase in PROMPT_PHASES))
        add(reference.name, PROMPT, prompt, reference.gates)
        add(reference.name, DECODE, phases[DECODE], reference.gates)
        if reference.name == FAKE_QUANT and sample.layers:
            errors_LRT = np.concatenate(sample.layers, axis=1)
            rows += layerwise.layer_rows(errors_LRT, reference.gates, confidence)
    for (name, phase), comparison in sample.logits.items():
        if name == SELF:
            add(SELF, phase, comparison, self_gates)
    return rows


def _profile(sample: _Sample) -> Profile:
    """KL to the first reference by position, in groups of positions, and the median error of every layer."""
    reference = next((name for name, _ in sample.logits if name != SELF), None)
    curve = []
    if reference is not None:
        whole = sample.logits[reference, PROMPT_PHASES[0]].parts
        places_N, kl_N = np.array(whole["place"]), np.array(whole["kl"])
        edges = np.unique(np.linspace(0, places_N.max() + 1, POSITION_GROUPS + 1).astype(int))
        for start, end in itertools.pairwise(edges):
            inside_N = (places_N >= start) & (places_N < end)
            mean = float(kl_N[inside_N].mean())
            if np.isfinite(mean):
                curve.append((int(end - 1), mean))
    layers = []
    if sample.layers:
        errors_LRT = np.concatenate(sample.layers, axis=1)
        layers = np.median(errors_LRT.reshape(len(errors_LRT), -1), axis=1).tolist()
    return Profile(kl_by_position=tuple(curve), layer_error=tuple(layers) if np.isfinite(layers).all() else ())


def _tolerance(dtype: str, layers: int, width: int, largest: float) -> float:
    return logit_tolerance(dtype, layers=layers, width=width, largest=largest)


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


def _divergence(
    artifact: Artifact,
    references: list[_Reference],
    rows: Sequence[Row],
    matches: Sequence[PartMatch],
    report: Report,
) -> str:
    """Where the failure lies, as far as it shows; empty when there is nothing to say."""
    faults = [match.fault for match in matches if match.fault]
    if faults:
        return f"stored weights that are not the checkpoint's: {name_list(faults, 3)}"
    lost = [row for row in rows if row.verdict == "failed" and row.phase != KV_PHASE]
    if lost and {row.phase for row in lost} <= {DECODE}:
        return DECODE_DEPARTS
    layers = [row.where for row in lost if row.phase == layerwise.PHASE]
    named = f"{layers[0]} departs most from its exact arithmetic when it is fed the same input" if layers else ""
    found = _first_tensor(artifact, references, {row.reference for row in lost}, report)
    return "; ".join(text for text in (named, found) if text)


def _first_tensor(artifact: Artifact, references: list[_Reference], failed: set[str], report: Report) -> str:
    """The first tensor of the evaluation graph that departs from a reference; empty for an engine, which is fused."""
    runners = {r.name: r.runner for r in references}
    if artifact.manifest.stage == "engine" or not failed & set(runners):
        return ""
    # What is rounded is wrong against eager everywhere: only fake_quant tells a fault from the rounding.
    name = FAKE_QUANT if not _is_plain(artifact) or EAGER not in failed else EAGER
    report(f"looking for the first tensor that departs from {name}")
    reference = runners[name]
    assert isinstance(reference, EagerRunner)
    found = find_divergence(artifact, reference.decoder)
    if found is not None:
        return f"against {name}, {found.text()}"
    agrees = f"no tensor of the evaluation graph departs from {name}"
    eager = runners.get(EAGER)
    if name == EAGER or EAGER not in failed or not isinstance(eager, EagerRunner):
        return f"{agrees}: look at the graphs of the failed phases"
    tensor, before, there = largest_growth(artifact, eager.decoder)
    return (
        f"{agrees}, so the loss lies in the stored values; against eager the relative error grows most at "
        f"{tensor}, from {before:.2g} to {there:.2g}"
    )
