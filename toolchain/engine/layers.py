"""The compiler's own account of an engine, read from its log or from its inspector.

With detailed profiling verbosity TensorRT-RTX logs one verbose message that starts with `Layers:`
and has one line per kernel: `Name: …, LayerType: …, Inputs: […], Constants: […], Outputs: […],
TacticName: …, Metadata: [ONNX Layer: …]`. Engines compiled without a GPU cannot be deserialized
here, so this text is the only evidence of what is in them. TensorRT, which compiles on a GPU, is asked
through its engine inspector instead: the same facts as JSON, one document per profile.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolchain.errors import DtoolError

LOG_HEAD = "Layers:"

_LINE = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+), (?P<rest>.*)$")
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), (?:Location: \w+, )?Dimensions: \[(?P<dims>[-\d,]*)\].*?Datatype: (?P<dtype>\w+)"
)
_ONNX = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_PROFILE = re.compile(r"\[profile (\d+)\]")
_ROW_PRODUCT = re.compile(r"Mul.*Sum")
_REGION = re.compile(r"_myl(\d+)_\d+$")
_INSPECTOR_TYPES = (
    ("FP8", "FP8"), ("FP16", "Half"), ("Half", "Half"), ("BF16", "BFloat16"), ("BFloat16", "BFloat16"),
    ("Int8", "Int8"), ("Int4", "Int4"), ("Int64", "Int64"), ("Int32", "Int32"), ("FP32", "Float"), ("Float", "Float"),
    ("Bool", "Bool"),
)  # fmt: skip
"""How the inspector words a type within a format, and our name of it; the first that is found counts."""
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
    def is_row_product(self) -> bool:
        """Whether it multiplies one row by a matrix and sums, as the compiler makes products of a single row.

        TensorRT-RTX generates such kernels where batch and tokens are 1 in every shape of the profile. They are
        named by their steps: SiluMulReshMulSumAdd is a gate, its product and an added residual, MulSlicSlicSumSum
        one product whose columns go two ways, MulMulAddSum two products that are added.
        """
        return self.type == "kgen" and _ROW_PRODUCT.search(self.name) is not None

    @property
    def is_fused_attention(self) -> bool:
        """Whether it is attention: the plugin, or TensorRT's kernel (_gemm_mha_v2 over many queries, _gemv_mha_v1)."""
        return "_mha_v" in self.tactic or self.is_plugin

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plugin's work."""
        return self.type == "PluginV3"


def parse_layers(text: str, profiles: int = 1) -> list[tuple[Kernel, ...]]:
    """The kernels of each profile, in order, from a `Layers:` message or the inspector's documents.

    Raises DtoolError for text of another form.
    """
    if text.lstrip().startswith("["):
        return [_inspected(document) for document in json.loads(text)]
    kernels = tuple(_kernel(line) for line in text.split("\n") if line.startswith("Name: "))
    return _split_profiles(kernels, profiles)


def _split_profiles(kernels: Sequence[Kernel], profiles: int) -> list[tuple[Kernel, ...]]:
    """Tell the kernels of several profiles apart: those of the later ones carry a tag.

    Not every kernel does, so one tag speaks for its whole region (the number in `_myl3_7`), and a
    region without any belongs to the profile of the kernels before it. Where no kernel has a tag, which
    was seen with profiles of one row, and there are as many regions as profiles, each region is one.
    """
    tags = [_PROFILE.search(kernel.name) for kernel in kernels]
    regions = [_REGION.search(kernel.name) for kernel in kernels]
    of_region = {r[1]: int(t[1]) for t, r in zip(tags, regions, strict=True) if t and r}
    in_order = list(dict.fromkeys(region[1] for region in regions if region))
    if not any(tags) and len(in_order) == profiles:
        of_region = {region: profile for profile, region in enumerate(in_order)}
    split: list[list[Kernel]] = [[] for _ in range(profiles)]
    current = 0
    for kernel, tag, region in zip(kernels, tags, regions, strict=True):
        current = int(tag[1]) if tag else of_region.get(region[1], current) if region else current
        split[min(current, profiles - 1)].append(kernel)
    return [tuple(part) for part in split]


def _inspected(document: Any) -> tuple[Kernel, ...]:
    # a layer without detail is its name alone
    layers = [{"Name": layer} if isinstance(layer, str) else layer for layer in document.get("Layers", ())]
    return tuple(_inspected_kernel(layer) for layer in layers)


def _inspected_kernel(layer: Any) -> Kernel:
    inputs, constants, outputs = (
        tuple(map(_inspected_tensor, layer.get(part, ()))) for part in ("Inputs", "Constants", "Outputs")
    )
    return Kernel(
        name=str(layer.get("Name", "")),
        type=str(layer.get("LayerType", "")),
        tactic=str(layer.get("TacticName", "")),
        inputs=inputs,
        constants=constants,
        outputs=outputs,
        onnx_nodes=tuple(_ONNX.findall(str(layer.get("Metadata", "")))),
    )


def _inspected_tensor(tensor: Any) -> KernelTensor:
    words = str(tensor.get("Format/Datatype", tensor.get("Datatype", "")))
    dtype = next((ours for theirs, ours in _INSPECTOR_TYPES if theirs in words), words)
    return KernelTensor(str(tensor.get("Name", "")), dtype, tuple(tensor.get("Dimensions", ())))


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
