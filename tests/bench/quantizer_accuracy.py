"""What each way of quantizing costs on held-out text, and in time and memory. Not a test.

    python tests/bench/quantizer_accuracy.py --export EXPORT --work DIR [--blocks 22] [--case NAME ...] [--grid-free]

EXPORT is a float32 export with a tokenizer. Rise: mean next-token NLL (nats) minus float32's, paired per
block of 512 tokens; +- is its standard error. Weights are those of all layers, head and embedding in float
(but for `int8-head-gptq`), as peers are measured. `--grid-free` first rescales the channels between neighbouring
layers by exp(U(-0.2, 0.2)), which changes no logit and takes weights that were stored in 4 bits off their grid.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from toolchain.artifact import open_artifact
from toolchain.bench.memory import own_memory
from toolchain.model.config import DecoderConfig
from toolchain.model.load import load_artifact_decoder
from toolchain.quantize.smoothing import fold, sites
from toolchain.quantize.stage import quantize_artifact
from toolchain.recipe import RECIPES_DIR, parse_recipe
from toolchain.text import load_tokenizer, read_texts, token_blocks

INT8, PER_TOKEN, STATIC = {"format": "int8"}, {"format": "int8"}, {"format": "int8", "granularity": "tensor"}
FP8, FP8_STATIC = {"format": "fp8_e4m3"}, {"format": "fp8_e4m3", "granularity": "tensor"}
GPTQ = {"algorithm": "gptq", "clip": "search"}


def smooth(alpha, algorithm="smoothquant"):
    return {"smoothing": {"algorithm": algorithm, "alpha": alpha}}


KV_INT8, KV_FP8 = {"format": "int8"}, {"format": "fp8_e4m3"}
VALUES, KEYS = {"rotation": {"values": True}}, {"smoothing": {"keys": True}}
ROTATED = {"rotation": {"stream": True, "values": True, "feed_forward": True}}
CENTERED = {"center": True}
EXCESS = STATIC | {"excess_channels": 8}
INT4 = {"format": "int4", "group_size": 128} | GPTQ | {"refinements": 4}
SEQUENTIAL = {"calibration": {"inputs": "quantized"}}

CASES = {
    "int8-rtn": {"weights": INT8},
    "int8-gptq": {"weights": INT8 | GPTQ},
    "int8-head-gptq": {"weights": INT8 | GPTQ | {"skip": []}},
    "token-rtn": {"weights": INT8, "activations": PER_TOKEN},
    "token-smooth": {"weights": INT8, "activations": PER_TOKEN} | smooth(0.5),
    "token-smooth-searched": {"weights": INT8, "activations": PER_TOKEN} | smooth("search"),
    "token-rotated": {"weights": INT8, "activations": PER_TOKEN} | ROTATED,
    "token-rotated-gptq": {"weights": INT8 | GPTQ, "activations": PER_TOKEN} | ROTATED,
    "static-smooth-0.85": {"weights": INT8, "activations": STATIC} | smooth(0.85),
    "static-smooth-searched": {"weights": INT8, "activations": STATIC} | smooth("search"),
    "static-rotated": {"weights": INT8, "activations": EXCESS} | ROTATED,
    "token-centered-gptq": {"weights": INT8 | GPTQ, "activations": PER_TOKEN | CENTERED} | ROTATED,
    "static-centered-gptq": {"weights": INT8 | GPTQ, "activations": EXCESS | CENTERED} | ROTATED,
    "static-rotated-gptq": {"weights": INT8 | GPTQ, "activations": EXCESS} | ROTATED,
    "fp8-static": {"weights": FP8, "activations": FP8_STATIC},
    "fp8-static-gptq": {"weights": FP8 | GPTQ, "activations": FP8_STATIC},
    "fp8-static-centered": {"weights": FP8, "activations": FP8_STATIC | CENTERED},
    "fp8-static-centered-gptq": {"weights": FP8 | GPTQ, "activations": FP8_STATIC | CENTERED},
    "fp8-gptq": {"weights": FP8 | GPTQ},
    "fp8-static-sequential-gptq": {"weights": FP8 | GPTQ, "activations": FP8_STATIC | CENTERED} | SEQUENTIAL,
    "fp8-static-excess-gptq": {"weights": FP8 | GPTQ, "activations": FP8_STATIC | {"excess_channels": 8}},
    "int4-rtn": {"weights": {"format": "int4"}},
    "int4-gptq": {"weights": INT4},
    "int4-awq-gptq": {"weights": INT4} | smooth(0.5, "awq"),
    "int4-rotated-gptq": {"weights": INT4} | ROTATED | SEQUENTIAL,
    "int4-64-rotated-gptq": {"weights": INT4 | {"group_size": 64}} | ROTATED | SEQUENTIAL,
    "int4-32-centered-gptq": {"weights": INT4 | {"group_size": 32}, "activations": CENTERED} | ROTATED | SEQUENTIAL,
    "int4-centered-gptq": {"weights": INT4, "activations": CENTERED} | ROTATED | SEQUENTIAL,
    "int4-64-centered-gptq": {"weights": INT4 | {"group_size": 64}, "activations": CENTERED} | ROTATED | SEQUENTIAL,
    "kv-head": {"kv_cache": {"format": "int8"}},
    "kv-head-rotated": {"kv_cache": {"format": "int8"}, "rotation": {"values": True}},
    "kv-token": {"kv_cache": {"format": "int8", "granularity": "token"}},
    "kv-head-mse": {"kv_cache": KV_INT8 | {"scale": "mse"}},
    "kv-head-percentile": {"kv_cache": KV_INT8 | {"scale": "percentile"}},
    "kv-head-keys": {"kv_cache": KV_INT8} | KEYS,
    "kv-head-keys-rotated": {"kv_cache": KV_INT8} | KEYS | VALUES,
    "kv-head-keys-rotated-mse": {"kv_cache": KV_INT8 | {"scale": "mse"}} | KEYS | VALUES,
    "kv-token-keys": {"kv_cache": KV_INT8 | {"granularity": "token"}} | KEYS,
    "kv-token-keys-rotated": {"kv_cache": KV_INT8 | {"granularity": "token"}} | KEYS | VALUES,
    "kv-fp8": {"kv_cache": KV_FP8},
    "kv-fp8-rotated": {"kv_cache": KV_FP8} | VALUES,
    "kv-fp8-mse": {"kv_cache": KV_FP8 | {"scale": "mse"}},
    "kv-fp8-keys": {"kv_cache": KV_FP8} | KEYS,
    "kv-fp8-keys-mse": {"kv_cache": KV_FP8 | {"scale": "mse"}} | KEYS,
    "all-int8": {"weights": INT8 | GPTQ, "activations": PER_TOKEN, "kv_cache": {"format": "int8"}} | ROTATED,
    "all-int8-token": {
        "weights": INT8 | GPTQ,
        "activations": PER_TOKEN,
        "kv_cache": {"format": "int8", "granularity": "token"},
    }
    | ROTATED,
}


@torch.inference_mode()
def log_probabilities(decoder, ids_T):
    """float32 [T - 1, V]: of each next token."""
    caches = decoder.new_caches(1, len(ids_T))
    logits = decoder(ids_T[None], torch.zeros(1, dtype=torch.int64), caches)
    return torch.log_softmax(logits[0, :-1], -1)


def measure(decoder, blocks, references):
    """Rise of the NLL with its standard error, and KL, over blocks."""
    rises, distances = [], []
    for ids_T, reference in zip(blocks, references, strict=True):
        found = log_probabilities(decoder, ids_T)
        tokens = ids_T[1:, None]
        rises.append(float((reference.gather(1, tokens) - found.gather(1, tokens)).mean()))
        distances.append(float((reference.exp() * (reference - found)).sum(-1).mean()))
    return {
        "rise": float(np.mean(rises)),
        "rise_error": float(np.std(rises) / math.sqrt(len(rises))),
        "kl": float(np.mean(distances)),
    }


def take_off_the_grid(export, out):
    """A copy of the export whose neighbouring layers are rescaled channel by channel: the same function."""
    from toolchain.tensor_file import build_header, read_header, tensor_bytes, write_stream

    shutil.copytree(export, out)
    config = DecoderConfig.model_validate(json.loads((out / "decoder.json").read_text()))
    decoder = load_artifact_decoder(open_artifact(export))
    random = torch.Generator().manual_seed(0)
    for i, block in enumerate(decoder.model.layers):
        for site in sites(config, i):
            width = block.get_submodule(site.readers[0]).weight.shape[1]
            if site.maker.endswith("qkv_proj"):
                kv = config.num_key_value_heads
                scale = torch.rand(kv, 1, config.head_dim, generator=random).expand(
                    -1, width // kv // config.head_dim, -1
                )
            else:
                scale = torch.rand(width, generator=random)
            fold(block, site, ((scale.reshape(-1) * 0.4) - 0.2).exp(), config)
    named = dict(decoder.named_parameters())
    entries = read_header(out / "weights.safetensors")
    header, _ = build_header({n: (e.dtype, e.shape) for n, e in entries.items()})
    write_stream(out / "weights.safetensors", header, (tensor_bytes(named[n]) for n in entries))
    manifest = json.loads((out / "manifest.json").read_text())
    from toolchain.artifact import hash_file

    manifest["files"]["weights.safetensors"]["sha256"] = hash_file(out / "weights.safetensors")
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--set", action="append", default=[], help="calibration.KEY=VALUE")
    parser.add_argument("--grid-free", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    export = options.export
    if options.grid_free:
        export = options.work / "grid-free"
        if not export.exists():
            take_off_the_grid(options.export, export)
    artifact = open_artifact(export)
    texts = read_texts(RECIPES_DIR.parent / "calib_data" / "evaluation.jsonl")
    ids = token_blocks(texts, load_tokenizer(export), blocks=options.blocks, seq_len=512, seed=0)
    blocks = torch.from_numpy(ids)
    decoder = load_artifact_decoder(artifact)
    references = [log_probabilities(decoder, ids_T) for ids_T in blocks]
    del decoder
    calibration = dict(item.split("=") for item in options.set)
    for name in options.case or CASES:
        text = CASES[name].get("calibration", {}) | {k: int(v) for k, v in calibration.items()}
        sections = CASES[name] | {"calibration": text}
        recipe = parse_recipe({"schema_version": 1, "about": name} | sections, name)
        out = options.work / name
        shutil.rmtree(out, ignore_errors=True)
        begin = time.perf_counter()
        quantize_artifact(export, recipe, out, report=lambda _: None)
        seconds = time.perf_counter() - begin
        decoder = load_artifact_decoder(open_artifact(out, check_hashes=False))
        found = measure(decoder, blocks, references)
        shutil.rmtree(out)
        print(
            json.dumps({"case": name, "seconds": round(seconds, 1)} | found | {"peak": own_memory().peak_bytes}),
            flush=True,
        )


if __name__ == "__main__":
    main()
