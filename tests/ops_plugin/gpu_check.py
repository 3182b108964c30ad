"""For a host with a GPU, run by hand: the library's kernels against the torch form of the op.

    python -m tests.ops_plugin.gpu_check LIBRARY

Every spec, type and device the library carries; a prompt on rows of different lengths, then tokens one at
a time, the last of them replayed from a CUDA graph captured before the rows grew. Prints the largest
errors and exits with 1 when one is too large.
"""

import argparse
import sys
from pathlib import Path

import torch

from toolchain.formats import FORMATS
from toolchain.ops.attention import AttentionSpec, attend_in_place
from toolchain.ops.plugin.entry import PluginLibrary

BATCH, PROMPT, CAPACITY, STEPS = 3, 37, 512, 4
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
"""Of the output, whose values are at most about 1: a few roundings of the compute type."""


def make_inputs(spec, dtype, device):
    """Random tables, caches, lengths and the node's optional inputs."""
    torch.manual_seed(0)
    angle = torch.rand(CAPACITY, spec.rotary_dim // 2, device=device) * 6
    stored = FORMATS[spec.cache_format].torch_dtype if spec.quantized else dtype
    shape = BATCH, spec.num_kv_heads, CAPACITY, spec.head_dim
    caches = [torch.full(shape, 3, device=device, dtype=torch.int8).to(stored) for _ in range(2)]
    lengths = torch.tensor([0, 100, CAPACITY - PROMPT - STEPS], device=device)
    more = {}
    if spec.quantized:
        scale = 4 / (FORMATS[spec.cache_format].qmax or 1)
        more["scales"] = tuple(torch.full((spec.num_kv_heads,), scale, device=device) for _ in range(2))
    if spec.qk_norm:
        more["norms"] = tuple(torch.rand(spec.head_dim, device=device, dtype=dtype) + 0.5 for _ in range(2))
    return [angle.cos(), angle.sin(), lengths], caches, more


def packed(spec, tokens, dtype, device):
    return torch.randn(BATCH, tokens, spec.packed_width, device=device).to(dtype)


def check_spec(attend, spec, name, device, *, graphs):
    """The largest error of the output, and of the caches in codes or in values."""
    dtype = getattr(torch, name)
    (cos, sin, lengths), caches, more = make_inputs(spec, dtype, device)
    expected_caches = [cache.clone() for cache in caches]
    names = {"scales_K": more.get("scales"), "norms_D": more.get("norms")}
    errors = []

    def compare(qkv, out):
        expected = attend_in_place(qkv, cos, sin, lengths, *expected_caches, spec, **names)
        errors.append((out.float() - expected.float()).abs().max().item())

    qkv = packed(spec, PROMPT, dtype, device)
    compare(qkv, attend(qkv, cos, sin, lengths, *caches, spec, **more))
    lengths += PROMPT
    token = packed(spec, 1, dtype, device)
    replay = None
    for _ in range(STEPS):
        token.copy_(packed(spec, 1, dtype, device))
        if replay:
            replay.replay()
        else:
            out = attend(token, cos, sin, lengths, *caches, spec, **more)
        compare(token, out)
        lengths += 1
        if graphs and replay is None:
            replay = torch.cuda.CUDAGraph()
            with torch.cuda.graph(replay):
                out = attend(token, cos, sin, lengths, *caches, spec, **more)
    kept = zip(caches, expected_caches, strict=True)
    return max(errors), max((a.float() - b.float()).abs().max().item() for a, b in kept)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    library = PluginLibrary(parser.parse_args().library)
    failed = False
    for carried in library.describe()["specs"]:
        spec = AttentionSpec(**carried)
        for name in library.describe()["compute_dtypes"]:
            error, cache_error = check_spec(library.attend, spec, name, "cuda", graphs=True)
            bad = not error <= TOLERANCE[name]
            failed = failed or bad
            print(f"{'FAIL' if bad else 'ok'}  {name}  output {error:.2e}  cache {cache_error:.2e}  {spec}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
