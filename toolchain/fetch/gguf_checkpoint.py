"""A Hugging Face folder from a GGUF file: config, tokenizer, and weights under their Hugging Face names.

`model.hf` says which tensors the config's model has, the `gguf` package what llama.cpp calls each.
Blocks are dequantized to float32, F32, F16 and BF16 stay as they are, a few rows at a time, so that
the peak is some rows and not the model. Every tensor of the model comes from the file and every
tensor of the file is used, or nothing is written. A head tied to the embedding is stored once.

Rows of q and k that were permuted for adjacent rotary pairs go back: for each head [D/2, 2] -> [2, D/2].
That leaves every norm and every score of an unrotated product alone, so a missing one shows only as
a bad perplexity.
"""

import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolchain.artifact import dump_json
from toolchain.errors import DtoolError, name_list
from toolchain.fetch.download import Report
from toolchain.fetch.gguf_architectures import architecture_of, config_from_gguf
from toolchain.fetch.gguf_file import INSTEAD, PLAIN_TYPES, Gguf, as_float32, open_gguf, read_pieces
from toolchain.fetch.gguf_keys import foreign_keys
from toolchain.fetch.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import numpy as np

BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a Hugging Face tensor is in the file: rows `first`.. of one tensor, to be put in order by `heads`."""

    name: str
    shape: tuple[int, ...]
    first: int = 0
    head_dim: int = 0
    offset: float = 0.0

    def code(self, gguf: Gguf) -> str:
        """The safetensors format it is written in."""
        kind = gguf.tensors[self.name].tensor_type.name
        return PLAIN_TYPES[kind][0] if kind in PLAIN_TYPES and not self.offset else "F32"


def checkpoint_from_gguf(gguf_path: Path, folder: Path, report: Report, *, weights: bool = True) -> None:
    """Fill `folder` with config.json, tokenizer files, generation_config.json and, with `weights`, model.safetensors.

    Equal GGUF bytes give equal output bytes. Raises DtoolError for a file that is no GGUF, another
    architecture, a missing or unknown tensor, metadata that is not there, or too little room.
    """
    gguf = open_gguf(gguf_path)
    config = config_from_gguf(gguf)
    sources = match_tensors(gguf, config)
    if foreign := foreign_keys(gguf):
        report(f"note: metadata of {gguf_path.name} that is not the model's own is left out: {name_list(foreign)}")
    if weights:
        _require_room(gguf, sources, folder)
    if unknown := write_tokenizer(gguf, folder, config["max_position_embeddings"]):
        report(f"note: the tokenizer of {gguf_path.name} is not one dtool knows ({unknown}); it is left out")
    token_ids = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
    write_json(folder / "config.json", config)
    if weights:
        write_weights(gguf, sources, folder / "model.safetensors")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` canonically."""
    path.write_text(dump_json(document), "utf-8")


def _require_room(gguf: Gguf, sources: dict[str, Source], folder: Path) -> None:
    needed = sum(math.prod(source.shape) * BYTES[source.code(gguf)] for source in sources.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DtoolError(
            f"there is no room to unpack {gguf.path}",
            expected=f"{needed / 1e9:.1f} GB in {folder.parent}",
            found=f"{free / 1e9:.1f} GB",
            fix="free some space, or set XDG_CACHE_HOME to a folder on a larger disk",
        )


def match_tensors(gguf: Gguf, config: dict[str, Any]) -> dict[str, Source]:
    """By Hugging Face name, in the order of the names: where each tensor of the model is in the file.

    Raises DtoolError when tensors are missing, unknown or of another shape than the config says.
    """
    from toolchain.model.hf import config_from_hf, stored_parts

    parts = stored_parts(config, config_from_hf(config, {})).values()
    shapes = {name: shape for s in parts for name, shape in zip(s.names, s.shapes, strict=True)}
    names = _gguf_names(gguf, config["num_hidden_layers"], shapes)
    absent = [f"{ours} ({theirs or 'no name'})" for ours, theirs in names.items() if theirs not in gguf.tensors]
    unknown = sorted(set(gguf.tensors) - set(names.values()) - gguf.read)
    if absent or unknown:
        raise DtoolError(
            f"the tensors of {gguf.path} are not those of its model",
            expected=f"{len(names)} tensors; {len(absent)} missing: {name_list(absent) or 'none'}",
            found=f"{len(gguf.tensors)} tensors; {len(unknown)} unknown: {name_list(unknown) or 'none'}",
            fix=INSTEAD,
        )
    return {name: _source(gguf, config, name, names[name], shapes[name]) for name in sorted(names)}


def _gguf_names(gguf: Gguf, layers: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """What llama.cpp calls each tensor; the experts of a layer are one to it."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == gguf.architecture)
    table = get_tensor_name_map(kind, layers)
    merged = {name: re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in shapes}
    return {name: table.get_name(m, try_suffixes=(".weight", ".bias")) or "" for name, m in merged.items()}


def _source(gguf: Gguf, config: dict[str, Any], name: str, theirs: str, shape: tuple[int, ...]) -> Source:
    architecture, found = architecture_of(gguf), gguf.shape(theirs)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if (found[1:] if expert else found) != shape:
        raise DtoolError(
            f"{theirs} of {gguf.path} has another shape than its metadata gives",
            expected=str(list(shape)),
            found=str(list(found)),
            fix=INSTEAD,
        )
    turned = architecture.permuted and name.split(".")[-2] in {"q_proj", "k_proj"}
    return Source(
        theirs,
        shape,
        first=int(expert.group(1)) * shape[0] if expert else 0,
        head_dim=config["head_dim"] if turned else 0,
        offset=architecture.norm_offset if name.endswith("norm.weight") else 0.0,
    )


def write_weights(gguf: Gguf, sources: dict[str, Source], path: Path) -> None:
    """model.safetensors, written a few rows at a time, in the order of the names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in sources.items():
        begin, code = end, source.code(gguf)
        end += math.prod(source.shape) * BYTES[code]
        header[name] = {"dtype": code, "shape": list(source.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to 8 bytes
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        start = stream.tell()
        for name, source in sources.items():
            for values in _values(gguf, source):
                stream.write(values.data)
            if (written := stream.tell() - start) != (end := header[name]["data_offsets"][1]):
                raise DtoolError(
                    f"{name} has another size than {gguf.path} says",
                    expected=f"{end} bytes up to its end",
                    found=str(written),
                    fix=INSTEAD,
                )


def _values(gguf: Gguf, source: Source) -> Iterator["np.ndarray"]:
    """The numbers of a tensor in the format it is written in, some rows at a time, in Hugging Face's order."""
    import numpy as np

    rows = source.shape[0] if len(source.shape) > 1 else 1
    for piece in read_pieces(gguf, source.name, source.first, rows, unit=max(source.head_dim, 1)):
        if source.code(gguf) == "F32":
            values = as_float32(gguf, source.name, piece)
        else:
            values = piece.view(PLAIN_TYPES[gguf.tensors[source.name].tensor_type.name][1])
        if source.offset:
            values = values - np.float32(source.offset)
        if source.head_dim:
            values = values.reshape(-1, 1) if len(source.shape) == 1 else values
            values = undo_rope_permutation(values, len(values) // source.head_dim)
        yield np.ascontiguousarray(values)


def undo_rope_permutation(rows_OI: "np.ndarray", heads: int) -> "np.ndarray":
    """Rows of a q or k projection from llama.cpp's order (pairs adjacent) to Hugging Face's (halves)."""
    out, width = rows_OI.shape
    half = out // heads // 2
    return rows_OI.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(out, width)
