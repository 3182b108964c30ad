"""Our exports and engines against onnxruntime-genai, interleaved on this machine. Not a test.

    python tests/bench/compare_genai.py --work DIR --model HF_FOLDER [--ours ENGINE_FOLDER]

1. Export: cold CPU seconds and peak memory of genai's builder (fp32, int8) and of `dtool export`, in turns.
2. With --ours: prefill and decode at one context, genai's int8 model and our artifact, each in a process
   of its own that stays alive; short bursts in turns, so that the machine's load and clocks hit both.

The peer gets an environment of its own under DIR, with the versions of torch, transformers and
onnxruntime that are installed here. Medians are compared; the JSON keeps p10 and p90 and all ratios.
"""

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np

from toolchain.bench.export_cost import folder_bytes, run_cold
from toolchain.report import Page, Table, render_text

PEER = "onnxruntime-genai"
SAME_VERSION = ("numpy", "onnx", "onnx-ir", "onnxruntime", "safetensors", "torch", "transformers")
WORKER = Path(__file__).with_name("decode_worker.py")
SETTLE_S = 0.05


def main() -> None:
    options = parse_options()
    os.environ["HF_HUB_OFFLINE"] = "1"
    options.work.mkdir(parents=True, exist_ok=True)
    python = peer_python(options.work, options.peer_version)
    document = {"peer": f"{PEER} {options.peer_version}", "model": options.model.name, "threads": options.threads}
    parts = []
    if options.export_repeats:
        document["export"] = compare_export(options, python)
        parts.append(export_table(document["export"]))
    if options.ours:
        document["speed"] = compare_speed(options, python)
        parts.append(speed_table(document["speed"], options))
    document["load_average"] = os.getloadavg()[0]
    print(render_text(Page(f"dtool against {document['peer']}, {options.model.name}", parts=tuple(parts))))
    print(json.dumps(document, sort_keys=True))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the peer's environment and models")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--ours", type=Path, help="our artifact (an engine) for the speed part")
    parser.add_argument("--recipe", default="fp32", help="recipe of our export")
    parser.add_argument("--dtool", default=f"{sys.executable} -m toolchain.cli", help="our command line")
    parser.add_argument("--peer-version", default="0.18.0")
    parser.add_argument("--peer-precision", default="int8", help="the peer's model of the speed part")
    parser.add_argument("--export-repeats", type=int, default=3, help="0 leaves the export part out")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--burst", type=int, default=16, help="decode steps of one burst")
    parser.add_argument("--rounds", type=int, default=20, help="bursts of each side")
    parser.add_argument("--prefills", type=int, default=5, help="prefills of each side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    return parser.parse_args()


def peer_python(work: Path, version: str) -> str:
    """The interpreter of the peer's environment, made on first use."""
    folder = work / "venv"
    python = folder / "bin" / "python"
    probe = [str(python), "-c", "import onnxruntime_genai, torch, transformers"]
    if python.exists() and subprocess.run(probe, check=False, capture_output=True).returncode == 0:
        return str(python)
    venv.create(folder, with_pip=True, clear=True)
    same = [f"{name}=={importlib.metadata.version(name)}" for name in SAME_VERSION]
    install = [str(python), "-m", "pip", "install", "-q", "--prefer-binary", f"{PEER}=={version}", "tqdm", *same]
    subprocess.run(install, check=True)
    return str(python)


def build_command(python: str, options: argparse.Namespace, precision: str, out: Path) -> list[str]:
    """genai's builder, as its manual gives it."""
    cache = str(options.work / "cache")
    builder = [python, "-m", "onnxruntime_genai.models.builder"]
    return [*builder, "-i", str(options.model), "-o", str(out), "-p", precision, "-e", "cpu", "-c", cache]


def compare_export(options: argparse.Namespace, python: str) -> dict[str, dict[str, object]]:
    """Medians per tool; the tools take turns, each time from nothing."""
    out = options.work / "export-out"
    ours = [*shlex.split(options.dtool), "export", str(options.model), "-r", options.recipe, "-o", str(out)]
    commands = {
        f"dtool {options.recipe}": ours,
        "genai fp32": build_command(python, options, "fp32", out),
        "genai int8": build_command(python, options, "int8", out),
    }
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in commands}
    for _ in range(options.export_repeats):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            cost = run_cold(command)
            if cost["exit"] != 0:
                sys.exit(f"{name} failed (exit {cost['exit']}):\n{cost['output_tail']}")
            runs[name].append(cost | {"bytes_written": folder_bytes(out)[0]})
    shutil.rmtree(out, ignore_errors=True)
    keys = ("cpu_s", "wall_s", "peak_rss_bytes", "bytes_written")
    medians = {name: {k: statistics.median(r[k] for r in found) for k in keys} for name, found in runs.items()}
    for name, found in runs.items():
        medians[name]["cpu_s_samples"] = [round(r["cpu_s"], 2) for r in found]
    return medians


def export_table(export: dict[str, dict[str, object]]) -> Table:
    ours = next(iter(export.values()))
    rows = tuple(
        (name, r["cpu_s"], r["wall_s"], r["peak_rss_bytes"] / 1e6, r["bytes_written"] / 1e6, r["cpu_s"] / ours["cpu_s"])
        for name, r in export.items()
    )
    columns = ("tool", "CPU s", "wall s", "peak MB", "written MB", "CPU s / ours")
    return Table("Export, cold", columns, rows, f"medians of {len(ours['cpu_s_samples'])} runs in turns")


class Worker:
    """A side of the speed part, alive in its own process."""

    def __init__(self, python: str, side: str, folder: Path, options: argparse.Namespace) -> None:
        numbers = (options.threads, options.context, options.burst)
        command = [python, str(WORKER), side, str(folder), *map(str, numbers)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello = self.read()

    def read(self) -> dict[str, object]:
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"{self.process.args[2]} worker ended with exit {self.process.wait()}")

    def ask(self, request: str) -> dict[str, object]:
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def compare_speed(options: argparse.Namespace, python: str) -> dict[str, dict[str, object]]:
    """Per side: prefill and decode-step milliseconds, tokens per second, peak memory; bursts in turns."""
    peer = options.work / f"peer-{options.model.name}-{options.peer_precision}"
    if not (peer / "genai_config.json").is_file():
        subprocess.run(build_command(python, options, options.peer_precision, peer), check=True, capture_output=True)
    workers = {
        "ours": Worker(sys.executable, "dtool", options.ours, options),
        "peer": Worker(python, "genai", peer, options),
    }
    prefills: dict[str, list[float]] = {name: [] for name in workers}
    bursts: dict[str, list[dict[str, object]]] = {name: [] for name in workers}
    for round_number in range(options.rounds + 1):
        for name, worker in workers.items():
            time.sleep(SETTLE_S)  # the other side's threads spin for a while after their work
            burst = worker.ask("decode")
            if round_number:  # the first round warms up
                bursts[name].append(burst)
    for _ in range(options.prefills):
        for name, worker in workers.items():
            time.sleep(SETTLE_S)
            prefills[name].append(worker.ask("prefill")["s"])
    sides = {
        name: side_numbers(worker, prefills[name], bursts[name], options.context) for name, worker in workers.items()
    }
    for worker in workers.values():
        worker.close()
    pairs = zip(bursts["ours"], bursts["peer"], strict=True)
    ratios = [statistics.median(b["steps_s"]) / statistics.median(a["steps_s"]) for a, b in pairs]
    decode, prefill = ("decode_tokens_per_s", "prefill_tokens_per_s")
    return sides | {
        "ratio": {
            decode: sides["ours"][decode] / sides["peer"][decode],
            prefill: sides["ours"][prefill] / sides["peer"][prefill],
            "decode_per_round_p10_p50_p90": [float(q) for q in np.percentile(ratios, (10, 50, 90))],
        }
    }


def side_numbers(
    worker: Worker, prefills: list[float], bursts: list[dict[str, object]], context: int
) -> dict[str, object]:
    steps = [s for burst in bursts for s in burst["steps_s"]]
    # The burst also sets its context anew, which takes one run of the model on either side.
    cpu_ms = statistics.median(b["cpu_s"] / (len(b["steps_s"]) + 1) for b in bursts) * 1e3
    p10, p50, p90 = (float(q) * 1e3 for q in np.percentile(steps, (10, 50, 90)))
    prefill_ms = statistics.median(prefills) * 1e3 if prefills else float("nan")
    return {
        "load_s": worker.hello["load_s"],
        "peak_bytes": worker.ask("memory")["peak_bytes"],
        "step_ms": {"p10": p10, "p50": p50, "p90": p90, "samples": len(steps)},
        "cpu_ms_per_step": cpu_ms,
        "decode_tokens_per_s": 1e3 / p50,
        "prefill_ms": prefill_ms,
        "prefill_tokens_per_s": context * 1e3 / prefill_ms,
    }


def speed_table(speed: dict[str, dict[str, object]], options: argparse.Namespace) -> Table:
    names = {"ours": f"ours ({options.ours.name})", "peer": f"genai {options.peer_precision}"}
    rows = []
    for key, name in names.items():
        s = speed[key]
        spread = s["step_ms"]
        rows.append(
            (name, s["decode_tokens_per_s"], spread["p10"], spread["p50"], spread["p90"], s["cpu_ms_per_step"],
             s["prefill_ms"], s["load_s"], s["peak_bytes"] / 1e6)
        )  # fmt: skip
    ratio = speed["ratio"]
    low, mid, high = ratio["decode_per_round_p10_p50_p90"]
    note = (
        f"decode ours / peer {ratio['decode_tokens_per_s']:.2f} (by round: p10 {low:.2f}, median {mid:.2f}, "
        f"p90 {high:.2f}); prefill ours / peer {ratio['prefill_tokens_per_s']:.2f}; {options.rounds} bursts of "
        f"{options.burst} steps and {options.prefills} prefills each, in turns, {options.threads} threads; "
        f"load average of the last minute {os.getloadavg()[0]:.1f}"
    )
    columns = ("side", "decode tok/s", "step p10 ms", "p50 ms", "p90 ms", "CPU ms", "prefill ms", "load s", "peak MB")
    return Table(f"Speed at context {options.context}, batch 1", columns, tuple(rows), note)


if __name__ == "__main__":
    main()
