"""Our quantizers against ModelOpt and llm-compressor: one model, one text, one run, in turns. Not a test.

    python tests/bench/compare_quantizers.py --export EXPORT --model HF_FOLDER --work DIR
        [--modelopt-python PATH] [--llmcompressor-python PATH] [--case PEER=OURS,... ...] [--rounds N] [--our-samples N]

EXPORT is HF_FOLDER's float32 export. The peers' interpreters are those of environments of their own (in one
`pip install torch==2.13.0 transformers requests nvidia-modelopt`, in the other `torch==2.13.0 llmcompressor`); a peer
without one is left out. Every run is a process of its own, all are calibrated on the same ids and measured on the same
held-out blocks; the sides take turns, and medians of the rounds' seconds are compared. Rise: mean NLL (nats) minus
float32's, paired by block; +- is its standard error. Exit 1: a bar on time or memory was missed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from quantizer_accuracy import CASES, log_probabilities
from quantizer_worker import LLMCOMPRESSOR, MODELOPT

from toolchain.artifact import open_artifact
from toolchain.model.load import load_artifact_decoder
from toolchain.recipe import RECIPES_DIR
from toolchain.report import Page, Table, render_text
from toolchain.text import load_tokenizer, read_texts, token_blocks

WORKER = Path(__file__).with_name("quantizer_worker.py")
PAIRS = {
    "modelopt-int8-smoothquant": ("static-rotated-gptq", "static-smooth-0.85"),
    "modelopt-fp8": ("fp8-static-sequential-gptq", "fp8-static"),
    LLMCOMPRESSOR: ("token-rotated-gptq",),
}
PEAK_BAR = 1.7 * (1 << 30)


def main() -> int:
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    losses = prepare(options)
    pairs = {peer: cases for peer, cases in options.pairs.items() if options.pythons[peer]}
    runs: dict[tuple[str, str], list[dict]] = {}
    for _ in range(options.rounds):
        for peer, cases in pairs.items():
            for case in (peer, *cases):
                found = run(options, case)
                runs.setdefault((peer, case), []).append(found)
                costs = {key: value for key, value in found.items() if key not in ("nll", "kl")}
                print(json.dumps({"case": case} | costs), flush=True)
    rows = [summary(peer, case, runs, losses) for peer, case in runs]
    title = f"Quantizers on {options.model.name}"
    print(render_text(Page(title, parts=(cost_table(rows, options), loss_table(rows, options)))))
    print(json.dumps({"rows": rows, "load_average": os.getloadavg()[0]}))
    (options.work / "references.npy").unlink()
    return int(not all(row["bars_held"] for row in rows))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--modelopt-python")
    parser.add_argument("--llmcompressor-python")
    parser.add_argument("--case", action="append", help="PEER=OURS,...: " + ", ".join([*MODELOPT, LLMCOMPRESSOR]))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=12, help="held-out blocks")
    parser.add_argument("--samples", type=int, default=16, help="of calibration, of 512 tokens each")
    parser.add_argument("--our-samples", type=int, help="of them ours takes so many, the first; by default all")
    options = parser.parse_args()
    options.pairs = PAIRS
    if options.case:
        named = (item.split("=") for item in options.case)
        options.pairs = {peer: tuple(cases.split(",")) for peer, cases in named}
    options.pythons = dict.fromkeys(MODELOPT, options.modelopt_python) | {LLMCOMPRESSOR: options.llmcompressor_python}
    unknown = {*options.pairs} - {*options.pythons} | {c for cases in options.pairs.values() for c in cases} - {*CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return options


def prepare(options: argparse.Namespace) -> list[float]:
    """Calibration and evaluation ids and float32's log probabilities, as files; float32's NLL by block."""
    tokenizer = load_tokenizer(options.export)
    for name, blocks in (("calibration", options.samples), ("evaluation", options.blocks)):
        texts = read_texts(RECIPES_DIR.parent / "calib_data" / f"{name}.jsonl")
        np.save(options.work / f"{name}.npy", token_blocks(texts, tokenizer, blocks=blocks, seq_len=512, seed=0))
    ids = torch.from_numpy(np.load(options.work / "evaluation.npy"))
    decoder = load_artifact_decoder(open_artifact(options.export))
    shape = (len(ids), ids.shape[1] - 1, decoder.config.vocab_size)
    kept = np.lib.format.open_memmap(options.work / "references.npy", mode="w+", dtype=np.float32, shape=shape)
    losses = []
    for i, ids_T in enumerate(ids):
        reference = log_probabilities(decoder, ids_T)
        kept[i] = reference.numpy()
        losses.append(-float(reference.gather(1, ids_T[1:, None]).mean()))
    kept.flush()
    return losses


def run(options: argparse.Namespace, case: str) -> dict:
    """What the worker says of one case."""
    python = options.pythons.get(case, sys.executable)
    model = options.model if case in options.pythons else options.export
    command = [python, str(WORKER), case, str(model.resolve()), str(options.work.resolve())]
    if case not in options.pythons and options.our_samples:
        command.append(str(options.our_samples))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=options.work)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(peer: str, case: str, runs: dict, losses: list[float]) -> dict:
    """Numbers of a case, beside its peer's; bars: the peer's time, half of it where nothing is searched, and memory."""
    found, other = runs[peer, case], runs[peer, peer]
    row = {"peer": peer, "case": case, "version": found[0]["version"], "kl": float(np.mean(found[0]["kl"]))}
    row["rise"], row["rise_error"] = paired(found[0]["nll"], losses)
    row["difference"], row["difference_error"] = paired(found[0]["nll"], other[0]["nll"])
    for key in ("wall_s", "cpu_s"):
        row[key] = statistics.median(r[key] for r in found)
        row[key + "_ratio"] = row[key] / statistics.median(r[key] for r in other)
    row["peak_bytes"] = max(r["peak_bytes"] for r in found)
    row["bars_held"] = True
    if case != peer:
        row["time_bar"] = 1.0 if CASES[case]["weights"].get("algorithm") == "gptq" else 0.5
        row["bars_held"] = row["wall_s_ratio"] <= row["time_bar"] and row["peak_bytes"] <= PEAK_BAR
    return row


def paired(losses: list[float], references: list[float]) -> tuple[float, float]:
    """Mean difference of blocks, and its standard error."""
    differences = np.subtract(losses, references)
    return float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences)))


def loss_table(rows: list[dict], options: argparse.Namespace) -> Table:
    columns = ("case", "rise (nats)", "+-", "KL (nats)", "rise over the peer's", "+-")
    keys = ("rise", "rise_error", "kl", "difference", "difference_error")
    lines = tuple((row["case"], *(f"{row[key]:.4f}" for key in keys)) for row in rows)
    ours = f", of which ours took {options.our_samples}" if options.our_samples else ""
    note = f"{options.blocks} held-out blocks of 512 tokens, {options.samples} of calibration{ours}"
    return Table("What it loses", columns, lines, note)


def cost_table(rows: list[dict], options: argparse.Namespace) -> Table:
    columns = ("case", "version", "wall s", "CPU s", "peak MiB", "wall / peer", "CPU / peer", "bar", "held")
    lines = tuple(
        (r["case"], r["version"], f"{r['wall_s']:.1f}", f"{r['cpu_s']:.1f}", f"{r['peak_bytes'] / (1 << 20):.0f}",
         f"{r['wall_s_ratio']:.2f}", f"{r['cpu_s_ratio']:.2f}", r.get("time_bar", ""),
         "" if r["case"] == r["peer"] else "yes" if r["bars_held"] else "NO")
        for r in rows
    )  # fmt: skip
    note = (
        f"quantizing alone, {torch.get_num_threads()} threads, medians of {options.rounds} runs in turns; the bar on "
        f"memory is {PEAK_BAR / (1 << 20):.0f} MiB; load average of the last minute {os.getloadavg()[0]:.1f}"
    )
    return Table("What it costs", columns, lines, note)


if __name__ == "__main__":
    sys.exit(main())
