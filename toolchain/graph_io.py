"""The graph contract: names, types and shapes of every input and output, in one place.

Legend of symbolic dimensions: batch, T (new tokens), capacity (slots of the linear cache). The
cache is written in place: `present.*` has the shape of `past_key_values.*` and shares its memory
where the backend can. Rows are right-padded; a row's positions start at its `past_lengths`. Layers may
keep their caches in different formats (`model.caches`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolchain.errors import DtoolError
from toolchain.formats import FORMATS
from toolchain.model.caches import SCALE_PARTS, CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.tensor_file import TensorEntry

if TYPE_CHECKING:
    import onnx

Phase = Literal["prefill", "decode", "evaluation"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "evaluation")
GRAPH_FILES: dict[Phase, str] = {phase: f"{phase}.onnx" for phase in PHASES}
CACHE_LAYOUT = "batch, kv_heads, capacity, head_dim"

PAST, PRESENT = "past_key_values.", "present."

Dim = int | str


def load_graph(path: Path) -> "onnx.ModelProto":
    """The graph in a file, its weights left where they are. Raises DtoolError when it is no ONNX file."""
    import onnx
    from google.protobuf.message import DecodeError

    model, fault = onnx.ModelProto(), "a graph without nodes"  # as which an empty file reads
    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError as error:
        fault = str(error)
    if not model.graph.node:
        fix = "make the artifact again, or copy it again"
        raise DtoolError(f"{path} cannot be read", expected="an ONNX graph", found=fault, fix=fix)
    return model


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, format and shape (ints or symbolic names) of one graph input or output."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def sized(self, **sizes: int) -> tuple[int, ...]:
        """The shape with its symbolic dimensions filled in. Raises KeyError for one not given."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


@dataclass(frozen=True, slots=True)
class GraphIO:
    """All inputs and outputs of one graph, in order."""

    phase: Phase
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def call_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that a caller fills for every step."""
        return tuple(spec for spec in self.inputs if not spec.name.startswith(PAST))

    @property
    def cache_inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors of all caches, layer by layer; `cache_outputs` are the same after the step."""
        return tuple(spec for spec in self.inputs if spec.name.startswith(PAST))

    @property
    def cache_outputs(self) -> tuple[TensorSpec, ...]:
        """What `cache_inputs` become, in the same order."""
        return tuple(spec for spec in self.outputs if spec.name.startswith(PRESENT))

    def table(self) -> str:
        """The contract as aligned text, one line per tensor."""
        rows = [("", "name", "dtype", "shape")]
        for label, specs in (("in", self.inputs), ("out", self.outputs)):
            rows += [(label, s.name, s.dtype, "[" + ", ".join(map(str, s.shape)) + "]") for s in specs]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def past_name(layer: int, part: str) -> str:
    """Input name of a layer's cache; `part` is one of `CacheFormat.parts`: key, value, key_scale, value_scale."""
    return f"{PAST}{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Output name of a layer's cache; `part` as in `past_name`."""
    return f"{PRESENT}{layer}.{part}"


EMBEDDED, PROJECTED, OUTPUT = "embedded", "o_proj", "output"
"""Inner values that proofs read: what enters the first layer; of a layer, attention's product and the layer's end."""


def layer_value(layer: int, part: str) -> str:
    """Name of an inner value of one layer; `part` is PROJECTED or OUTPUT."""
    return f"layers.{layer}.{part}"


def graph_io(config: DecoderConfig, phase: Phase, caches: Sequence[CacheFormat]) -> GraphIO:
    """The contract of one phase, with the cache format of every layer.

    prefill: logits of each row's last valid token. decode: T = 1. evaluation: prefill with the
    logits of every position.
    """
    tokens: Dim = 1 if phase == "decode" else "T"
    slots: tuple[Dim, ...] = ("batch", config.num_key_value_heads, "capacity")

    def tensors(name: Callable[[int, str], str]) -> Iterator[TensorSpec]:
        for i, cache in zip(range(config.num_hidden_layers), caches, strict=True):
            for part in cache.parts:
                shape = slots if part in SCALE_PARTS else (*slots, config.head_dim)
                yield TensorSpec(name(i, part), cache.part_format(part), shape)

    lengths = () if phase == "decode" else (TensorSpec("new_lengths", "int64", ("batch",)),)
    inputs = (
        TensorSpec("input_ids", "int64", ("batch", tokens)),
        TensorSpec("past_lengths", "int64", ("batch",)),
        *lengths,
        *tensors(past_name),
    )
    logits: tuple[Dim, ...] = ("batch", "T" if phase == "evaluation" else 1, config.vocab_size)
    return GraphIO(phase, inputs, (TensorSpec("logits", "float32", logits), *tensors(present_name)))


def external_initializer(name: str, entry: TensorEntry) -> Any:
    """An onnx_ir value that points into a data file beside the graph by offset and length."""
    import onnx_ir as ir

    dtype, shape = ir.DataType(FORMATS[entry.dtype].onnx_code), ir.Shape(entry.shape)
    tensor = ir.ExternalTensor(entry.path.name, entry.offset, entry.length, dtype, shape=shape, name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(dtype), shape=shape)
