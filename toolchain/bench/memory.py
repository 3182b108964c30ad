"""Memory: what a decode step must read, how fast this machine reads, and how much a process takes.

Decode is bound by memory: each step reads every weight once, for the whole batch, and each row's
cache. With W weight bytes, k cache bytes per token (scales of tokens included), B rows at a context of c tokens:

    bytes per step = W + B (k c + row)             row: one embedding row, when the head has its own matrix
                                                   of n experts those that the rows choose; within a window its tokens
    MBU = bytes per step / TPOT / bandwidth        (arXiv 2402.16363, section 2: the roofline of decode)

W is what the *files* hold, in their storage format: a runtime that keeps widened or repeated copies
reads more, and its MBU is lower for it. A context that is read in part or as padding counts as c.

The bandwidth is measured, not looked up, with the threads of the bench: the best of several
matrix-vector products (the access pattern of decode; every byte read once) and of several copies
(bytes read + bytes written). Caches are defeated by buffers of 256 MiB.

Peak memory is that of one process that runs one side only (`python -m toolchain.bench.child`): both
sides together would share the interpreter and hide each other's peak. It is VmHWM of /proc, which
starts anew at exec; getrusage's peak is inherited from the parent and would show the parent's size.
It counts mapped weight files; `anonymous` leaves them out, and is read at the end of the run.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pydantic

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError
from toolchain.memory import ending
from toolchain.model.caches import CacheFormat, caches_of
from toolchain.model.config import DecoderConfig
from toolchain.model.parameters import EMBEDDING, HEAD, parameter_shapes
from toolchain.recipe_sections import Bench
from toolchain.tensor_file import TensorEntry, read_header

BUFFER_BYTES = 256 << 20
BANDWIDTH_REPEATS = 7
WEIGHTS = "weights.safetensors"
NOT_WEIGHTS = ("rope.safetensors",)
BANDWIDTH_METHOD = (
    f"best of {BANDWIDTH_REPEATS} float32 matrix-vector products over {BUFFER_BYTES >> 20} MiB (bytes read / s) "
    f"and of {BANDWIDTH_REPEATS} copies of it ((bytes read + bytes written) / s), with the threads of the bench, "
    "before and after the timing"
)
MBU_FORMULA = "(weight bytes + B * (cache bytes of a token * mean context + embedding row)) / TPOT p50 / bandwidth"
CHILD_TIMEOUT_S = 3600


class PeakMemory(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Bytes of one process: the peak of what was resident, and what was not file-backed at the end."""

    peak_bytes: int
    anonymous_bytes: int


class StepBytes(pydantic.BaseModel, frozen=True, extra="forbid"):
    """What one decode step reads: all weights once, and per row a cache of `kv_bytes_per_token` each token.

    Of `expert_bytes`, which are not among the weights, the part that `batch` tokens are expected to
    choose; of the cache, the last tokens alone in layers with a window (`windows`, one per layer). Where the
    layers' caches differ, `layer_kv_bytes` says how `kv_bytes_per_token` is made up.
    """

    weight_bytes: int
    row_bytes: int
    kv_bytes_per_token: int
    expert_bytes: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int, ...] = ()
    layer_kv_bytes: tuple[int, ...] = ()

    def total(self, batch: int, context: float) -> float:
        """Bytes per step of `batch` rows that have `context` tokens each."""
        unread = (1 - self.experts_per_token / self.num_experts) ** batch if self.num_experts else 0.0
        layers = max(1, len(self.windows), len(self.layer_kv_bytes))
        sizes = self.layer_kv_bytes or (self.kv_bytes_per_token / layers,) * layers
        windows = self.windows or (0,) * layers
        cache = sum(size * min(window or context, context) for size, window in zip(sizes, windows, strict=True))
        return self.weight_bytes + self.expert_bytes * (1 - unread) + batch * (self.row_bytes + cache)


def use_threads(threads: int) -> int:
    """Set torch's thread count, 0 meaning every core this process may use; the count."""
    import torch

    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def measure_bandwidth(device: str = "cpu") -> float:
    """GB/s (1e9) a torch device moves, the CPU with torch's threads, by BANDWIDTH_METHOD."""
    import torch

    matrix = torch.ones(1 << 13, BUFFER_BYTES // 4 >> 13, device=device)
    vector, target = torch.ones(matrix.shape[1], device=device), torch.empty_like(matrix)
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    read_s = _best_seconds(lambda: (torch.mv(matrix, vector), wait()))
    copy_s = _best_seconds(lambda: (target.copy_(matrix), wait()))
    return max(BUFFER_BYTES / read_s, 2 * BUFFER_BYTES / copy_s) / 1e9


def _best_seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(BANDWIDTH_REPEATS + 1):  # the first touches the pages of its output
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def artifact_step_bytes(artifact: Artifact, config: DecoderConfig) -> StepBytes | None:
    """What a decode step of an artifact reads, from its files; None when they hold no weights by name.

    Every tensor is read but an embedding that the head does not share: of that, one row.
    """
    entries = _weight_entries(artifact)
    if not entries:
        return None
    caches = caches_of(artifact.manifest.kv_contract, config.num_hidden_layers)
    return _step_bytes({n: e.length for n, e in entries.items()}, config, caches)


def _weight_entries(artifact: Artifact) -> dict[str, TensorEntry]:
    names = [n for n in artifact.manifest.files if n.endswith(".safetensors") and n not in NOT_WEIGHTS]
    if WEIGHTS in names:
        names = [WEIGHTS]
    return {n: e for name in names for n, e in read_header(artifact.file(name)).items()}


def eager_step_bytes(config: DecoderConfig) -> StepBytes:
    """What a decode step of the float32 torch decoder reads."""
    shapes = parameter_shapes(config)
    lengths = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    return _step_bytes(lengths, config, (CacheFormat("float32"),) * config.num_hidden_layers)


def _step_bytes(lengths: dict[str, int], config: DecoderConfig, caches: Sequence[CacheFormat]) -> StepBytes:
    experts = sum(length for name, length in lengths.items() if ".experts." in name)
    total = sum(lengths.values()) - experts
    row = 0
    if HEAD in lengths:
        # The scales of a quantized embedding are looked up with its rows.
        lookup = sum(length for name, length in lengths.items() if name.startswith(EMBEDDING))
        total, row = total - lookup, lookup // config.vocab_size
    kv = tuple(cache.token_bytes(config.num_key_value_heads, config.head_dim) for cache in caches)
    windows = tuple(config.layer(i).window for i in range(config.num_hidden_layers))
    return StepBytes(
        weight_bytes=total,
        row_bytes=row,
        kv_bytes_per_token=sum(kv),
        expert_bytes=experts,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        windows=windows if any(windows) else (),
        layer_kv_bytes=kv if len(set(kv)) > 1 else (),
    )


def bandwidth_utilization(
    step: StepBytes, *, batch: int, prompt_tokens: int, new_tokens: int, tpot_ms: float, bandwidth_gb_s: float
) -> float:
    """MBU, 0..1: the share of the measured bandwidth that the useful bytes of decode take.

    Decode step i of n attends to prompt + i tokens, so the mean context is prompt + (n + 1) / 2.
    """
    context = prompt_tokens + (new_tokens + 1) / 2
    return step.total(batch, context) / (tpot_ms / 1e3) / (bandwidth_gb_s * 1e9)


def measure_peak(path: Path, bench: Bench, *, eager: bool, context_len: int | None = None) -> PeakMemory:
    """Peak memory of a process that opens `path` and generates at the longest prompt length.

    `context_len`: positions that a checkpoint is opened for.

    Raises DtoolError with the process's last words when it fails.
    """
    settings = bench.model_dump_json()
    side = ("eager", str(context_len or "")) if eager else ("artifact",)
    command = [sys.executable, "-m", "toolchain.bench.child", str(path), settings, *side]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        raise DtoolError(
            f"peak memory of {path} could not be measured",
            expected="a child process that opens it and generates",
            found=(" ".join(done.stderr.split())[-400:] or "no message") + f" ({ending(done.returncode)})",
            fix="run `dtool generate` on it to see the failure itself",
        )
    return PeakMemory.model_validate(json.loads(done.stdout.splitlines()[-1]))


def own_memory() -> PeakMemory:
    """Peak and anonymous bytes of this process, from /proc/self/status (kB there)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    peak, anonymous = (int(fields[name].split()[0]) << 10 for name in ("VmHWM", "RssAnon"))
    return PeakMemory(peak_bytes=peak, anonymous_bytes=anonymous)
