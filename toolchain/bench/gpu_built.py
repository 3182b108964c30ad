"""What dtool built, on a GPU: the plugin library by its C entry point, and engines by their runners.

The library holds the kernels that `ops.kernels.launch` runs, compiled ahead of time. With equal tiles the
results must be equal bit for bit; the split count, which the library chooses by itself, is found by
trying all. Where tiles differ (a library of another version) the bar is that of the numerics.
"""

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from toolchain.bench.gpu_numerics import ERROR_BAR, Scenario, make_inputs, run_scenario, stored_problem
from toolchain.bench.gpu_results import Result, judge
from toolchain.bench.gpu_speed import Decode, Shape, Timer, capability, median_seconds
from toolchain.ops.attention import AttentionSpec
from toolchain.ops.plugin.entry import PluginLibrary

MOST_SPECS = 3
MOST_SPLITS = 128
NEW, PAST = 70, (0, 700, 255)
LAUNCHES, ROUNDS = 200, 11
CONSISTENCY_STEPS = 4
PROMPT, NEW_TOKENS, WARMUP, REPEATS = 256, 16, 1, 5

Attend = Callable[..., torch.Tensor]


def build_library(caches: Sequence[str], folder: Path, device: str) -> Path:
    """A library for the shapes that are timed, on this GPU. Raises DtoolError when a tool is missing."""
    from toolchain.ops.plugin.build import build_plugin

    specs = [Shape(cache, 1, 1).spec for cache in caches]
    return build_plugin(specs, "float16", [capability(device)], folder / "libdtool_attention.so").path


def nodes(library: PluginLibrary, sm: int) -> list[tuple[AttentionSpec, str, dict[str, Any]]]:
    """Up to three sets of kernels for this GPU, of different cache formats first: spec, dtype, tiles and warps."""
    description = library.describe()
    specs = [AttentionSpec(**carried) for carried in description["specs"]]
    found: dict[Any, tuple[AttentionSpec, str, dict[str, Any]]] = {}
    sets = [one for one in description["sets"] if one["sm"] == sm]
    for one in sets:
        found.setdefault(specs[one["spec"]].cache_format, _node(specs, one))
    for one in sets:
        found.setdefault((one["spec"], one["compute_dtype"]), _node(specs, one))
    distinct = {(spec, dtype): kernels for spec, dtype, kernels in found.values()}
    return [(spec, dtype, kernels) for (spec, dtype), kernels in distinct.items()][:MOST_SPECS]


def _node(specs: Sequence[AttentionSpec], one: dict[str, Any]) -> tuple[AttentionSpec, str, dict[str, Any]]:
    kernels = {kernel["name"]: (kernel["tile"], kernel["num_warps"]) for kernel in one["kernels"]}
    return specs[one["spec"]], one["compute_dtype"], kernels


def without_splits(library: PluginLibrary) -> Attend:
    """The library's call with the arguments of `launch.attend`; it chooses the splits by itself."""

    def attend(*arguments: Any, splits: int | None = None, **options: Any) -> torch.Tensor:
        del splits
        return library.attend(*arguments, **options)

    return attend


def check_plugin(library: PluginLibrary, device: str, attend: Attend, timer: Timer) -> Iterator[Result]:
    """Numerics, equality with the Triton launch, and what a launch costs."""
    sm = capability(device)
    chosen = nodes(library, sm)
    if not chosen:
        sms = ", ".join(map(str, library.describe()["sms"]))
        yield Result("plugin", f"kernels for sm {sms} only", verdict="skip", reason=f"nothing for this sm_{sm}")
        return
    for spec, dtype, kernels in chosen:
        scenario = Scenario(f"{dtype}, cache {spec.cache_format}", spec, NEW, PAST)
        found = run_scenario(scenario, dtype, device, without_splits(library))
        same, problem, details = same_bits(scenario, dtype, kernels, library, device, attend)
        failed = "; ".join(filter(None, (stored_problem(found, spec), problem)))
        case = f"{scenario.name}: {same}"
        yield judge("plugin", case, found.error, "max abs err", most=ERROR_BAR[dtype], failed=failed, details=details)
    spec, dtype, _ = chosen[0]
    yield launch_latency(library, spec, dtype, device, timer)


def same_bits(
    scenario: Scenario, dtype: str, kernels: dict[str, Any], library: PluginLibrary, device: str, attend: Attend
) -> tuple[str, str, dict[str, Any]]:
    """How the library's outputs and caches compare with the Triton launch's, what is wrong with that, and numbers."""
    from toolchain.ops.kernels.bindings import plan

    ours = {name: (one.tile, one.warps) for name, one in plan(scenario.spec, capability(device), dtype).items()}
    equal = all(tuple(kernels[name]) == ours[name] for name in ours)
    prefill = _nearest(scenario, scenario.new, dtype, device, library, attend, (None,))
    decode = _nearest(scenario, 1, dtype, device, library, attend, range(1, MOST_SPLITS + 1))
    differing, largest = prefill[0] + decode[0], max(prefill[1], decode[1])
    details = {"tiles_equal": equal, "splits": decode[2], "differing_bytes": differing, "largest": largest}
    if equal:
        problem = f"{differing} bytes are not triton's" if differing else ""
        return f"bits of triton's, splits {decode[2]}", problem, details
    bar = 2 * ERROR_BAR[dtype]
    problem = "" if largest <= bar else f"differs from triton's by {largest:.2g}, bar {bar:g}"
    return f"other tiles, {largest:.1e} from triton's", problem, details


def _nearest(
    scenario: Scenario,
    new: int,
    dtype: str,
    device: str,
    library: PluginLibrary,
    attend: Attend,
    counts: Sequence[int | None],
) -> tuple[int, float, int | None]:
    """Bytes that differ and the largest difference, for the first split count with the fewest; and that count."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(scenario, dtype, device, generator)
    shape = (len(scenario.past), new, scenario.spec.packed_width)
    qkv = torch.randn(shape, generator=generator).to(inputs.dtype).to(device)

    def call(function: Attend, **options: Any) -> tuple[torch.Tensor, ...]:
        caches = [x.clone() for x in inputs.caches]
        arguments = (qkv, inputs.cos, inputs.sin, inputs.lengths, *caches, inputs.spec)
        return function(*arguments, scales=inputs.scales, norms=inputs.norms, **options), *caches

    by_library = call(library.attend)
    found = {}
    for count in counts:
        found[count] = _differing(by_library, call(attend, splits=count))
        if found[count][0] == 0:
            break
    best = min(found, key=lambda count: found[count][0])
    return (*found[best], best)


def _differing(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Bytes that differ in all tensors, and the largest difference of the outputs."""
    count = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(first, second, strict=True))
    return count, (first[0].float() - second[0].float()).abs().max().item()


def launch_latency(
    library: PluginLibrary,
    spec: AttentionSpec,
    dtype: str,
    device: str,
    timer: Timer,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Host microseconds of one call of the C entry point, and device microseconds of one in a CUDA graph."""
    scenario = Scenario("latency", spec, 1, (30,))
    inputs = make_inputs(scenario, dtype, device, torch.Generator().manual_seed(0))
    qkv = torch.zeros(1, 1, spec.packed_width, dtype=inputs.dtype, device=device)
    out = qkv.new_empty(1, 1, spec.num_heads * spec.head_dim)
    workspace = torch.empty(library.workspace_bytes(spec, 1, 1), dtype=torch.uint8, device=device)
    call = library.make_call(spec, dtype, 1, 1, inputs.caches[0].shape[2])
    tensors = {"qkv": qkv, "cos": inputs.cos, "sin": inputs.sin, "past_lengths": inputs.lengths, "out": out}
    tensors |= {"key_cache": inputs.caches[0], "value_cache": inputs.caches[1], "workspace": workspace}
    tensors |= dict(zip(("key_scale", "value_scale"), inputs.scales or (), strict=False))
    tensors |= dict(zip(("q_norm", "k_norm"), inputs.norms or (), strict=False))
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr() or None)
    call.workspace_bytes = workspace.numel()

    def launch() -> None:
        library.launch(call, torch.cuda.current_stream().cuda_stream)

    library.prepare(spec, dtype)
    host = []
    for _ in range(ROUNDS):
        begin = clock()
        for _ in range(LAUNCHES):
            launch()
        host.append((clock() - begin) / LAUNCHES)
        torch.cuda.synchronize()
    device_s = median_seconds(timer, launch, walks=LAUNCHES)
    host_us = statistics.median(host) * 1e6
    case = f"decode call of 31 slots; in a CUDA graph {device_s * 1e6:.2f} us"
    return Result(
        "plugin launch", case, host_us, "us on host", details={"host_us": host_us, "graph_us": device_s * 1e6}
    )


def plugin_speed(library: PluginLibrary, device: str, timer: Timer, bandwidth: float) -> Result | None:
    """Share of the copy bandwidth of decode by the library with its own split count, for information.

    None when the library carries none of the nodes that are timed: an engine then shows its speed.
    """
    found = {}
    for spec, dtype, _ in nodes(library, capability(device)):
        shape = Shape(spec.cache_format, 8192, 8, spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
        if shape.spec == spec:
            seconds = Decode(shape, device).seconds(library.attend, timer)
            share = shape.cache_bytes / seconds / bandwidth
            found[f"{dtype} {shape.cache}"] = {"seconds": seconds, "share": share}
    shares = "/".join(f"{one['share']:.2f}" for one in found.values())
    case = f"decode 8k b8 {' / '.join(found)}"
    return Result("plugin speed", case, shares, "of copy BW", details=found) if found else None


def check_engine(folder: Path, clock: Callable[[], float] = time.perf_counter) -> Iterator[Result]:
    """An artifact by its runner: decode against prefill, and TTFT and TPOT. Raises what opening it raises."""
    import numpy as np

    from toolchain.bench.latency import new_case, prepare, run_in_turns, summarize
    from toolchain.numerics import logit_tolerance
    from toolchain.runners.open import open_runner
    from toolchain.runners.runner import Limits

    runner: Any = open_runner(folder)
    prepare(runner)
    limits, config = getattr(runner, "limits", Limits()), runner.config
    room = (limits.capacity or config.context_len) - NEW_TOKENS - 1
    tokens = min(PROMPT, limits.max_prompt or PROMPT, room)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens), np.int64)
    whole, stepped = _last_logits(runner, ids, 0), _last_logits(runner, ids, min(CONSISTENCY_STEPS, tokens - 1))
    finite = bool(np.isfinite(whole).all() and np.isfinite(stepped).all())
    off, largest = float(np.abs(whole - stepped).max()), float(np.abs(whole).max())
    artifact = getattr(runner, "artifact", None)
    details = artifact.manifest.details if artifact else {"compute_dtype": "float32"}
    dtype = str(details.get("compute_dtype", "float16"))
    depth, width = config.num_hidden_layers, config.hidden_size
    rounded = bool(details.get("rounded_inputs")) or details.get("kv_format", "none") != "none"
    # where values become codes, one code that flips moves logits by more than rounding: reported, not judged
    bar = None if rounded else logit_tolerance(dtype, layers=depth, width=width, largest=1.0)
    problem = "" if finite else "logits are not finite"
    case = f"{folder.name}: decode from prefill" + (", codes inside" if rounded else "")
    yield judge("engine", case, off / largest, "of max logit", most=bar, failed=problem)
    timed = new_case(runner, ids, NEW_TOKENS)
    run_in_turns([timed], WARMUP, REPEATS, clock, time.sleep)
    result = summarize(timed)
    for name, spread in (("TTFT", result.ttft_ms), ("TPOT", result.tpot_ms)):
        case = f"{folder.name}: {name} p50, prompt {tokens}, batch 1"
        yield Result("engine", case, spread.p50, "ms", details=spread.model_dump())


def _last_logits(runner: Any, ids: Any, steps: int) -> Any:
    """Logits [V] after all of `ids` [1, T], the last `steps` of them one at a time."""
    import numpy as np

    tokens = ids.shape[1]
    state = runner.new_state(1, tokens)
    logits = runner.step(state, ids[:, : tokens - steps], np.array([tokens - steps]), "prefill")
    for i in range(tokens - steps, tokens):
        logits = runner.step(state, ids[:, i : i + 1], np.ones(1, np.int64), "decode")
    return logits[0, -1]


def missing_for_engine(folder: Path) -> str:
    """Why the runner of an artifact cannot be had in this environment; empty when it can be tried."""
    try:
        importlib.import_module("toolchain.bench.latency")
        importlib.import_module("toolchain.runners.open")
    except ImportError as error:
        return f"dtool's own packages: {error}"
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return ""  # the runner says it better
    backend = json.loads(manifest.read_text("utf-8")).get("target", {}).get("backend", "onnxruntime")
    module = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}.get(backend, "onnxruntime")
    return "" if importlib.util.find_spec(module) else f"its backend {backend} needs {module}, which is not here"
