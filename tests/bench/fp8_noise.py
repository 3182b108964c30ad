"""Why FP8 activations lose what they lose, and what each remedy could take off it. Not a test.

    python tests/bench/fp8_noise.py --export EXPORT [--blocks 12] [--samples 8]

E4M3 errs by a share of each value, so a product y = W x with x rounded gets the noise r^2 sum_j |w_j|^2 E[x_j^2], r the
mean relative error. Per kind of product, that noise relative to E|y|^2 (in units of r^2), mean of the layers:

    as it is    sum_j a_jj b_jj / tr(A B)                  A = E[x x^T], B = W^T W
    centered    the same with the covariance of x for A    (`activations.center`)
    rotated     tr(A) tr(B) / I / tr(A B)                  any basis in which all channels are alike
    refitted    the least that any other weights V leave of E|W x - V (x + noise)|^2, centered
    best basis  (sum of the singular values of A^1/2 W^T)^2 / I / tr(A B)   the least of all invertible bases, for each
                product a dense one of its own, which no folding gives

and what rounding the inputs of that kind alone costs, weights in float32, as they are and centered.
The first token, which holds the massive activations, takes no part in A.
"""

import argparse
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from tests.bench.quantizer_accuracy import log_probabilities, measure
from toolchain.artifact import open_artifact
from toolchain.model.load import load_artifact_decoder
from toolchain.numerics import dequantize, quantize, scale_from_amax
from toolchain.quantize.seen import nothing_seen
from toolchain.recipe import RECIPES_DIR
from toolchain.text import load_tokenizer, read_texts, token_blocks

KINDS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
FORMAT = "fp8_e4m3"
SHARE = 0.75 / (2 * math.log(2)) / (12 * 64)
"""r^2 of E4M3: steps of 1/8 of a power of two, (1/8)^2 / 12 / m^2 over mantissas 1 <= m < 2, their logarithm even."""


def observe(modules, decoder, texts):
    """What every product sees of the texts, the first token apart, and how far it reaches with it."""
    seen = {name: nothing_seen(module.weight.shape[1], hessian=True, center=True) for name, module in modules.items()}
    reach = {name: nothing_seen(module.weight.shape[1], center=True) for name, module in modules.items()}

    def watch(name):
        return lambda _, inputs: (seen[name].add(inputs[0][:, 1:]), reach[name].add(inputs[0]))[0]

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    for ids_T in texts:
        log_probabilities(decoder, ids_T)
    for handle in handles:
        handle.remove()
    return seen, reach


def noise(weight_OI, seen):
    """The five numbers of the table."""
    moments_II, mean_I = (seen.hessian / seen.tokens).double(), (seen.signed / seen.tokens).double()
    weights_II = weight_OI.double().mT @ weight_OI.double()
    signal, size_I, gain_I = (moments_II * weights_II).sum(), moments_II.diagonal(), weights_II.diagonal()
    values, vectors = torch.linalg.eigh(moments_II)
    root_II = vectors * values.clamp_min(0).sqrt()
    singular = torch.linalg.eigvalsh(root_II.mT @ weights_II @ root_II).clamp_min(0).sqrt()
    width, spread_II = len(size_I), moments_II - mean_I[:, None] * mean_I
    noisy_II = spread_II + torch.diag(SHARE * spread_II.diagonal())
    kept_II = spread_II @ torch.linalg.solve(noisy_II, spread_II)  # what the best V x says of W x
    return [
        float(power / signal)
        for power in (
            (size_I * gain_I).sum(),
            (spread_II.diagonal() * gain_I).sum(),
            ((spread_II - kept_II) * weights_II).sum() / SHARE,
            size_I.sum() * gain_I.sum() / width,
            singular.sum().square() / width,
        )
    ]


def round_inputs(modules, reach, kind, *, centered):
    """Round the inputs of one kind of product from now on; what undoes it."""

    def rounded(seen):
        center_I = seen.center if centered else torch.zeros_like(seen.high)
        scale = scale_from_amax(seen.reach(center_I).max(), FORMAT)
        return lambda _, inputs: dequantize(quantize(inputs[0] - center_I, scale, FORMAT), scale) + center_I

    chosen = {name: module for name, module in modules.items() if name.endswith(kind)}
    return [module.register_forward_pre_hook(rounded(reach[name])) for name, module in chosen.items()]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    tokenizer, folder = load_tokenizer(options.export), RECIPES_DIR.parent / "calib_data"
    texts, blocks = (
        torch.from_numpy(token_blocks(read_texts(folder / file), tokenizer, blocks=count, seq_len=512, seed=0))
        for file, count in (("calibration.jsonl", options.samples), ("evaluation.jsonl", options.blocks))
    )
    decoder = load_artifact_decoder(open_artifact(options.export))
    modules = {name: module for name, module in decoder.named_modules() if name.endswith(KINDS)}
    seen, reach = observe(modules, decoder, texts)
    found = defaultdict(list)
    for name, module in modules.items():
        found[name.split(".", 3)[3]].append(noise(module.weight, seen[name]))
    references = [log_probabilities(decoder, ids_T) for ids_T in blocks]
    columns = "".join(f"{name:>12s}" for name in ("as it is", "centered", "refitted", "rotated", "best basis"))
    print(f"{'inputs of':22s}{columns}   KL, KL centered")
    for kind in (*KINDS, ""):
        costs = []
        for centered in (False, True):
            handles = round_inputs(modules, reach, kind, centered=centered)
            costs.append(measure(decoder, blocks, references)["kl"])
            for handle in handles:
                handle.remove()
        numbers = "".join(f"{x:12.3f}" for x in np.mean(found[kind], 0)) if kind else " " * 60
        print(f"{kind or 'all':22s}{numbers}   {costs[0]:.4f}, {costs[1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
