"""A GGUF file: its metadata by key, and its tensors as numbers, a few rows at a time.

The `gguf` package reads the header and knows the block formats. Data is read by offset, not through
the package's memory map, whose pages would count as memory until the whole file is in it.

Source: GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolchain.errors import DtoolError, name_list

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

PLAIN_TYPES = {"F32": ("F32", "<f4"), "F16": ("F16", "<f2"), "BF16": ("BF16", "<u2")}
"""By GGUF type: the safetensors code and the numpy type of its bytes."""
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types of scaled integer blocks, dequantized to float32."""
PIECE_ELEMENTS = 1 << 20
INSTEAD = "give the model's Hugging Face folder instead"


@dataclass(frozen=True, slots=True)
class Gguf:
    """An opened file. `tensors` by their GGUF names; `read`: what went into the config, own keys and vectors."""

    path: Path
    reader: "GGUFReader"
    tensors: dict[str, "ReaderTensor"]
    read: set[str] = field(default_factory=set)

    @property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        return str(self.get("general.architecture"))

    def get(self, key: str, *default: Any) -> Any:
        """One metadata value; `default`, when given, stands in for a key that is not there."""
        field = self.reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise DtoolError(
            f"{self.path} is incomplete",
            expected=f"the metadata key {key}",
            found="no such key",
            fix="give a file written by llama.cpp's converter",
        )

    def own(self, key: str, *default: Any) -> Any:
        """One value of the model's own keys, without their prefix."""
        self.read.add(key)
        return self.get(f"{self.architecture}.{key}", *default)

    def size(self, key: str, *default: int) -> int:
        """One of the model's own keys as a count."""
        value = self.own(key, *default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DtoolError(
                f"{self.path} describes no model dtool can read",
                expected=f"a positive count for {self.architecture}.{key}",
                found=str(value)[:80],
                fix=INSTEAD,
            )
        return value

    def real(self, key: str, *default: float) -> float:
        """One of the model's own keys as a float."""
        value = self.own(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DtoolError(
                f"{self.path} describes no model dtool can read",
                expected=f"a number for {self.architecture}.{key}",
                found=str(value)[:80],
                fix=INSTEAD,
            )
        return shortest(value)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, rows first as in Hugging Face."""
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def vector(self, name: str) -> "np.ndarray":
        """A small tensor, whole, as float32."""
        import numpy as np

        self.read.add(name)
        return np.concatenate([as_float32(self, name, piece) for piece in read_pieces(self, name)]).reshape(-1)


def open_gguf(path: Path) -> Gguf:
    """The file at `path`. Raises DtoolError for no GGUF, a cut or split one, and tensor types it cannot read."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        for key_value in reader.fields.values():
            key_value.contents()
    except OSError as error:
        raise DtoolError(
            f"{path} cannot be read",
            expected="a GGUF file that can be read",
            found=str(error),
            fix="check its path and permissions",
        ) from error
    except Exception as error:  # of numpy and the package, about their own arrays
        raise DtoolError(
            f"{path} cannot be read",
            expected="a GGUF file of version 2 or 3",
            found=_first_bytes(path),
            fix="download it again",
        ) from error
    gguf = Gguf(path, reader, {tensor.name: tensor for tensor in reader.tensors})
    parts = gguf.get("split.count", 1)
    if parts != 1 or reader.byte_order != "I" or sys.byteorder != "little":
        raise DtoolError(
            f"{path} cannot be read",
            expected="a whole little-endian file",
            found=f"one of {parts} parts" if parts != 1 else "another byte order",
            fix="merge the parts with `llama-gguf-split --merge` first" if parts != 1 else INSTEAD,
        )
    _require_order(gguf)
    known = {*PLAIN_TYPES, *BLOCK_TYPES}
    odd = [f"{t.name} {t.tensor_type.name}" for t in reader.tensors if t.tensor_type.name not in known]
    if odd:
        raise DtoolError(
            f"{path} holds number formats dtool cannot read",
            expected=", ".join((*PLAIN_TYPES, *BLOCK_TYPES)),
            found=f"{len(odd)} tensors: {name_list(odd)}",
            fix="give a file of another quantization, best F16 or Q8_0",
        )
    return gguf


def _require_order(gguf: Gguf) -> None:
    """Refuse tensors that do not lie one after the other, each right behind the padding of the one before it.

    The format demands it, and llama.cpp checks it when it loads a file. An offset that points elsewhere would
    give a tensor the numbers of another one, in silence.
    """
    alignment, end, before = int(gguf.reader.alignment), int(gguf.reader.data_offset), "the header"
    for tensor in gguf.reader.tensors:
        if int(tensor.data_offset) != end:
            raise DtoolError(
                f"{gguf.path} is damaged",
                expected=f"the bytes of {tensor.name} right after {before}, from byte {end} of the file",
                found=f"byte {int(tensor.data_offset)} in its table of tensors",
                fix="download the file again",
            )
        end, before = end + int(tensor.n_bytes), tensor.name
        end += -end % alignment


def _first_bytes(path: Path) -> str:
    """What a file that cannot be read is, by its size and its first bytes."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        magic, version = stream.read(4), stream.read(4)
    if magic != b"GGUF":
        return f"another kind of file, of {size} bytes" if size else "an empty file"
    number = min((int.from_bytes(version, order) for order in ("little", "big")), default=0)
    if len(version) == 4 and number not in (2, 3):
        return f"version {number}"
    return f"a file of {size} bytes, cut short or damaged"


def shortest(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 was 1e-05 before it was stored."""
    import numpy as np

    return float(str(np.float32(value)))


def read_pieces(
    gguf: Gguf, name: str, first: int = 0, rows: int | None = None, *, unit: int = 1
) -> Iterator["np.ndarray"]:
    """Rows of a tensor from the file, as stored: [rows, bytes], a multiple of `unit` rows at a time.

    All rows without `rows`; a vector is one row, and the rows of a matrix of matrices follow one another.
    """
    import numpy as np

    tensor = gguf.tensors[name]
    columns = max(int(tensor.shape[0]), 1)
    every = int(tensor.n_elements) // columns
    row_bytes = int(tensor.n_bytes) // max(every, 1)
    last = every if rows is None else first + rows
    step = max(PIECE_ELEMENTS // columns // unit, 1) * unit
    with gguf.path.open("rb") as stream:
        stream.seek(int(tensor.data_offset) + first * row_bytes)
        for row in range(first, last, step):
            count = min(step, last - row)
            data = stream.read(count * row_bytes)
            if len(data) != count * row_bytes:
                raise DtoolError(
                    f"{gguf.path} is cut",
                    expected=f"{tensor.n_bytes} bytes of {name}",
                    found="the end",
                    fix="download the file again",
                )
            yield np.frombuffer(data, np.uint8).reshape(count, row_bytes)


def as_float32(gguf: Gguf, name: str, piece: "np.ndarray") -> "np.ndarray":
    """The numbers of a piece, [rows, columns]."""
    import numpy as np
    from gguf import dequantize

    return np.ascontiguousarray(dequantize(piece, gguf.tensors[name].tensor_type), dtype="<f4")
