"""The number formats dtool stores, and how each ecosystem spells them.

One row per format; nothing else in dtool knows a dtype code. No heavy imports: torch and onnx
are asked for their objects by name where they are needed.
"""

from dataclasses import dataclass

from toolchain.errors import DtoolError, did_you_mean


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format.

    `bits` per element; `safetensors` header code; `onnx` TensorProto.DataType name; `torch` dtype
    name; `qmax` largest code of the symmetric quantizer (None for formats that are not quantized).
    """

    name: str
    bits: int
    safetensors: str
    onnx: str
    torch: str
    qmax: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes per element, for formats of whole bytes."""
        return self.bits // 8

    @property
    def onnx_code(self) -> int:
        """The TensorProto.DataType number."""
        import onnx

        return int(onnx.TensorProto.DataType.Value(self.onnx))

    @property
    def torch_dtype(self):  # noqa: ANN201 - torch must not be imported to describe a format
        """The torch dtype object."""
        import torch

        return getattr(torch, self.torch)


FORMATS = {
    f.name: f
    for f in (
        Format("float32", 32, "F32", "FLOAT", "float32"),
        Format("float16", 16, "F16", "FLOAT16", "float16"),
        Format("bfloat16", 16, "BF16", "BFLOAT16", "bfloat16"),
        Format("int8", 8, "I8", "INT8", "int8", 127.0),
        Format("uint8", 8, "U8", "UINT8", "uint8"),
        Format("int4", 4, "", "INT4", "int8", 7.0),  # in files two codes to a byte, as uint8
        Format("fp8_e4m3", 8, "F8_E4M3", "FLOAT8E4M3FN", "float8_e4m3fn", 448.0),
        Format("int32", 32, "I32", "INT32", "int32"),
        Format("int64", 64, "I64", "INT64", "int64"),
        Format("bool", 8, "BOOL", "BOOL", "bool"),
    )
}
BY_SAFETENSORS = {f.safetensors: f for f in FORMATS.values() if f.safetensors}
COMPUTE_FORMATS = ("float32", "float16", "bfloat16")


def format_named(name: str) -> Format:
    """The format called `name`. Raises DtoolError with the supported list."""
    if name not in FORMATS:
        known, fix = f"one of: {', '.join(FORMATS)}", did_you_mean(name, FORMATS)
        raise DtoolError(f"unknown number format {name!r}", expected=known, found=name, fix=fix)
    return FORMATS[name]


def format_of(tensor) -> str:  # noqa: ANN001 - torch must not be imported to describe a format
    """The name of a torch tensor's format."""
    name = str(tensor.dtype).removeprefix("torch.")
    return next(f.name for f in BY_SAFETENSORS.values() if f.torch == name)
