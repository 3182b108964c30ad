"""Compiled engines on a GPU, by TensorRT or TensorRT-RTX (one API): what `dtool build-engine` wrote for them.

The manifest is compared with this machine first, so that an engine of another version or GPU is
refused with both values instead of TensorRT's serialization errors (field fault I-01). Caches, input
and logits buffers are torch tensors at fixed addresses; a cache is bound as input and output, so it
is updated in place and never leaves the GPU. Both phases run on one stream and share one buffer for
activations, and the weights when one plan holds both.

Decode is launched as a CUDA graph. A graph holds shapes and addresses, not values: every step
copies its inputs into the same buffers first, and other caches or another batch mean another graph
(field fault E-07). One graph is kept at a time: it is valid as long as its context is bound to the
same things.

No engine computes the logits of every position, so `evaluation` feeds the tokens one by one
through decode.

Legend: B batch, T new tokens, K KV heads, C capacity, D head dim, V vocab.
"""

import mmap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError, name_list
from toolchain.graph_io import GraphIO, Phase, graph_io
from toolchain.model.caches import caches_of
from toolchain.model.config import DecoderConfig
from toolchain.runners.device import Device, DeviceCache
from toolchain.runners.runner import Array, KVState, Limits, check_state, check_step
from toolchain.runners.tensorrt_host import (
    REBUILD,
    check_capability,
    check_files,
    check_version,
    fill_weights,
    find_device,
    import_backend,
    load_plugins,
    make_logger,
    section,
)

BUILT_PHASES: tuple[Phase, ...] = ("prefill", "decode")
TRT_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "fp8_e4m3": "FP8",
    "int64": "INT64",
}


@dataclass(slots=True)
class Buffers:
    """What every step copies through, at addresses that never change: int64 inputs and float32 logits, flat.

    `device` and `host` hold input_ids [B * T], past_lengths [B], new_lengths [B] and logits [B * V]
    of the largest batch and prompt; a step uses the first part of each.
    """

    device: dict[str, Any]
    host: dict[str, Any]


@dataclass(slots=True)
class EnginePhase:
    """One compiled phase: its context, the ranges of its profile, and what the context is bound to.

    `batch` and `tokens` are the smallest and largest values. `bound` identifies shapes and
    addresses; `warm` says that they have been launched once; `replay` launches their CUDA graph.
    """

    context: Any
    contract: GraphIO
    batch: tuple[int, int]
    tokens: tuple[int, int]
    bound: tuple[int, ...] = ()
    warm: bool = False
    replay: Callable[[], None] | None = field(default=None, repr=False)


class TensorRTRunner:
    """Runs the engines of one artifact on one GPU.

    The engine fixes the capacity C of its caches. A state that asks for less gets caches of C slots all
    the same, and is held to what it asked for by the checks of every step.
    """

    copied_cache_bytes = 0
    """Bytes of cache a step copies between host and GPU: none. The bench reports it."""

    def __init__(
        self, artifact: Artifact, *, device: str | Device = "cuda", trt: Any = None, cuda_graphs: bool = True
    ) -> None:
        """Load the engines. `trt` is the TensorRT module, by default the backend's.

        Raises DtoolError when this machine cannot run them, before CUDA is touched where it can be.
        """
        self.artifact = artifact
        self.name = str(section(artifact, "backend"))
        self.config = artifact.read("decoder.json", DecoderConfig)
        self.caches = caches_of(artifact.manifest.kv_contract, self.config.num_hidden_layers)
        self.limits = Limits(*(int(section(artifact, key)) for key in ("max_batch", "max_prompt", "kv_capacity")))
        self.trt = trt if trt is not None else import_backend(artifact)
        check_version(artifact, str(self.trt.__version__))
        check_files(artifact)
        self.device = find_device(artifact, device) if isinstance(device, str) else device
        check_capability(artifact, self.device.capability)
        self.cuda_graphs = cuda_graphs
        with self.device.use():
            self.logger = make_logger(self.trt)
            load_plugins(self.trt, artifact)
            self.runtime, self.engines = self._load_engines()
            self.phases, self.scratch = self._make_phases()
            least = max(phase.batch[0] for phase in self.phases.values()), self.phases["prefill"].tokens[0]
            self.limits = replace(self.limits, min_batch=least[0], min_prompt=least[1])
            self.buffers = self._make_buffers()

    @property
    def torch_device(self) -> str:
        """Where the engine runs, as torch names it: what it is compared with should run there too."""
        return str(getattr(self.device, "device", "cpu"))

    @property
    def capacity(self) -> int:
        """Slots of every cache, fixed by the engine."""
        assert self.limits.capacity is not None
        return self.limits.capacity

    def new_state(self, batch: int, capacity: int) -> KVState:
        check_state(self.config, self.limits, batch, capacity)
        for phase in self.phases.values():
            _check_range("batch", batch, phase.batch)
        sizes = {"batch": batch, "capacity": self.capacity}
        with self.device.use():
            caches = [
                DeviceCache(self.device.zeros(spec.sized(**sizes), spec.dtype), self.device)
                for spec in self.phases["decode"].contract.cache_inputs
            ]
        return KVState(capacity, np.zeros(batch, np.int64), caches)

    def step(self, state: KVState, input_ids: Array, new_lengths: Array, phase: Phase) -> Array:
        check_step(self.config, self.limits, state, input_ids, new_lengths, phase)
        if phase == "evaluation":
            logits = self._evaluate(state, input_ids, new_lengths)
        else:
            _check_range("prompt length", input_ids.shape[1], self.phases[phase].tokens)
            logits = self._run(state, input_ids, state.lengths, new_lengths, phase)
        state.lengths = state.lengths + new_lengths
        return logits

    def _evaluate(self, state: KVState, input_ids: Array, new_lengths: Array) -> Array:
        """Logits [B, T, V], one token of every row at a time through decode.

        A row that has come to its end stays where it is: what is decoded further lands in the slot
        behind its last token, which nothing reads and the next step overwrites.
        """
        batch, tokens = input_ids.shape
        logits = np.empty((batch, tokens, self.config.vocab_size), np.float32)
        past, ones = state.lengths.copy(), np.ones(batch, np.int64)
        for i in range(tokens):
            logits[:, i] = self._run(state, input_ids[:, i : i + 1], past, ones, "decode")[:, 0]
            past += i < new_lengths
        return logits

    def _run(self, state: KVState, input_ids: Array, past: Array, new_lengths: Array, name: Phase) -> Array:
        """One launch of an engine: logits [B, 1, V] of each row's last valid token."""
        batch, tokens = input_ids.shape
        phase, count = self.phases[name], batch * self.config.vocab_size
        self.logger.last.clear()
        with self.device.use():
            # bound first: that may raise, and TensorRT must not be left with half a step on the stream
            self._bind(phase, state, batch, tokens)
            feeds = {"input_ids": input_ids, "past_lengths": past, "new_lengths": new_lengths}
            for spec in phase.contract.call_inputs:
                self._send(spec.name, feeds[spec.name])
            self._launch(phase, name)
            self.device.copy(self.buffers.host["logits"][:count], self.buffers.device["logits"][:count])
            self.device.synchronize()
        return self.buffers.host["logits"].numpy()[:count].reshape(batch, 1, -1).copy()

    def _send(self, name: str, values: Array) -> None:
        """Queue the copy of an input into its buffer. The host side is free: the last step was waited for."""
        host, count = self.buffers.host[name], values.size
        host.numpy()[:count] = values.reshape(-1)
        self.device.copy(self.buffers.device[name][:count], host[:count])

    def _bind(self, phase: EnginePhase, state: KVState, batch: int, tokens: int) -> None:
        """Tell the context its shapes and addresses, unless it has them; a graph of others is dropped."""
        key = (batch, tokens, *(cache.address for cache in state.caches))
        if key == phase.bound:
            return
        phase.bound, phase.warm, phase.replay = (), False, None
        sizes = {"batch": batch, "T": tokens, "capacity": self.capacity}
        contract = phase.contract
        through_buffers = (*contract.call_inputs, contract.outputs[0])
        addresses = {spec.name: int(self.buffers.device[spec.name].data_ptr()) for spec in through_buffers}
        for specs in (contract.cache_inputs, contract.cache_outputs):
            addresses |= {spec.name: cache.address for spec, cache in zip(specs, state.caches, strict=True)}
        for spec in contract.inputs:
            shape = spec.sized(**sizes)
            if not phase.context.set_input_shape(spec.name, shape):
                raise self._refused(f"takes no input {spec.name} of shape {list(shape)}")
        for tensor, address in addresses.items():
            if not phase.context.set_tensor_address(tensor, address):
                raise self._refused(f"takes no memory for {tensor}")
        if missing := phase.context.infer_shapes():
            raise self._refused(f"lacks the shape of {name_list(missing)}")
        phase.bound = key

    def _launch(self, phase: EnginePhase, name: Phase) -> None:
        """Put one run on the stream: as it is the first time, which TensorRT needs, then as a CUDA graph."""

        def enqueue() -> None:
            if not phase.context.execute_async_v3(self.device.handle):
                raise self._refused(f"cannot run {name}")

        if phase.warm and phase.replay is None and name == "decode" and self.cuda_graphs:
            phase.replay = self._capture(phase, enqueue)
        if phase.replay is not None:
            phase.replay()
            return
        enqueue()
        phase.warm = True

    def _capture(self, phase: EnginePhase, enqueue: Callable[[], None]) -> Callable[[], None] | None:
        """The launch as a graph, or None, and no more tries, when the engine cannot be captured."""
        capturable = getattr(phase.context, "is_stream_capturable", None)  # TensorRT-RTX alone
        reason = "TensorRT-RTX calls it not capturable"
        if capturable is None or capturable(self.device.handle):
            try:
                return self.device.capture(enqueue)
            except (RuntimeError, DtoolError) as error:
                reason = str(error).splitlines()[0]
        self.cuda_graphs = False
        warnings.warn(f"decode runs without CUDA graphs, so slower: {reason}", RuntimeWarning, stacklevel=2)
        return None

    def _refused(self, what: str) -> DtoolError:
        return DtoolError(
            f"{self.name} {what}",
            expected=f"an engine that runs what {self.artifact.path} was built for",
            found="; ".join(self.logger.last) or "no message",
            fix="build the engine again; if it happens again, report it with these lines",
        )

    def _load_engines(self) -> tuple[Any, dict[str, Any]]:
        """The runtime, which must outlive its engines, and one engine per plan file."""
        runtime = self.trt.Runtime(self.logger)
        if self.artifact.manifest.target.get("version_compatible"):
            runtime.engine_host_code_allowed = True  # such a plan brings the runtime of its version as code
        entries = section(self.artifact, "engines")
        engines = {}
        for name in dict.fromkeys(entries[phase]["file"] for phase in BUILT_PHASES):
            engines[name] = self._deserialize(runtime, self.artifact.file(name))
            self._set_streaming(engines[name])
        return runtime, engines

    def _deserialize(self, runtime: Any, path: Path) -> Any:
        self.logger.last.clear()
        with path.open("rb") as stream:
            plan = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)  # closed with its last user
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise self._refused(f"cannot load {path}")
        if path.name in self.artifact.manifest.target.get("weights_from", {}):
            fill_weights(self.trt, self.artifact, engine, path.name)
        return engine

    def _set_streaming(self, engine: Any) -> None:
        """Leave part of the weights on the host, as the manifest says; a context must not exist yet."""
        budget = self.artifact.manifest.target.get("weight_streaming_budget_bytes")
        if budget is None or engine.streamable_weights_size == 0:
            return
        kept = min(int(budget), engine.streamable_weights_size)
        engine.weight_streaming_budget_v2 = kept
        if engine.weight_streaming_budget_v2 != kept:
            raise self._refused(f"takes no weight streaming budget of {kept} bytes")
        if kept < engine.streamable_weights_size:
            self.cuda_graphs = False  # what is streamed dwarfs the launches a graph would save

    def _make_phases(self) -> tuple[dict[Phase, EnginePhase], Any]:
        """A context per phase, and the activation memory both use in turn."""
        entries = section(self.artifact, "engines")
        shared = len(self.engines) == 1
        phases: dict[Phase, EnginePhase] = {}
        needed = 1
        for name in BUILT_PHASES:
            engine, profile = self.engines[entries[name]["file"]], int(entries[name]["profile"])
            contract = graph_io(self.config, "prefill" if shared else name, self.caches)
            self._check_tensors(engine, contract, name)
            ids = _range_of(engine, "input_ids", profile)
            phases[name] = EnginePhase(self._make_context(engine, profile, name), contract, ids[0], ids[1])
            needed = max(needed, engine.get_device_memory_size_for_profile_v2(profile))
        scratch = self.device.zeros((needed,), "uint8")
        for phase in phases.values():
            phase.context.set_device_memory(scratch.data_ptr(), needed)
        self.device.synchronize()  # the profiles have been set on the stream
        return phases, scratch

    def _make_context(self, engine: Any, profile: int, name: Phase) -> Any:
        if profile >= engine.num_optimization_profiles:
            raise self._refused(f"has no profile {profile} for {name}, only {engine.num_optimization_profiles}")
        settings = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        specialize = getattr(self.trt, "DynamicShapesKernelSpecializationStrategy", None)
        if specialize is not None and name == "decode":
            # TensorRT-RTX would compile the kernels of a shape while others run; a graph would keep the others
            config = engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(settings)
            config.dynamic_shapes_kernel_specialization_strategy = specialize.EAGER
            settings = config
        context = engine.create_execution_context(settings)
        if context is None:
            raise self._refused(f"cannot make a context for {name}")
        chosen = context.active_optimization_profile == profile
        if not chosen and not context.set_optimization_profile_async(profile, self.device.handle):
            raise self._refused(f"cannot take profile {profile} for {name}")
        return context

    def _check_tensors(self, engine: Any, contract: GraphIO, name: Phase) -> None:
        """Refuse an engine whose inputs and outputs are not those of the graph contract."""
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        specs = (*contract.inputs, *contract.outputs)
        wanted = {spec.name for spec in specs}
        if found != wanted:
            lacking, extra = (name_list(sorted(names)) or "nothing more" for names in (wanted - found, found - wanted))
            raise _other_contract(f"the inputs and outputs of {name}", lacking, extra)
        for spec in specs:
            dtype = engine.get_tensor_dtype(spec.name)
            if dtype != getattr(self.trt.DataType, TRT_TYPES[spec.dtype]):
                raise _other_contract(f"{spec.name} of {name}", spec.dtype, str(dtype))
            dims = [self.capacity if dim == "capacity" else dim for dim in spec.shape]
            shape = list(engine.get_tensor_shape(spec.name))
            same = (a in (b, -1) or isinstance(b, str) for a, b in zip(shape, dims, strict=False))
            if len(shape) != len(dims) or not all(same):
                raise _other_contract(f"{spec.name} of {name}", str(dims), str(shape))

    def _make_buffers(self) -> Buffers:
        batch, prompt = int(self.limits.max_batch or 1), int(self.limits.max_prompt or 1)
        sizes = {"input_ids": batch * prompt, "past_lengths": batch, "new_lengths": batch}
        formats = dict.fromkeys(sizes, "int64") | {"logits": "float32"}
        sizes["logits"] = batch * self.config.vocab_size
        return Buffers(
            {name: self.device.zeros((size,), formats[name]) for name, size in sizes.items()},
            {name: self.device.pinned((size,), formats[name]) for name, size in sizes.items()},
        )


def _range_of(engine: Any, name: str, profile: int) -> list[tuple[int, int]]:
    """The smallest and largest value of each dimension of an input in a profile."""
    shape = tuple(engine.get_tensor_shape(name))
    if -1 not in shape:
        return [(dim, dim) for dim in shape]
    smallest, _, largest = engine.get_tensor_profile_shape(name, profile)
    return list(zip(tuple(smallest), tuple(largest), strict=True))


def _check_range(what: str, value: int, bounds: tuple[int, int]) -> None:
    smallest, largest = bounds
    if not smallest <= value <= largest:
        raise DtoolError(
            f"{what} {value} not in [{smallest}, {largest}]",
            expected=f"{smallest} to {largest}, as the engine was built",
            found=str(value),
            fix="ask for what fits, or build an engine with a larger range",
        )


def _other_contract(what: str, expected: str, found: str) -> DtoolError:
    return DtoolError(
        f"{what}: the engine is not what the graph contract says",
        expected=expected,
        found=found,
        fix=f"build the engine again with this version of dtool: {REBUILD}",
    )
