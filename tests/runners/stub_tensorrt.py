"""A TensorRT without a GPU, for tests: plans are JSON that name ONNX graphs, ONNX Runtime computes them.

It is as strict as TensorRT is unforgiving: work is queued on a stream and done when that is waited
for; a launch needs every shape inside its profile, every address, its activation memory, and cache
outputs at their inputs' addresses. A graph can only be captured after a launch with the same shapes
and addresses, and is dead once its context is bound to others.

A plan: {"onnx": path, "capacity": slots, "profiles": [{input: [min, opt, max]}], "memory": bytes, "streamable": bytes}
"""

import contextlib
import ctypes
import enum
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolchain.runners.device import new_zeros
from toolchain.runners.onnx import make_session

NUMPY = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
TYPES = {np.int64: "INT64", np.float32: "FLOAT", np.float16: "HALF", np.int8: "INT8"}
STREAMS: dict[int, "StubDevice"] = {}
_handles = itertools.count(1)

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT8 FP8 INT64")
Strategy = enum.Enum("Strategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
Specialization = enum.Enum("Specialization", "LAZY EAGER NONE")


class OrderError(AssertionError):
    """The runner did something that TensorRT answers with undefined behaviour."""


class Severity(enum.IntEnum):
    """As TensorRT's: the smaller, the worse."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    """The base class of loggers."""

    Severity = Severity


class StubDevice:
    """CPU memory and a queue in place of a GPU and its stream."""

    def __init__(self, capability: str = "8.9") -> None:
        self.capability = capability
        self.handle = next(_handles)
        self.queue: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.captures = self.replays = self.waits = 0
        self.refuse_capture = False
        STREAMS[self.handle] = self

    def use(self) -> Any:
        return contextlib.nullcontext()

    def zeros(self, shape: Any, dtype: str) -> torch.Tensor:
        return new_zeros(shape, dtype, "cpu")

    def pinned(self, shape: Any, dtype: str) -> torch.Tensor:
        return new_zeros(shape, dtype, "cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.recording is not None:
            raise OrderError("a copy was captured")
        self.queue.append(lambda: target.copy_(source))

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        if self.refuse_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        recorded: list[Callable[[], None]] = []
        self.recording = recorded
        try:
            enqueue()
        finally:
            self.recording = None
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            self.queue.extend(recorded)

        return replay

    def put(self, work: Callable[[], None]) -> None:
        (self.queue if self.recording is None else self.recording).append(work)

    def synchronize(self) -> None:
        self.waits += 1
        queue, self.queue = self.queue, []
        for work in queue:
            work()


class StubTensorRT:
    """The module. `calls` lists what was called before anything can run; `refused` libraries do not load."""

    def __init__(self, version: str = "11.4.0.106", *, rtx: bool = False, refused: tuple[str, ...] = ()) -> None:
        self.__version__ = version
        self.ILogger, self.DataType, self.ExecutionContextAllocationStrategy = ILogger, DataType, Strategy
        if rtx:
            self.DynamicShapesKernelSpecializationStrategy = Specialization
        self.rtx, self.refused = rtx, refused
        self.calls: list[tuple[str, ...]] = []
        self.engines: list[StubEngine] = []
        self.capturable, self.launch = True, True
        self.Refitter, self.OnnxParserRefitter = StubRefitter, StubParserRefitter

    def Runtime(self, logger: Any) -> "StubRuntime":  # noqa: N802 - TensorRT's name
        self.calls.append(("runtime",))
        return StubRuntime(self, logger)

    def get_plugin_registry(self) -> "StubTensorRT":
        return self

    def load_library(self, path: str) -> object | None:
        self.calls.append(("library", path))
        return None if any(path.endswith(name) for name in self.refused) else object()


class StubRefitter:
    """Fills the weights of an engine from a graph; `unset` are the ones the graph does not have."""

    unset: tuple[str, ...] = ()

    def __init__(self, engine: "StubEngine", logger: Any) -> None:
        self.engine, self.graph = engine, ""

    def get_missing_weights(self) -> list[str]:
        return list(self.unset)

    def refit_cuda_engine(self) -> bool:
        self.engine.filled_from = self.graph
        return not self.unset


class StubParserRefitter:
    def __init__(self, refitter: StubRefitter, logger: Any) -> None:
        self.refitter = refitter

    def refit_from_file(self, path: str) -> bool:
        self.refitter.graph = path
        return Path(path).is_file()


class StubRuntime:
    """Makes engines of plans."""

    engine_host_code_allowed = False

    def __init__(self, trt: StubTensorRT, logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, plan: Any) -> "StubEngine | None":
        self.trt.calls.append(("deserialize",))
        try:
            document = json.loads(memoryview(plan).tobytes())
        except ValueError:
            self.logger.log(Severity.INFO, "an information")
            self.logger.log(Severity.ERROR, "Error Code 1: Serialization (Magic tag does not match)")
            return None
        self.trt.engines.append(StubEngine(self.trt, document, code_allowed=self.engine_host_code_allowed))
        return self.trt.engines[-1]


class StubEngine:
    """One plan, with an ONNX Runtime session behind it."""

    def __init__(self, trt: StubTensorRT, document: dict[str, Any], *, code_allowed: bool) -> None:
        self.trt, self.document, self.code_allowed = trt, document, code_allowed
        self.session = make_session(document["onnx"], 1, "onnx")
        self.inputs = {v.name: v for v in self.session.get_inputs()}
        self.outputs = {v.name: v for v in self.session.get_outputs()}
        self.contexts: list[StubContext] = []
        self.streamable_weights_size = document.get("streamable", 0)
        self.budget = self.streamable_weights_size

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.document["profiles"])

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, value: int) -> None:
        if self.contexts:
            raise OrderError("the streaming budget is set after a context was made")
        self.budget = value

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def value(self, name: str) -> Any:
        return self.inputs.get(name) or self.outputs[name]

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[TYPES[NUMPY[self.value(name).type]]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        fixed = {"capacity": self.document["capacity"]}
        return tuple(fixed.get(d, -1) if isinstance(d, str) else d for d in self.value(name).shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.document["profiles"][profile][name]]

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.document.get("memory", 1024) * (profile + 1)

    def create_runtime_config(self) -> "StubConfig":
        return StubConfig()

    def create_execution_context(self, settings: Any) -> "StubContext":
        self.contexts.append(StubContext(self, settings))
        return self.contexts[-1]


class StubConfig:
    """TensorRT-RTX's runtime config."""

    dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
    strategy = Strategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy


class StubContext:
    """Shapes, addresses and launches of one engine."""

    def __init__(self, engine: StubEngine, settings: Any) -> None:
        self.engine, self.settings = engine, settings
        # the first context of an engine starts with profile 0, others with none
        self.active_optimization_profile = 0 if not engine.contexts else -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = 0
        self.generation, self.launched = 0, -1
        self.launches = 0

    @property
    def strategy(self) -> Any:
        return self.settings.strategy if isinstance(self.settings, StubConfig) else self.settings

    def set_optimization_profile_async(self, profile: int, handle: int) -> bool:
        assert handle in STREAMS
        if any(other.active_optimization_profile == profile for other in self.engine.contexts if other is not self):
            return False
        self.active_optimization_profile, self.shapes = profile, {}
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self.strategy is Strategy.USER_MANAGED
        needed = self.engine.get_device_memory_size_for_profile_v2(self.active_optimization_profile)
        if not memory or size < needed:
            raise OrderError("too little activation memory")
        self.memory = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name in self.engine.inputs, name
        profile = self.engine.document["profiles"][self.active_optimization_profile]
        if name in profile:
            smallest, _, largest = profile[name]
            if not all(a <= b <= c for a, b, c in zip(smallest, shape, largest, strict=True)):
                return False
        elif self.engine.get_tensor_shape(name) != shape:
            return False
        self.shapes[name] = shape
        self.generation += 1
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.inputs or name in self.engine.outputs, name
        self.addresses[name] = address
        self.generation += 1
        return address != 0

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def is_stream_capturable(self, handle: int) -> bool:
        assert handle in STREAMS
        return self.engine.trt.capturable

    def execute_async_v3(self, handle: int) -> bool:
        device = STREAMS[handle]
        self._check_ready()
        if not self.engine.trt.launch:
            return False
        if device.recording is not None and self.launched != self.generation:
            raise OrderError("captured before a launch with these shapes")
        generation, shapes, addresses = self.generation, dict(self.shapes), dict(self.addresses)

        def run() -> None:
            if self.generation != generation:
                raise OrderError("a launch or graph outlived what its context was bound to")
            self.launches += 1
            self._compute(shapes, addresses)

        device.put(run)
        self.launched = self.generation
        return True

    def _check_ready(self) -> None:
        if self.active_optimization_profile < 0 or not self.memory:
            raise OrderError("no profile or no activation memory")
        if self.infer_shapes() or self.addresses.keys() != self.engine.inputs.keys() | self.engine.outputs.keys():
            raise OrderError("a shape or an address is missing")
        for name, address in self.addresses.items():
            if name.startswith("present.") and self.addresses[name.replace("present", "past_key_values")] != address:
                raise OrderError(f"{name} does not share its input's memory")

    def _compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        feeds = {}
        for name, shape in shapes.items():
            values = np.empty(shape, NUMPY[self.engine.inputs[name].type])
            ctypes.memmove(values.ctypes.data, addresses[name], values.nbytes)
            feeds[name] = values
        results = self.engine.session.run(list(self.engine.outputs), feeds)
        for name, values in zip(self.engine.outputs, results, strict=True):
            dense = np.ascontiguousarray(values)
            ctypes.memmove(addresses[name], dense.ctypes.data, dense.nbytes)
