"""The tensors of a quantized checkpoint, those of one matrix made one; shapes are checked, no numbers are read.

Legend: O outputs, I inputs, G groups.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolchain.errors import DtoolError, name_list
from toolchain.formats import COMPUTE_FORMATS
from toolchain.model.foreign.scheme import INSTEAD, Scheme
from toolchain.tensor_file import Chunk, TensorEntry, read_chunks, read_tensor

PIECES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "packed": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")),
    "plain": (("weight", "weight_scale"), ("weight_zero_point",)),
}
"""By layout: the tensors every matrix has, the codes first, and those it may have."""
INPUT_PIECES = ("input_scale", "input_zero_point")
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A matrix [O, I] in codes, which stands where a tensor of floats would.

    `pieces`: the stored tensors by what they are; `input_scale`: the static scale of the product's input.
    """

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    pieces: dict[str, TensorEntry]
    input_scale: TensorEntry | None = None

    @property
    def dtype(self) -> str:
        """What `read` gives."""
        return "float32"

    @property
    def length(self) -> int:
        """Stored bytes."""
        return sum(entry.length for entry in self.entries())

    def entries(self) -> tuple[TensorEntry, ...]:
        """All stored tensors."""
        extra = () if self.input_scale is None else (self.input_scale,)
        return (*self.pieces.values(), *extra)

    def chunks(self) -> Iterator[Chunk]:
        """The bytes of all stored tensors, in order."""
        for entry in self.entries():
            yield from read_chunks(entry)

    def read(self) -> Any:
        """float32 [O, I]. Raises DtoolError for zero points or groups that contradict the config."""
        from toolchain.model.foreign.grid import dequantize, read_codes, read_grid

        return dequantize(read_codes(self), read_grid(self))


Part = TensorEntry | CodedTensor


def read_part(part: Part) -> Any:
    """A stored tensor as torch; a coded one as the numbers it stands for."""
    return part.read() if isinstance(part, CodedTensor) else read_tensor(part)


def part_entries(part: Part) -> tuple[TensorEntry, ...]:
    """The stored tensors of a part."""
    return part.entries() if isinstance(part, CodedTensor) else (part,)


def gather_coded(stored: Mapping[str, TensorEntry], scheme: Scheme) -> dict[str, Part]:
    """The checkpoint's tensors, those of each coded matrix made one under the name of its weight.

    Raises DtoolError for a matrix without all of its tensors or with shapes that do not fit each other, and
    where nothing is coded. Tensors of no matrix stay, to be refused as unknown.
    """
    found: dict[str, Part] = dict(stored)
    if scheme.weight_format == "none":
        return found
    needed, optional = PIECES[scheme.layout]
    modules = [name.removesuffix(f".{needed[0]}") for name in stored if _is_coded(name, stored, scheme)]
    if not modules:
        raise DtoolError(
            f"the config says {scheme.method}, but no matrix is stored so",
            expected=f"tensors {', '.join(needed)}",
            found=name_list(stored),
            fix="remove quantization_config from config.json if the weights are floats",
        )
    for module in modules:
        own = {piece: f"{module}.{piece}" for piece in (*needed, *optional, *INPUT_PIECES)}
        lacking = [own[piece] for piece in needed if own[piece] not in stored]
        if scheme.ordered and (index := own[optional[-1]]) not in stored:
            lacking.append(index)
        if lacking:
            raise DtoolError(
                f"{module} is not complete", expected=name_list(lacking), found="no such tensor", fix=INSTEAD
            )
        if f"{module}.pre_quant_scale" in stored:
            raise DtoolError(
                "pre_quant_scale is not supported",
                expected="inputs that are not scaled before they are rounded",
                found=f"{module}.pre_quant_scale",
                fix=INSTEAD,
            )
        pieces = {piece: stored[own[piece]] for piece in (*needed, *optional) if own[piece] in stored}
        fixed = _take_inputs(own, stored, found, scheme)
        for piece in pieces:
            del found[own[piece]]
        found[f"{module}.weight"] = CodedTensor(module, scheme, _shape(module, pieces, scheme), pieces, fixed)
    return found


def _take_inputs(
    own: dict[str, str], stored: Mapping[str, TensorEntry], found: dict[str, Part], scheme: Scheme
) -> TensorEntry | None:
    """The static scale of a product's input, if its scheme has one; what the scheme does not explain stays."""
    scale, zero = (stored.get(own[piece]) for piece in INPUT_PIECES)
    static = scheme.activations is not None and scheme.activations[1] == "tensor"
    if scale is not None and (static or scheme.offset_inputs):
        del found[own["input_scale"]]
    if zero is not None and (scheme.offset_inputs or is_zero(zero)):
        del found[own["input_zero_point"]]
    return scale if static else None


def is_zero(entry: TensorEntry) -> bool:
    """Whether all bytes of a tensor are zero."""
    return all(isinstance(chunk, int) or not bytes(chunk).strip(b"\0") for chunk in read_chunks(entry))


def _is_coded(name: str, stored: Mapping[str, TensorEntry], scheme: Scheme) -> bool:
    needed = PIECES[scheme.layout][0]
    if not name.endswith(f".{needed[0]}"):
        return False
    return scheme.layout != "plain" or (stored[name].dtype == scheme.weight_format and f"{name}_scale" in stored)


def _shape(module: str, pieces: dict[str, TensorEntry], scheme: Scheme) -> tuple[int, int]:
    """[O, I] of a matrix, by the shapes of its tensors. Raises DtoolError when they are not of the layout."""
    codes = pieces[PIECES[scheme.layout][0][0]]
    words = WORD_BITS // scheme.bits
    formats = {"plain": scheme.weight_format}
    rows, columns = (*codes.shape, 0, 0)[:2] if len(codes.shape) == 2 else (0, 0)
    if scheme.layout == "gptq":
        out, into = columns, rows * words
    elif scheme.layout == "awq":
        out, into = columns * words, rows
    elif scheme.layout == "packed":
        out, into = _true_shape(pieces["weight_shape"])
    else:
        out, into = rows, columns
    groups = math.ceil(into / scheme.group_size) if scheme.group_size else 1
    wanted = _wanted_shapes(scheme, out, into, groups)
    wrong = [
        f"{module}.{piece} {entry.dtype} {list(entry.shape)}"
        for piece, entry in pieces.items()
        if piece in wanted and entry.shape not in wanted[piece]
    ]
    if codes.dtype != formats.get(scheme.layout, "int32") or out * into == 0:
        wrong.append(f"{module}.{PIECES[scheme.layout][0][0]} {codes.dtype} {list(codes.shape)}")
    scale = pieces.get("scales", pieces.get("weight_scale"))
    if scale is not None and scale.dtype not in COMPUTE_FORMATS:
        wrong.append(f"scales of {module} as {scale.dtype}")
    if wrong:
        raise DtoolError(
            f"the tensors of {module} are not of the layout its config names",
            expected=f"{scheme.text()}: of shapes "
            + "; ".join(f"{piece} {' or '.join(str(list(s)) for s in shapes)}" for piece, shapes in wanted.items()),
            found=name_list(wrong),
            fix=INSTEAD,
        )
    return out, into


def _true_shape(entry: TensorEntry) -> tuple[int, int]:
    """The two numbers of a weight_shape, which is data. (0, 0) where it holds something else."""
    sizes = b"".join(chunk for chunk in read_chunks(entry, holes=False) if not isinstance(chunk, int))
    width = {"int64": 8, "int32": 4}.get(entry.dtype, 0)
    if entry.shape != (2,) or not width:
        return 0, 0
    first, second = (int.from_bytes(sizes[at : at + width], "little", signed=True) for at in (0, width))
    return (first, second) if min(first, second) > 0 else (0, 0)


def _wanted_shapes(scheme: Scheme, out: int, into: int, groups: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The shapes that each tensor of a matrix may have."""
    words = WORD_BITS // scheme.bits
    packed_out, packed_in = math.ceil(out / words), math.ceil(into / words)
    whole: tuple[tuple[int, ...], ...] = () if scheme.group_size else ((), (1,), (1, 1), (out,))
    scales = ((out, groups), *whole)
    if scheme.layout in {"gptq", "awq"}:
        return {"qzeros": ((groups, out // words),), "scales": ((groups, out),), "g_idx": ((into,),)}
    if scheme.layout == "packed":
        zeros = ((packed_out, groups), (out, groups))
        codes = {"weight_packed": ((out, packed_in),), "weight_g_idx": ((into,),), "weight_shape": ((2,),)}
        return codes | {"weight_scale": scales, "weight_zero_point": zeros}
    return {"weight_scale": scales, "weight_zero_point": scales}
