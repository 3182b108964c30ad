"""`python decode_worker.py dtool|genai FOLDER THREADS CONTEXT BURST`: one side of compare_genai.py, kept alive.

Loads, prefills CONTEXT tokens, says {"load_s", "first_prefill_s"}, then answers one JSON line for each
line it reads: `prefill` -> {"s"}, `decode` -> {"steps_s", "cpu_s"} (BURST steps from context CONTEXT on, each
with its greedy choice; CPU seconds of all threads, spinning included), `memory` -> {"peak_bytes"};
end of input ends it. Runs in either environment.
"""

import json
import sys
import time
from pathlib import Path

SLOT_STEP = 64


def prompt_ids(count: int) -> list[int]:
    """The same plain ids for both sides, inside any vocabulary."""
    return [3 + (i * 7919) % 997 for i in range(count)]


class Genai:
    """onnxruntime-genai: rewinding the generator keeps its cache, so a burst needs no new prefill."""

    def __init__(self, folder: str, threads: int, context: int, burst: int) -> None:
        import onnxruntime_genai as og

        self.og = og
        config = og.Config(folder)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = og.Model(config)
        self.prompt = prompt_ids(context)
        self.length = slots(context + burst + 2)
        self.generator = None

    def prefill(self) -> float:
        params = self.og.GeneratorParams(self.model)
        # min_length keeps an end token from stopping the burst.
        params.set_search_options(max_length=self.length, min_length=self.length, do_sample=False)
        self.generator = self.og.Generator(self.model, params)
        begin = time.perf_counter()
        self.generator.append_tokens(self.prompt)
        self.generator.generate_next_token()
        return time.perf_counter() - begin

    def decode(self, burst: int) -> list[float]:
        # append_tokens runs the model, and the choice after it is free: neither is in the timed steps.
        self.generator.rewind_to(len(self.prompt) - 1)
        self.generator.append_tokens(self.prompt[-1:])
        self.generator.generate_next_token()
        return [timed(self.generator.generate_next_token) for _ in range(burst)]


class Dtool:
    """Our runner; a burst starts by setting the lengths of the cache back."""

    def __init__(self, folder: str, threads: int, context: int, burst: int) -> None:
        import numpy as np

        from toolchain.bench.latency import prepare
        from toolchain.runners.open import open_runner

        self.np = np
        self.runner = open_runner(Path(folder), threads=threads)
        prepare(self.runner)
        self.prompt = np.array([prompt_ids(context)], np.int64)
        self.state = self.runner.new_state(1, slots(context + burst + 2))
        self.ids = None

    def prefill(self) -> float:
        self.state.lengths = self.np.zeros(1, self.np.int64)
        return timed(lambda: self.choose(self.prompt, "prefill"))

    def decode(self, burst: int) -> list[float]:
        self.state.lengths = self.np.array([self.prompt.shape[1] - 1], self.np.int64)
        self.choose(self.prompt[:, -1:], "decode")
        return [timed(lambda: self.choose(self.ids, "decode")) for _ in range(burst)]

    def choose(self, ids, phase: str) -> None:
        lengths = self.np.array([ids.shape[1]], self.np.int64)
        logits = self.runner.step(self.state, ids, lengths, phase)
        self.ids = logits[:, -1].argmax(-1)[:, None].astype(self.np.int64)


def slots(tokens: int) -> int:
    """Cache slots of both sides."""
    return -(-tokens // SLOT_STEP) * SLOT_STEP


def timed(work) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def burst_cost(worker, burst: int) -> dict[str, object]:
    """Seconds of each step, and CPU seconds of the steps and the two that set the context."""
    begin = time.process_time()
    steps_s = worker.decode(burst)
    return {"steps_s": steps_s, "cpu_s": time.process_time() - begin}


def peak_bytes() -> int:
    """Peak resident bytes of this process."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    side, folder = sys.argv[1:3]
    threads, context, burst = map(int, sys.argv[3:6])
    begin = time.perf_counter()
    worker = {"dtool": Dtool, "genai": Genai}[side](folder, threads, context, burst)
    load_s = time.perf_counter() - begin
    print(json.dumps({"load_s": load_s, "first_prefill_s": worker.prefill()}), flush=True)
    for line in sys.stdin:
        answers = {
            "prefill": lambda: {"s": worker.prefill()},
            "decode": lambda: burst_cost(worker, burst),
            "memory": lambda: {"peak_bytes": peak_bytes()},
        }
        print(json.dumps(answers[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
