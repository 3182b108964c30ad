"""The compiler's own account of an engine, read from its log.

With detailed profiling verbosity TensorRT-RTX logs one verbose message that starts with `Layers:`
and has one line per kernel: `Name: …, LayerType: …, Inputs: […], Constants: […], Outputs: […],
TacticName: …, Metadata: [ONNX Layer: …]`. Engines compiled without a GPU cannot be deserialized
here, so this text is the only evidence of what is in them.
"""

import re
from dataclasses import dataclass

from toolchain.errors import DtoolError

LOG_HEAD = "Layers:"

_LINE = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+), (?P<rest>.*)$")
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<dims>[-\d,]*)\].*?Datatype: (?P<dtype>\w+)"
)
_ONNX = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True, slots=True)
class KernelTensor:
    """One operand of a kernel; dynamic dimensions are -1. `dtype` is TensorRT's name, as Half or Int8."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether at least two of its dimensions are larger than one (or dynamic)."""
        return sum(d != 1 for d in self.shape) >= 2

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry of the log: a kernel and the ONNX nodes that went into it."""

    name: str
    type: str
    tactic: str
    inputs: tuple[KernelTensor, ...]
    constants: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]
    onnx_nodes: tuple[str, ...]

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product; one with an epilogue or a dequantized weight is a `runtime_fusion` of Fc."""
        return self.type == "gemm" or (self.type == "runtime_fusion" and "Fc" in self.name)

    @property
    def is_fused_attention(self) -> bool:
        """Whether it is the dedicated attention kernel: _gemm_mha_v2 over many queries, _gemv_mha_v1 over one."""
        return "_mha_v" in self.tactic or self.type == "PluginV3"


def parse_layers(text: str) -> tuple[Kernel, ...]:
    """Every kernel of a `Layers:` message, in order. Raises DtoolError for a line of another form."""
    return tuple(_kernel(line) for line in text.split("\n") if line.startswith("Name: "))


def _kernel(line: str) -> Kernel:
    found = _LINE.match(line)
    if not found:
        raise DtoolError(
            "the compiler's layer log has another form",
            expected="Name: …, LayerType: …",
            found=line[:120],
            fix="use the tensorrt-rtx version dtool pins; this one was not tried",
        )
    # node names may hold commas and brackets, so the metadata is cut off before fields are split
    body, _, metadata = found["rest"].rpartition("Metadata: ")
    fields = _split_fields(body)
    return Kernel(
        name=found["name"],
        type=found["type"],
        tactic=fields.get("TacticName", ""),
        inputs=_tensors(fields.get("Inputs", "")),
        constants=_tensors(fields.get("Constants", "")),
        outputs=_tensors(fields.get("Outputs", "")),
        onnx_nodes=tuple(_ONNX.findall(metadata)),
    )


def _split_fields(text: str) -> dict[str, str]:
    """`A: x, B: [y, z]` as a dict, split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    pairs = (part.partition(":") for part in parts)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _tensors(text: str) -> tuple[KernelTensor, ...]:
    return tuple(
        KernelTensor(m["name"], m["dtype"], tuple(int(d) for d in m["dims"].split(",") if d))
        for m in _TENSOR.finditer(text)
    )
