"""`python quantizer_worker.py CASE MODEL WORK [SAMPLES]`: one quantizer of compare_quantizers.py, alone in a process.

Quantizes MODEL (a Hugging Face folder for a peer, an export for a case of ours) with WORK/calibration.npy, ours with
the first SAMPLES of it, then measures it on WORK/evaluation.npy against float32's WORK/references.npy. Prints one
line of JSON: {"version", "wall_s", "cpu_s", "peak_bytes", "nll", "kl"}, the seconds and the peak resident bytes those
of quantizing alone, without imports, without loading a peer's model and without measuring; nll and kl by block. Runs
in each side's environment.
"""

import contextlib
import importlib.metadata
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

MODELOPT = {
    "modelopt-int8-smoothquant": "INT8_SMOOTHQUANT_CFG",
    "modelopt-fp8": "FP8_DEFAULT_CFG",
    "modelopt-int4-awq": "INT4_AWQ_CFG",
}
LLMCOMPRESSOR = "llmcompressor-w8a8"


def main() -> None:
    case, model, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    calibration = torch.from_numpy(np.load(work / "calibration.npy"))
    with contextlib.redirect_stdout(sys.stderr):
        if case in MODELOPT:
            found, logits = modelopt(MODELOPT[case], model, calibration)
        elif case == LLMCOMPRESSOR:
            found, logits = llmcompressor(model, calibration)
        else:
            found, logits = ours(case, model, work, int(sys.argv[4]) if sys.argv[4:] else len(calibration))
        found |= losses(logits, work)
    print(json.dumps(found))


class Cost:
    """Seconds and peak resident bytes from construction to `read`."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, see proc(5)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self, package: str) -> dict[str, object]:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = int(status["VmHWM"].split()[0]) << 10
        version = importlib.metadata.version(package) if package else "here"
        return {"version": version, "wall_s": wall, "cpu_s": cpu, "peak_bytes": peak}


def float_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model):
    return lambda ids_T: model(input_ids=ids_T[None], use_cache=False).logits[0]


def modelopt(config: str, folder: Path, calibration):
    import modelopt.torch.quantization as mtq

    model = float_model(folder)

    def forward_loop(model) -> None:
        with torch.no_grad():
            for ids_T in calibration:
                model(input_ids=ids_T[None], use_cache=False)

    cost = Cost()
    model = mtq.quantize(model, getattr(mtq, config), forward_loop)
    return cost.read("nvidia-modelopt"), logits_of(model)


def llmcompressor(folder: Path, calibration):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    model = float_model(folder)
    samples = calibration.tolist()
    text = Dataset.from_dict({"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]})
    recipe = [
        SmoothQuantModifier(smoothing_strength=0.8),
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    ]
    cost = Cost()
    oneshot(
        model=model,
        dataset=text,
        recipe=recipe,
        max_seq_length=calibration.shape[1],
        num_calibration_samples=len(samples),
        shuffle_calibration_samples=False,
    )
    return cost.read("llmcompressor"), logits_of(model.eval())


def ours(case: str, export: Path, work: Path, samples: int):
    from quantizer_accuracy import CASES

    from toolchain.artifact import open_artifact
    from toolchain.model.load import load_artifact_decoder
    from toolchain.quantize import qdq, stream  # noqa: F401 - before the clock starts, as the peers' modules are
    from toolchain.quantize.stage import quantize_artifact
    from toolchain.recipe import parse_recipe

    sections = CASES[case] | {"calibration": CASES[case].get("calibration", {}) | {"samples": samples}}
    recipe = parse_recipe({"schema_version": 1, "about": case} | sections, case)
    out = work / "quantized"
    shutil.rmtree(out, ignore_errors=True)
    cost = Cost()
    quantize_artifact(export, recipe, out, report=lambda _: None)
    found = cost.read("")
    decoder = load_artifact_decoder(open_artifact(out, check_hashes=False))
    shutil.rmtree(out)

    def logits(ids_T):
        return decoder(ids_T[None], torch.zeros(1, dtype=torch.int64), decoder.new_caches(1, len(ids_T)))[0]

    return found, logits


@torch.inference_mode()
def losses(logits, work: Path) -> dict[str, list[float]]:
    """Mean NLL of the next token, and mean KL to float32, of each block."""
    blocks = torch.from_numpy(np.load(work / "evaluation.npy"))
    references = np.load(work / "references.npy", mmap_mode="r")
    losses, distances = [], []
    for ids_T, kept in zip(blocks, references, strict=True):
        reference = torch.from_numpy(np.array(kept))
        found = torch.log_softmax(logits(ids_T)[:-1].float(), -1)
        losses.append(-float(found.gather(1, ids_T[1:, None]).mean()))
        distances.append(float((reference.exp() * (reference - found)).sum(-1).mean()))
    return {"nll": losses, "kl": distances}


if __name__ == "__main__":
    main()
