"""What an INT4 KV cache would cost: an experiment, not a format. Not a test.

    python tests/bench/kv_int4.py --export EXPORT [--blocks 12] [--samples 8] [--case NAME ...]

EXPORT is a float32 export with a tokenizer. K (after RoPE) and V are rounded where the torch decoder stores them and
read back as floats, in another basis where asked: rounding in a basis and going back is what folding that basis
into the weights, or turning q and k behind RoPE alike, would compute. Scales are float16, one for each group of
channels of a token and head, max|x| / qmax. Rise and KL as in `quantizer_accuracy`, against the float model.

    token-32       in groups of 32: 4.5 bits a value with the scale; -64: 4.25 bits
    +hadamard      K behind RoPE times a Hadamard matrix per head (QuaRot, arXiv 2404.00456, 4.2)
    +values        V in the basis of `rotation.values`
    +keys          K divided by the factors of `smoothing.keys`, from --samples blocks of calibration text
    asym           codes 0..15 with a zero point a group (KIVI, arXiv 2402.02750), one more half each: 5 bits at 32
    k8v4, k4v8     one of both in INT8 per token and head
    k8-static-p    K alone, INT8 with a static scale per head, its factors to the power p (`smoothing.keys`: 1)

Legend: B batch, T tokens, K KV heads, D head dim, G groups.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from quantizer_accuracy import log_probabilities, measure

from toolchain.artifact import open_artifact
from toolchain.model.load import load_artifact_decoder
from toolchain.ops import attention
from toolchain.quantize.keys import key_scale, partners
from toolchain.quantize.rotation import rotation_matrix
from toolchain.recipe import RECIPES_DIR
from toolchain.text import load_tokenizer, read_texts, token_blocks


@dataclass(frozen=True)
class Side:
    """How K or V is rounded: bits, channels of a group, symmetric or with a zero point, in which basis.

    `power`: of the factors that divide it; `static`: one scale per head, of the largest on the calibration text.
    """

    bits: int = 4
    group: int = 32
    symmetric: bool = True
    turned: bool = False
    power: float = 0.0
    static: bool = False


CASES: dict[str, tuple[Side, Side | None]] = {
    "int8-token": (Side(8, 64), Side(8, 64)),
    "token-64": (Side(group=64), Side(group=64)),
    "token-32": (Side(), Side()),
    "token-32+values": (Side(), Side(turned=True)),
    "token-32+hadamard+values": (Side(turned=True), Side(turned=True)),
    "token-32+keys+values": (Side(power=1), Side(turned=True)),
    "token-32+keys+hadamard+values": (Side(power=1, turned=True), Side(turned=True)),
    "token-64+keys+hadamard+values": (Side(4, 64, power=1, turned=True), Side(4, 64, turned=True)),
    "asym-32+keys+values": (Side(symmetric=False, power=1), Side(symmetric=False, turned=True)),
    "k8v4-32+values": (Side(8, 64), Side(turned=True)),
    "k4v8-32+keys": (Side(power=1), Side(8, 64)),
    **{f"k8-static-{p:g}": (Side(8, static=True, power=p), None) for p in (0, 0.5, 0.75, 1)},
}


def rounded(x_BTKD: torch.Tensor, side: Side) -> torch.Tensor:
    """The values that codes of x give back."""
    x_BTKGg = x_BTKD.unflatten(-1, (-1, min(side.group, x_BTKD.shape[-1])))
    if side.symmetric:
        qmax = 2 ** (side.bits - 1) - 1
        scale = _half(x_BTKGg.abs().amax(-1, keepdim=True) / qmax)
        return ((x_BTKGg / scale).round().clamp(-qmax - 1, qmax) * scale).flatten(-2)
    low = x_BTKGg.amin(-1, keepdim=True)
    scale = _half((x_BTKGg.amax(-1, keepdim=True) - low) / (2**side.bits - 1))
    low = low.half().float()
    return (((x_BTKGg - low) / scale).round().clamp(0, 2**side.bits - 1) * scale + low).flatten(-2)


def _half(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp_min(2.0**-24).half().float().clamp_min(2.0**-24)


def stored_by(rounding: Callable[[int, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A stand-in for what attention stores, called for K and V of each layer in turn: `rounding(call, x)` is kept."""
    calls, store = itertools.count(), PLAIN_STORE

    def stored(cache: torch.Tensor, x_BTKD: torch.Tensor, *rest: object) -> torch.Tensor:
        return store(cache, rounding(next(calls), x_BTKD), *rest)  # type: ignore[arg-type]

    return stored


PLAIN_STORE = attention._store


def key_reach(decoder, blocks) -> list[torch.Tensor]:
    """How far every channel of each layer's keys reaches [K, D] in the float model."""
    layers = decoder.config.num_hidden_layers
    reach: list[torch.Tensor | float] = [0.0] * layers

    def look(call: int, x_BTKD: torch.Tensor) -> torch.Tensor:
        if call % 2 == 0:
            i = call // 2 % layers
            reach[i] = torch.maximum(torch.as_tensor(reach[i]), x_BTKD.abs().amax((0, 1)))
        return x_BTKD

    attention._store = stored_by(look)  # type: ignore[assignment]
    for ids_T in blocks:
        log_probabilities(decoder, ids_T)
    return [torch.as_tensor(r) for r in reach]


def rounding_of(case: tuple[Side, Side | None], reach: list[torch.Tensor], config) -> Callable:
    """`stored_by`'s rounding for one case."""
    turn_DD = rotation_matrix(config.head_dim).float()

    def rounding(call: int, x_BTKD: torch.Tensor) -> torch.Tensor:
        side, scale_KD, layer = case[call % 2], torch.ones(()), call // 2 % len(reach)
        if side is None:
            return x_BTKD
        if side.power:
            scale_KD = key_scale(reach[layer] ** side.power, partners(config, layer), shared=False)
        x_BTKD = x_BTKD / scale_KD
        if side.static:
            step_K1 = (reach[layer] / scale_KD).amax(-1, keepdim=True) / 127
            return (x_BTKD / step_K1).round().clamp(-128, 127) * step_K1 * scale_KD
        if side.turned:
            return (rounded(x_BTKD @ turn_DD, side) @ turn_DD.mT) * scale_KD
        return rounded(x_BTKD, side) * scale_KD

    return rounding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    tokenizer, decoder = load_tokenizer(options.export), load_artifact_decoder(open_artifact(options.export))

    def text(name: str, count: int) -> torch.Tensor:
        texts = read_texts(RECIPES_DIR.parent / "calib_data" / name)
        return torch.from_numpy(token_blocks(texts, tokenizer, blocks=count, seq_len=512, seed=0))

    blocks = text("evaluation.jsonl", options.blocks)
    references = [log_probabilities(decoder, ids_T) for ids_T in blocks]
    reach = key_reach(decoder, text("calibration.jsonl", options.samples))
    for name in options.case or CASES:
        begin = time.perf_counter()
        attention._store = stored_by(rounding_of(CASES[name], reach, decoder.config))  # type: ignore[assignment]
        found = measure(decoder, blocks, references)
        print(json.dumps({"case": name, "seconds": round(time.perf_counter() - begin, 1)} | found), flush=True)


if __name__ == "__main__":
    main()
