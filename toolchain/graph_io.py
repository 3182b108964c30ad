"""The graph contract: names, types and shapes of every input and output, in one place.

Legend of symbolic dimensions: batch, T (new tokens), capacity (slots of the linear cache). The
cache is written in place: `present.*` has the shape of `past_key_values.*` and shares its memory
where the backend can. Rows are right-padded; a row's positions start at its `past_lengths`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from toolchain.formats import FORMATS
from toolchain.model.config import DecoderConfig
from toolchain.tensor_file import TensorEntry

Phase = Literal["prefill", "decode", "evaluation"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "evaluation")
GRAPH_FILES: dict[Phase, str] = {phase: f"{phase}.onnx" for phase in PHASES}
CACHE_LAYOUT = "batch, kv_heads, capacity, head_dim"

Dim = int | str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, format and shape (ints or symbolic names) of one graph input or output."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class GraphIO:
    """All inputs and outputs of one graph, in order."""

    phase: Phase
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def table(self) -> str:
        """The contract as aligned text, one line per tensor."""
        rows = [("", "name", "dtype", "shape")]
        for label, specs in (("in", self.inputs), ("out", self.outputs)):
            rows += [(label, s.name, s.dtype, "[" + ", ".join(map(str, s.shape)) + "]") for s in specs]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def past_name(layer: int, part: str) -> str:
    """Input name of a layer's cache; `part` is key or value."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Output name of a layer's cache; `part` is key or value."""
    return f"present.{layer}.{part}"


EMBEDDED, PROJECTED, OUTPUT = "embedded", "o_proj", "output"
"""Inner values that proofs read: what enters the first layer; of a layer, attention's product and the layer's end."""


def layer_value(layer: int, part: str) -> str:
    """Name of an inner value of one layer; `part` is PROJECTED or OUTPUT."""
    return f"layers.{layer}.{part}"


def graph_io(config: DecoderConfig, phase: Phase, cache_dtype: str) -> GraphIO:
    """The contract of one phase.

    prefill: logits of each row's last valid token. decode: T = 1. evaluation: prefill with the
    logits of every position.
    """
    tokens: Dim = 1 if phase == "decode" else "T"
    cache: tuple[Dim, ...] = ("batch", config.num_key_value_heads, "capacity", config.head_dim)
    parts = [(i, part) for i in range(config.num_hidden_layers) for part in ("key", "value")]
    lengths = () if phase == "decode" else (TensorSpec("new_lengths", "int64", ("batch",)),)
    inputs = (
        TensorSpec("input_ids", "int64", ("batch", tokens)),
        TensorSpec("past_lengths", "int64", ("batch",)),
        *lengths,
        *(TensorSpec(past_name(i, part), cache_dtype, cache) for i, part in parts),
    )
    logits: tuple[Dim, ...] = ("batch", "T" if phase == "evaluation" else 1, config.vocab_size)
    outputs = (
        TensorSpec("logits", "float32", logits),
        *(TensorSpec(present_name(i, part), cache_dtype, cache) for i, part in parts),
    )
    return GraphIO(phase, inputs, outputs)


def external_initializer(name: str, entry: TensorEntry) -> Any:
    """An onnx_ir value that points into a data file beside the graph by offset and length."""
    import onnx_ir as ir

    dtype, shape = ir.DataType(FORMATS[entry.dtype].onnx_code), ir.Shape(entry.shape)
    tensor = ir.ExternalTensor(entry.path.name, entry.offset, entry.length, dtype, shape=shape, name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(dtype), shape=shape)
