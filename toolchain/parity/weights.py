"""The stored matrices against the checkpoint's: is every one of them the matrix it should be?

Logits show what a fault costs, and one wrong channel of a large model costs little. The matrices
themselves show it whatever it costs, without any text. The checkpoint's matrix W is taken to the basis
of the stored one W', and the two are compared part by part (q, k, v; gate, up; experts):

    gain        <W', W> / <W, W> over a part                      1 for a right scale
    alignment   <W'_c, W_c> / (||W'_c|| ||W_c||) of a row c       1 for a right row

Rounding hardly touches either. Its errors are independent of the weights, so over a part of n
weights the gain departs from 1 by about e / sqrt(n) with e the relative error of a weight (0.01 for
INT8, 0.15 for INT4), and a clip that was searched for adds below 0.01: 0.05 is beyond rounding and
below any wrong scale worth the name. A row rounded to the nearest keeps an alignment of at least

    1 / sqrt(1 + g / (4 q^2)),    g weights to a scale, q the largest code:  |w' - w| <= amax / (2 q)

which is 0.78 for INT4 in groups of 128 and 0.86 for INT8 in rows of 22,000. A row of the wrong sign
has -1, and one of another channel, head or expert about 0: a half lies between.

What the quantizer folds into weights is an identity of the whole layer, and the comparison knows it:

    norms       W diag(g), g the weight of the norm in front: folded or not, the same matrix
    rotations   W R for readers of the stream, R^T W for writers, likewise heads of values, feed-forward
    smoothing   rows of V, of up and of K are divided by s, and what reads them is multiplied by s. The
                gain of such a row is 1 / s; its reader is multiplied by it. A row's own gain is then
                not checked, but the gain of what reads it is that of both.

Legend: O rows, I columns, E hidden, D head dim, n block of the feed-forward's rotation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolchain.model.config import MERGED, DecoderConfig
from toolchain.model.decoder import Decoder
from toolchain.parity.metrics import Row
from toolchain.parity.statistics import nan_as_infinite
from toolchain.quantize.rotation import rotation_matrix

PHASE = "weights"
GAIN_TOLERANCE, LEAST_ALIGNMENT = 0.05, 0.5
SMALLEST_ROW = 1 / 64
"""Share of the largest row's norm below which one scale for all rows may round a row to nothing."""


@dataclass(frozen=True, slots=True)
class PartMatch:
    """How one part of a stored matrix lies to the checkpoint's.

    `gain` is None where smoothing leaves it to the reader. `row` is the one with the least `alignment`,
    counted within the part; `twin` is the row of the checkpoint that it resembles instead, if any.
    """

    part: str
    gain: float | None
    alignment: float
    row: int
    twin: int | None = None

    @property
    def gain_error(self) -> float:
        """How far the gain is from 1; 0 where it is not checked."""
        return 0.0 if self.gain is None else abs(self.gain - 1)

    @property
    def fault(self) -> str:
        """What is wrong with the part, in words; empty when nothing is."""
        if not self.alignment >= LEAST_ALIGNMENT:
            return f"{self.part}: row {self.row} {self._resemblance()}"
        if not self.gain_error <= GAIN_TOLERANCE and self.gain is not None:
            return f"{self.part}: all weights are {self.gain:.3g} times the checkpoint's, a wrong scale"
        return ""

    def _resemblance(self) -> str:
        if self.alignment <= -LEAST_ALIGNMENT:
            return "has the opposite sign of the checkpoint's"
        if self.twin is not None:
            return f"holds the weights of row {self.twin}"
        return f"is not the checkpoint's (alignment {self.alignment:.2f}, 1 is the same direction)"


def match_weights(
    stored: Decoder, checkpoint: Decoder, *, rotates_values: bool, smooths: bool, smooths_keys: bool
) -> list[PartMatch]:
    """Every part of every matrix, in the order of the model.

    `stored` is the decoder of an artifact with its codes as numbers, `checkpoint` the float32 decoder.
    The flags say what the artifact's recipe folded into weights beside what the decoder itself holds.
    """
    config, found = checkpoint.config, []
    for name, ours_OI, theirs_OI in _ends(stored, checkpoint):
        found += _match_parts(ours_OI, theirs_OI, {name: slice(None)}, set())
    for i, (our_block, their_block) in enumerate(zip(stored.model.layers, checkpoint.model.layers, strict=True)):
        bases = _Bases.of(stored, our_block, config, rotates_values=rotates_values)
        ours = layer_matrices(our_block)
        theirs = _in_bases(layer_matrices(their_block), bases, config)
        divided = _undo_smoothing(ours, theirs, config, smooths=smooths, smooths_keys=smooths_keys)
        for product, ours_OI in ours.items():
            name = f"model.layers.{i}.{product}"
            places = _part_places(name, config, len(ours_OI))
            free = {f"model.layers.{i}.{part}" for part in divided}
            found += _match_parts(ours_OI, theirs[product], places, free)
    return found


def weight_rows(matches: Sequence[PartMatch]) -> list[Row]:
    """The report's rows: the part with the worst gain, and the one with the worst row."""
    if not matches:
        return []
    gain = max(matches, key=lambda match: nan_as_infinite(match.gain_error))
    alignment = max(matches, key=lambda match: nan_as_infinite(-match.alignment))
    found = (
        ("weight_gain_error", gain.gain_error, GAIN_TOLERANCE, gain),
        ("weight_alignment_min", alignment.alignment, LEAST_ALIGNMENT, alignment),
    )
    rows = []
    for metric, value, gate, match in found:
        right = value >= gate if metric == "weight_alignment_min" else value <= gate
        rows.append(
            Row(
                reference="eager",
                phase=PHASE,
                metric=metric,
                value=value if math.isfinite(value) else None,
                unit="fraction",
                gate=gate,
                verdict="passed" if right else "failed",
                where=match.part,
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Bases:
    """The bases a layer's matrices lie in; None is the checkpoint's own."""

    stream_EE: torch.Tensor | None = None  # noqa: N815 - the shape suffix
    values_DD: torch.Tensor | None = None  # noqa: N815
    inner_nn: torch.Tensor | None = None

    @classmethod
    def of(cls, stored: Decoder, block: Any, config: DecoderConfig, *, rotates_values: bool) -> "_Bases":
        shape = getattr(block.mlp, "shape", None)
        inner_nn = None if shape is None or shape.rotation is None else shape.rotation.float()
        stream_EE = None if stored.rotation_EE is None else stored.rotation_EE.float()
        values_DD = rotation_matrix(config.head_dim).float() if rotates_values else None
        return cls(stream_EE, values_DD, inner_nn)


def _ends(stored: Decoder, checkpoint: Decoder) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The embedding, and the head where it is a matrix of its own."""
    pairs: dict[str, tuple[Any, Any]] = {
        "model.embed_tokens": (stored.model.embed_tokens, checkpoint.model.embed_tokens)
    }
    if not checkpoint.config.tie_word_embeddings:
        pairs["lm_head"] = (stored.lm_head, checkpoint.lm_head)
    for name, (ours, theirs) in pairs.items():
        yield name, _weight(ours), _weight(theirs)


def _weight(module: Any) -> torch.Tensor:
    """The matrix [O, I] of a product in float32."""
    return module.weight.detach().float()


def layer_matrices(block: Any) -> dict[str, torch.Tensor]:
    """The matrices [O, I] of one layer, float32, each with the weight of the norm in front of it."""
    attention, mlp = block.self_attn, block.mlp
    feed_norm = block.input_layernorm if block.shares_norm else block.post_attention_layernorm
    attend_norm = block.input_layernorm
    if block.stream:  # norms stand behind the sums, not in front of the products
        attend_norm = feed_norm = None
    found = {
        "self_attn.qkv_proj": _reader(attention.qkv_proj, attend_norm),
        "self_attn.o_proj": _weight(attention.o_proj),
    }
    if hasattr(mlp, "experts"):
        found["mlp.experts.gate_up_proj"] = _reader(mlp.experts.gate_up_proj, feed_norm)
        found["mlp.experts.down_proj"] = _weight(mlp.experts.down_proj)
    dense = {"mlp": mlp} if not hasattr(mlp, "experts") else {}
    if hasattr(mlp, "shared_expert"):
        dense["mlp.shared_expert"] = mlp.shared_expert
    for path, feed_forward in dense.items():
        first = "gate_up_proj" if feed_forward.gated else "up_proj"
        found[f"{path}.{first}"] = _reader(getattr(feed_forward, first), feed_norm)
        found[f"{path}.down_proj"] = _weight(feed_forward.down_proj)
    return found


def _reader(module: Any, norm: Any) -> torch.Tensor:
    """A matrix that reads the stream, with the weight of its norm in its columns."""
    weight_OI = _weight(module)
    multiplier_I = None if norm is None or isinstance(norm, torch.nn.Identity) else norm.multiplier()
    return weight_OI if multiplier_I is None else weight_OI * multiplier_I.float()


def _in_bases(theirs: dict[str, torch.Tensor], bases: _Bases, config: DecoderConfig) -> dict[str, torch.Tensor]:
    """The checkpoint's matrices as the artifact's bases hold them: see `quantize.rotation`."""
    turned = dict(theirs)
    if bases.values_DD is not None:
        first = sum(config.qkv_sizes[:2])
        qkv_OI, out_OI = turned["self_attn.qkv_proj"], turned["self_attn.o_proj"]
        heads_NDI = qkv_OI[first:].unflatten(0, (-1, config.head_dim))
        values_OI = (bases.values_DD.mT @ heads_NDI).flatten(0, 1)
        turned["self_attn.qkv_proj"] = torch.cat((qkv_OI[:first], values_OI))
        turned["self_attn.o_proj"] = (out_OI.unflatten(1, (-1, config.head_dim)) @ bases.values_DD).flatten(1)
    if bases.inner_nn is not None and "mlp.down_proj" in turned:
        blocks_OJn = turned["mlp.down_proj"].unflatten(1, (-1, len(bases.inner_nn)))
        turned["mlp.down_proj"] = (blocks_OJn @ bases.inner_nn).flatten(1)
    if bases.stream_EE is not None:
        for name, weight_OI in turned.items():
            writes = name.endswith(("o_proj", "down_proj"))
            turned[name] = bases.stream_EE.mT @ weight_OI if writes else weight_OI @ bases.stream_EE
    return turned


def _undo_smoothing(
    ours: dict[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    config: DecoderConfig,
    *,
    smooths: bool,
    smooths_keys: bool,
) -> set[str]:
    """Give factors of rows back to what reads them, in place; the parts whose rows were divided."""
    divided: set[str] = set()
    q_rows, k_rows, v_rows = config.qkv_sizes
    groups = config.num_attention_heads // config.num_key_value_heads
    qkv_OI = ours["self_attn.qkv_proj"]
    gains_O = _row_gains(qkv_OI, theirs["self_attn.qkv_proj"])
    if smooths:
        heads_KD = gains_O[-v_rows:].unflatten(0, (-1, config.head_dim))
        ours["self_attn.o_proj"] = ours["self_attn.o_proj"] * heads_KD.repeat_interleave(groups, 0).flatten()
        divided.add("self_attn.v_proj")
        if "mlp.gate_up_proj" in ours:
            up_F = _row_gains(ours["mlp.gate_up_proj"], theirs["mlp.gate_up_proj"])[config.intermediate_size :]
            ours["mlp.down_proj"] = ours["mlp.down_proj"] * up_F
            divided.add("mlp.up_proj")
    if smooths_keys and config.qk_norm == "none":
        heads_KD = gains_O[q_rows : q_rows + k_rows].unflatten(0, (-1, config.head_dim))
        factor_q = heads_KD.repeat_interleave(groups, 0).flatten()
        ours["self_attn.qkv_proj"] = torch.cat((qkv_OI[:q_rows] * factor_q[:, None], qkv_OI[q_rows:]))
        divided.add("self_attn.k_proj")
    return divided


def _row_gains(ours_OI: torch.Tensor, theirs_OI: torch.Tensor) -> torch.Tensor:
    """<W', W> / <W, W> of every row; 1 where a row of the checkpoint is zero."""
    squares_O = theirs_OI.double().square().sum(1)
    products_O = (ours_OI.double() * theirs_OI.double()).sum(1)
    gains_O = products_O / squares_O.clamp_min(1e-300)
    return torch.where(squares_O > 0, gains_O, torch.ones_like(gains_O)).float()


def _part_places(name: str, config: DecoderConfig, rows: int) -> dict[str, slice]:
    """The rows of each part of a matrix, by the part's own name."""
    sizes = config.part_sizes(f"{name}.weight")
    if sizes is None:
        return {name: slice(0, rows)}
    stem, _, product = name.rpartition(".")
    parts = MERGED.get(product, (product,))
    places, start = {}, 0
    for i, size in enumerate(sizes):
        expert = f"{i // len(parts)}." if "experts" in name.split(".") else ""
        places[f"{stem}.{expert}{parts[i % len(parts)]}"] = slice(start, start + size)
        start += size
    return places


def _match_parts(
    ours_OI: torch.Tensor, theirs_OI: torch.Tensor, places: Mapping[str, slice], divided: set[str]
) -> list[PartMatch]:
    """Gain and least alignment of every part of one matrix."""
    found = []
    dots_O, ours_O, theirs_O = _row_products(ours_OI, theirs_OI)
    for part, place in places.items():
        dots, ours, theirs = dots_O[place], ours_O[place], theirs_O[place]
        gain = None if part in divided else float(dots.sum() / theirs.sum().clamp_min(1e-300))
        alignment = dots / (ours * theirs).sqrt().clamp_min(1e-300)
        small = theirs <= float(theirs.max()) * SMALLEST_ROW**2
        alignment = torch.where(small, torch.ones_like(alignment), alignment)
        row = int(alignment.argmin())
        least = float(alignment[row])
        twin = None
        if not least >= LEAST_ALIGNMENT:
            twin = _twin(ours_OI[place][row], theirs_OI[place])
        found.append(PartMatch(part, gain, least, row, twin))
    return found


def _row_products(ours_OI: torch.Tensor, theirs_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """<W', W>, <W', W'> and <W, W> of every row, float64 [O], a few thousand rows at a time."""
    parts = []
    for ours, theirs in zip(ours_OI.split(4096), theirs_OI.split(4096), strict=True):
        a, b = ours.double(), theirs.double()
        parts.append(((a * b).sum(1), a.square().sum(1), b.square().sum(1)))
    dots, ours_sq, theirs_sq = (torch.cat(column) for column in zip(*parts, strict=True))
    return dots, ours_sq, theirs_sq


def _twin(row_I: torch.Tensor, theirs_OI: torch.Tensor) -> int | None:
    """The row of the checkpoint that a stored row resembles; None where it resembles none."""
    norms_O = theirs_OI.norm(dim=1).clamp_min(1e-30) * row_I.norm().clamp_min(1e-30)
    alignment_O = theirs_OI @ row_I / norms_O
    best = int(alignment_O.argmax())
    return best if float(alignment_O[best]) >= LEAST_ALIGNMENT else None
