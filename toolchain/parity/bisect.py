"""The first tensor of a graph that departs from the torch decoder, and the likely class of fault.

The evaluation graph runs in ONNX Runtime with its intermediate values as extra outputs, the decoder
with hooks at the same places, both over the same two chunks (the second with a past). Tensors are
walked in the order they are computed; the first whose relative error ||ours - theirs|| / ||theirs||
exceeds the tolerance is named. The class comes from simple evidence only:

    scale    each output channel is a multiple of the reference's
    layout   the channels (or heads) are the reference's in another order
    cast     a float32 graph errs as half precision would
    rope     attention is right at position 0 and wrong behind it
    mask     attention is wrong at position 0, which may see nothing but itself
    cache    attention is right until there is a past
    weights  a product of right inputs is wrong in none of these ways
    unknown  anything else

Legend: B batch, T new tokens, I or O channels, H heads, D head dim, N positions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolchain.artifact import Artifact
from toolchain.graph_io import GRAPH_FILES, OUTPUT, PROJECTED, layer_value, load_graph
from toolchain.model.caches import caches_of
from toolchain.model.config import MERGED, DecoderConfig
from toolchain.model.decoder import Decoder
from toolchain.numerics import logit_tolerance
from toolchain.parity.layerwise import expose_values
from toolchain.runners.eager import EagerRunner
from toolchain.runners.onnx import open_session, run_chunks

Array = np.ndarray[Any, Any]
CHUNK, ROWS = 12, 2
ROUNDING_TOLERANCE = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""By compute type: rounding to codes turns a last-bit difference into a whole code, in half types often."""
GROWTH_FLOOR = 1e-2
"""Errors below it are what rounded weights cost anywhere."""
HALF_PRECISION = (2.0**-13, 2.0**-6)
"""Relative errors that rounding to float16 or bfloat16 leaves."""
PARTS = ("qkv_proj", "attention", PROJECTED, OUTPUT)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a graph departs: `tensor` is `layers.{i}.{part}`, `embedding` or `logits`; `value` is the graph's name."""

    tensor: str
    value: str
    relative_error: float
    tolerance: float
    fault: str
    evidence: str

    def text(self) -> str:
        """One line for people."""
        return (
            f"first divergence: {self.tensor} ({self.value} in {GRAPH_FILES['evaluation']}), relative error "
            f"{self.relative_error:.2g} > {self.tolerance:.2g}; likely {self.fault}: {self.evidence}"
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """One tensor on both sides, [B, T, features] of each chunk."""

    tensor: str
    value: str
    ours: tuple[Array, ...]
    theirs: tuple[Array, ...]


def find_divergence(artifact: Artifact, decoder: Decoder) -> Divergence | None:
    """The first tensor of an export or quantized artifact that departs from `decoder`; None when none does."""
    config, dtype = decoder.config, str(artifact.manifest.details.get("compute_dtype", "float32"))
    rounds = rounds_while_running(artifact)
    for depth, probe in enumerate(run_probes(artifact, decoder), 1):
        tolerance = _tolerance(dtype, depth, config, rounds=rounds)
        error = max(relative_error(a, b) for a, b in zip(probe.ours, probe.theirs, strict=True))
        if not error <= tolerance:  # NaN is a divergence
            fault, evidence = classify(probe, config, tolerance, exact=dtype == "float32" and not rounds)
            return Divergence(probe.tensor, probe.value, error, tolerance, fault, evidence)
    return None


def largest_growth(artifact: Artifact, decoder: Decoder) -> tuple[str, float, float]:
    """(tensor, error before, error there): where the relative error against `decoder` grows most.

    For an artifact that is expected to differ everywhere, since its weights are rounded.
    """
    worst, before, found = 0.0, 0.0, ("embedding", 0.0, 0.0)
    for probe in run_probes(artifact, decoder):
        error = max(relative_error(a, b) for a, b in zip(probe.ours, probe.theirs, strict=True))
        growth = error / max(before, GROWTH_FLOOR)
        if growth > worst:
            worst, found = growth, (probe.tensor, before, error)
        before = max(before, error)
    return found


def rounds_while_running(artifact: Artifact) -> bool:
    """Whether activations or the cache are rounded to integers, so that last bits become whole codes."""
    details = artifact.manifest.details
    return bool(details.get("rounded_inputs")) or details.get("kv_format", "none") != "none"


def run_probes(artifact: Artifact, decoder: Decoder) -> list[Probe]:
    """Every tensor of the walk, from both sides, in the order of computation."""
    config = decoder.config
    chunks = np.random.default_rng(0).integers(0, config.vocab_size, (2, ROWS, CHUNK), np.int64)
    chunks = chunks[..., : min(CHUNK, config.context_len // 2)]
    places = graph_places(artifact, config)
    values = list(dict.fromkeys(places.values()))
    session = _instrumented_session(artifact, values)
    caches = caches_of(artifact.manifest.kv_contract, config.num_hidden_layers)
    ours = run_chunks(session, config, caches, list(chunks), values)
    theirs = _run_decoder(decoder, chunks)
    return [
        Probe(tensor, value, tuple(c[value] for c in ours), tuple(c[tensor] for c in theirs))
        for tensor, value in places.items()
    ]


def _tolerance(dtype: str, depth: int, config: DecoderConfig, *, rounds: bool) -> float:
    """What rounding explains after `depth` tensors, relative to the tensor's norm."""
    width = max(config.hidden_size, config.intermediate_size)
    exact = logit_tolerance(dtype, layers=depth, width=width, largest=1.0)
    return max(exact, ROUNDING_TOLERANCE[dtype] * math.sqrt(depth)) if rounds else exact


def logits_tolerance(artifact: Artifact, config: DecoderConfig) -> float:
    """What rounding explains of the last tensor, the logits, relative to their norm."""
    dtype = str(artifact.manifest.details.get("compute_dtype", "float32"))
    tensors = len(PARTS) * config.num_hidden_layers + 2
    return _tolerance(dtype, tensors, config, rounds=rounds_while_running(artifact))


def relative_error(ours: Array, theirs: Array) -> float:
    """||ours - theirs|| / ||theirs||, in float64; infinite when `ours` is not finite."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if not np.isfinite(a).all():
        return math.inf
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def graph_places(artifact: Artifact, config: DecoderConfig) -> dict[str, str]:
    """{tensor: value name in the evaluation graph}, in the order of computation.

    The input and the output of each layer's attention node, its projection, and what the layer hands on.
    """
    graph = load_graph(artifact.file(GRAPH_FILES["evaluation"])).graph
    attention = [node for node in graph.node if node.op_type == "FusedAttention"]
    embedding = next(node for node in graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    places = {"embedding": embedding.output[0]}
    for i in range(config.num_hidden_layers):
        named = (layer_value(i, PROJECTED), layer_value(i, OUTPUT))
        values = (attention[i].input[0], attention[i].output[0], *named)
        places |= {f"layers.{i}.{part}": value for part, value in zip(PARTS, values, strict=True)}
    return places | {"logits": "logits"}


def _instrumented_session(artifact: Artifact, values: Sequence[str]) -> Any:
    """The evaluation graph with the named values as outputs, unfused and on one thread: repeatable."""
    import onnxruntime

    model, options = expose_values(artifact, values)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = 1
    return open_session(model, options, artifact.path / GRAPH_FILES["evaluation"])


def _run_decoder(decoder: Decoder, chunks: Array) -> list[dict[str, Array]]:
    """The same tensors from the torch decoder, by hooks."""
    seen: dict[str, Array] = {}

    def keep(name: str, tensor: Any) -> None:
        seen[name] = tensor.float().numpy().copy()

    def keep_output(name: str) -> Any:
        return lambda _module, _inputs, output: keep(name, output[0] if isinstance(output, tuple) else output)

    def keep_input(name: str) -> Any:
        return lambda _module, inputs: keep(name, inputs[0])

    handles = [decoder.model.embed_tokens.register_forward_hook(keep_output("embedding"))]
    blocks: list[Any] = list(decoder.model.layers)
    for i, block in enumerate(blocks):
        output = block.self_attn.o_proj
        block.self_attn.packed = _watched(block.self_attn.packed, lambda x, i=i: keep(f"layers.{i}.qkv_proj", x))
        handles.append(output.register_forward_pre_hook(keep_input(f"layers.{i}.attention")))
        handles.append(output.register_forward_hook(keep_output(layer_value(i, PROJECTED))))
        handles.append(block.register_forward_hook(keep_output(f"layers.{i}.output")))
    runner = EagerRunner(decoder)
    state = runner.new_state(ROWS, chunks.shape[0] * chunks.shape[2])
    results = []
    try:
        for ids_BT in chunks:
            logits = runner.step(state, ids_BT, np.full(ROWS, ids_BT.shape[1], np.int64), "evaluation")
            results.append(dict(seen) | {"logits": logits})
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks:
            del block.self_attn.packed  # the method itself again
    return results


def _watched(function: Callable[[Any], Any], see: Callable[[Any], None]) -> Callable[[Any], Any]:
    """`function`, with what it returns shown to `see`."""

    def call(argument: Any) -> Any:
        result = function(argument)
        see(result)
        return result

    return call


def classify(probe: Probe, config: DecoderConfig, tolerance: float, *, exact: bool) -> tuple[str, str]:
    """(class of fault, the evidence for it). `exact`: nothing in the graph is rounded below float32."""
    ours, theirs = (np.concatenate(side, 1).astype(np.float64) for side in (probe.ours, probe.theirs))
    if not np.isfinite(ours).all():
        return "unknown", "values are not finite"
    error = relative_error(ours, theirs)
    part = probe.tensor.rsplit(".", 1)[-1]
    if part in (PROJECTED, OUTPUT):
        inside = "attention's output projection" if part == PROJECTED else "the norms or the feed-forward"
        return _cast_or("weights", f"everything before {inside} agrees", error, exact=exact)
    if part == "attention":
        return _classify_attention(probe, config, tolerance, error, exact=exact)
    if part == "embedding":
        return _cast_or("weights", "the embedding is the first thing computed", error, exact=exact)
    ours_NO, theirs_NO = (x.reshape(-1, x.shape[-1]) for x in (ours, theirs))
    fault, evidence = _classify_channels(ours_NO, theirs_NO, tolerance, error, exact=exact)
    if part == "qkv_proj":
        evidence += f" ({_parts_of_qkv(ours_NO, theirs_NO, config, tolerance)})"
    return fault, evidence


def _parts_of_qkv(ours_NO: Array, theirs_NO: Array, config: DecoderConfig, tolerance: float) -> str:
    """Which of q, k and v hold channels that are off."""
    wrong_O = _column_errors(ours_NO, theirs_NO) > 10 * tolerance
    edges = np.cumsum(config.part_sizes("qkv_proj") or ())[:-1]
    named = zip(MERGED["qkv_proj"], np.split(wrong_O, edges), strict=True)
    return "in " + (", ".join(name for name, wrong in named if wrong.any()) or "none of them alone")


def _cast_or(fault: str, evidence: str, error: float, *, exact: bool) -> tuple[str, str]:
    low, high = HALF_PRECISION
    if exact and low <= error <= high:
        return "cast", f"a relative error of {error:.1g} is that of half precision"
    return fault, evidence


def _classify_channels(
    ours_NO: Array, theirs_NO: Array, tolerance: float, error: float, *, exact: bool
) -> tuple[str, str]:
    """A product of inputs that agree: which channels are off, and how."""
    wrong_O = _column_errors(ours_NO, theirs_NO) > 10 * tolerance
    wrong = np.flatnonzero(wrong_O)
    told = f"{len(wrong)} of {len(wrong_O)} output channels are off (first {', '.join(map(str, wrong[:4]))})"
    if len(wrong) == 0:
        return _cast_or("unknown", "no single channel stands out", error, exact=exact)
    a, b = ours_NO[:, wrong], theirs_NO[:, wrong]
    ratio = (a * b).sum(0) / np.maximum((b * b).sum(0), 1e-30)
    if _column_errors(a, b * ratio).max() <= 10 * tolerance:
        return "scale", f"{told}, each by a constant factor (first {ratio[0]:.3g})"
    if len(wrong) > 1 and _is_permutation(a, b, 10 * tolerance):
        return "layout", f"{told}; they are the reference's channels in another order"
    return _cast_or("weights", told, error, exact=exact)


def _classify_attention(
    probe: Probe, config: DecoderConfig, tolerance: float, error: float, *, exact: bool
) -> tuple[str, str]:
    """The packed q, k and v agree and the attention output does not."""
    first_ours, first_theirs = probe.ours[0], probe.theirs[0]
    if relative_error(first_ours, first_theirs) <= tolerance:
        return "cache", "right without a past, wrong once earlier tokens are in the cache"
    if exact and HALF_PRECISION[0] <= error <= HALF_PRECISION[1]:
        return "cast", f"a relative error of {error:.1g} is that of half precision"
    if relative_error(first_ours[:, :1], first_theirs[:, :1]) <= tolerance:
        return "rope", "right at position 0, wrong at later positions"
    heads = (-1, config.num_attention_heads, config.head_dim)
    a, b = (x[:, 0].reshape(heads).transpose(0, 2, 1).reshape(-1, heads[1]) for x in (first_ours, first_theirs))
    near = min(10 * tolerance, error / 4)  # a wide tolerance must not take every head for every other
    if all(_column_errors(a[:, [h] * heads[1]], b).min() <= near for h in range(heads[1])):
        return "layout", "at position 0 each head holds another head's values"
    return "mask", "wrong at position 0, which sees nothing but itself"


def _column_errors(a_NO: Array, b_NO: Array) -> Array:
    """Relative error of each column."""
    return np.linalg.norm(a_NO - b_NO, axis=0) / np.maximum(np.linalg.norm(b_NO, axis=0), 1e-30)


def _is_permutation(a_NO: Array, b_NO: Array, tolerance: float) -> bool:
    """Whether every column of `a` is one of the columns of `b`."""
    return all(_column_errors(column_N[:, None], b_NO).min() <= tolerance for column_N in a_NO.T)
