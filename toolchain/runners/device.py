"""One GPU through torch: a stream of its own, memory on both sides, copies and CUDA graphs.

TensorRT takes addresses and a stream handle; torch gives both, so that no CUDA binding of our own is
needed. Everything a runner asks of the GPU is in `Device`; the tests put another one in its place.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from toolchain.errors import DtoolError
from toolchain.formats import FORMATS, format_of
from toolchain.runners.runner import Array

NOT_IN_NUMPY = {"bfloat16": "uint16", "fp8_e4m3": "int8"}
"""Formats numpy lacks, and the integers that hold their bits."""


class Device(Protocol):
    """Memory and one stream. All work is queued on the stream, in order, and done after `synchronize`."""

    @property
    def handle(self) -> int:
        """The stream, as TensorRT takes it."""
        ...

    @property
    def capability(self) -> str:
        """Compute capability, as 8.9."""
        ...

    def use(self) -> AbstractContextManager[Any]:
        """Make the device and its stream the current ones."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """A zero-filled device tensor of a format of `formats`. Raises DtoolError when memory runs out."""
        ...

    def pinned(self, shape: Sequence[int], dtype: str) -> Any:
        """A host tensor that the device copies from and to while the host goes on."""
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy between tensors of one size."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """What `enqueue` puts on the stream, as one launch that can be repeated. Nothing runs yet."""
        ...

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        ...


def gpu_present() -> bool:
    """Whether torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()


class CudaDevice:
    """A GPU named as torch names it (cuda, cuda:1). The caller has checked that there is one."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch: Any = torch
        self.device = torch.device(name)
        # on the default stream TensorRT would synchronize the whole device around every launch
        self.stream: Any = torch.cuda.Stream(self.device)

    @property
    def handle(self) -> int:
        return int(self.stream.cuda_stream)

    @property
    def capability(self) -> str:
        return ".".join(map(str, self.torch.cuda.get_device_capability(self.device)))

    def use(self) -> AbstractContextManager[Any]:
        return self.torch.cuda.stream(self.stream)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        try:
            with self.use():  # the fill is queued before whatever reads it
                return new_zeros(shape, dtype, self.device)
        except self.torch.OutOfMemoryError as error:
            free, total = self.torch.cuda.mem_get_info(self.device)
            size = FORMATS[dtype].bytes
            for dim in shape:
                size *= dim
            raise DtoolError(
                "the GPU's memory is full",
                expected=f"{size / 1e9:.2f} GB for one buffer {list(shape)} of {dtype}",
                found=f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free",
                fix="use a smaller batch, build an engine with a smaller kv_capacity, or free memory on the GPU",
            ) from error

    def pinned(self, shape: Sequence[int], dtype: str) -> Any:
        return self.torch.zeros(tuple(shape), dtype=FORMATS[dtype].torch_dtype, pin_memory=True)

    def copy(self, target: Any, source: Any) -> None:
        with self.use():
            target.copy_(source, non_blocking=True)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        graph = self.torch.cuda.CUDAGraph()
        # thread_local: TensorRT's other threads may call CUDA while this one captures
        with self.torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            enqueue()

        def replay() -> None:
            with self.use():
                graph.replay()

        return replay

    def synchronize(self) -> None:
        self.stream.synchronize()


def new_zeros(shape: Sequence[int], dtype: str, device: Any) -> Any:
    """A zero-filled torch tensor; filled as bytes, since torch has few operations for float8."""
    import torch

    *outer, last = shape
    wanted = FORMATS[dtype]
    return torch.zeros((*outer, last * wanted.bytes), dtype=torch.uint8, device=device).view(wanted.torch_dtype)


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """One cache tensor in device memory. Read and written from the host by tests and proofs alone.

    Its methods are those of ONNX Runtime's OrtValue, so that both kinds of caches are handled alike.
    """

    tensor: Any
    device: Device

    @property
    def address(self) -> int:
        """Where it lies."""
        return int(self.tensor.data_ptr())

    def numpy(self) -> Array:
        """A copy; bfloat16 as its uint16 bits and fp8 as its int8 bits."""
        self.device.synchronize()
        with self.device.use():
            return self._bits().cpu().numpy().copy()

    def update_inplace(self, values: Array) -> None:
        """Overwrite it with what `numpy` would give."""
        import torch

        self.device.synchronize()
        with self.device.use():
            self._bits().copy_(torch.from_numpy(values))
        self.device.synchronize()

    def _bits(self) -> Any:
        import torch

        name = NOT_IN_NUMPY.get(format_of(self.tensor))
        return self.tensor if name is None else self.tensor.view(getattr(torch, name))
