"""A checkpoint folder opened strictly: every parameter is filled exactly once from the file.

Every stored tensor is used or on the family's short benign list; anything else stops the run with
counts and names. What the names mean stands in `hf`, how a file is read in `tensor_file` and
`pickle_file`; this module only pairs them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.artifact import read_json
from toolchain.errors import DtoolError, name_list
from toolchain.formats import COMPUTE_FORMATS
from toolchain.model.config import DecoderConfig
from toolchain.model.foreign.cache import Foreign, name_cache_scales, take_cache_scales
from toolchain.model.foreign.coded import CodedTensor, Part, gather_coded, is_zero
from toolchain.model.foreign.scheme import QUANT_FILE, Scheme, read_scheme
from toolchain.model.hf import Stored, benign_suffixes, config_from_hf, root_prefix, stored_parts
from toolchain.model.parameters import EMBEDDING, HEAD, parameter_shapes
from toolchain.model.pickle_file import read_pickle
from toolchain.tensor_file import TensorEntry, read_chunks, read_header
from toolchain.tokenizer import has_tokenizer, tokenizer_files

WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


class NoWeights(DtoolError):
    """A folder without weights, or with files that are not one whole checkpoint."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the decoder: its shape, and the stored tensors it is made of, in order.

    The rows of the parts follow one another, unless `arrange` makes the parameter from its only part.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    names: tuple[str, ...]
    arrange: Callable[[Any], Any] | None = None

    @property
    def dtype(self) -> str:
        """The parts' format; float32 where they differ."""
        found = {part.dtype for part in self.parts}
        return found.pop() if len(found) == 1 else "float32"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked folder: the model's config and where each parameter's bytes lie.

    `parameters` is in the decoder's order, tied matrices once, so that it does not depend on how the
    checkpoint is cut into files. `notes` are things a user should see. `foreign`: how it was quantized, where it was.
    """

    path: Path
    config: DecoderConfig
    parameters: dict[str, Parameter]
    tokenizer_files: tuple[Path, ...]
    notes: tuple[str, ...]
    foreign: Foreign | None = None


def open_checkpoint(folder: Path, context_len: int | None = None) -> Checkpoint:
    """The checkpoint in `folder`, its tensors matched with the decoder's parameters one to one.

    `context_len`: positions to serve, where not all that the config allows. Raises DtoolError: no
    checkpoint, unknown family or RoPE type, missing shard, truncated file, missing, unknown or
    misshapen tensors.
    """
    if not folder.is_dir():
        raise DtoolError(
            f"{folder} is not a checkpoint",
            expected="a folder",
            found="a file" if folder.exists() else "no such folder",
            fix="give the folder that holds config.json and *.safetensors, a .gguf file, or org/name of the hub",
        )
    notes: list[str] = []
    document, scheme = read_quantized_config(folder, notes)
    entries = _read_tensors(folder, notes)
    stored: dict[str, Part] = dict(entries) if scheme is None else gather_coded(entries, scheme)
    taken = {} if scheme is None else take_cache_scales(stored, scheme)
    floats = {name: part for name, part in stored.items() if not isinstance(part, CodedTensor)}
    config = config_from_hf(document, floats, context_len=context_len, notes=notes)
    stored = _rooted(root_prefix(document), stored_parts(document, config), stored, notes)
    if config.tie_word_embeddings:
        config = _settle_tie(document, config, stored, notes)
    parameters = _match(document, config, stored, notes)
    foreign = None
    if scheme is not None:
        layers = [f"model.layers.{i}.self_attn.qkv_proj.weight" for i in range(config.num_hidden_layers)]
        cache = name_cache_scales(taken, [parameters[name].names for name in layers], notes) if scheme.kv_format else {}
        foreign = Foreign(scheme, cache)
    if not has_tokenizer(folder):
        notes.append("no tokenizer.json: text commands will refuse, parity and bench by token ids work")
    return Checkpoint(folder, config, parameters, tokenizer_files(folder), tuple(notes), foreign)


def read_quantized_config(folder: Path, notes: list[str]) -> tuple[dict[str, Any], Scheme | None]:
    """What config.json says of the model, and how its checkpoint is quantized; None where it is not."""
    document = _read_json(folder / "config.json")
    beside = folder / QUANT_FILE
    return read_scheme(document, _read_json(beside) if beside.is_file() else None, notes)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DtoolError(
            f"{path.parent} is not a checkpoint",
            expected=f"a Hugging Face folder with {path.name}",
            found=name_list(sorted(p.name for p in path.parent.iterdir())) or "an empty folder",
            fix="give the folder that holds config.json and *.safetensors, or a .gguf file itself",
        )
    document = read_json(path, fix="download the file again")
    if not isinstance(document, dict):
        raise DtoolError(
            f"{path} is not a JSON object",
            expected="{ ... }",
            found=type(document).__name__,
            fix="download the file again",
        )
    return document


def _read_tensors(folder: Path, notes: list[str]) -> dict[str, TensorEntry]:
    """All tensors of the folder, by an index alone where there is one, safetensors before pickles."""
    for index, single, read in (
        ("model.safetensors.index.json", "model.safetensors", read_header),
        ("pytorch_model.bin.index.json", "pytorch_model.bin", read_pickle),
    ):
        if (folder / index).is_file():
            stored = _read_shards(folder, index, read)
        elif (folder / single).is_file():
            stored = read(folder / single)
        elif shards := _find_shards(folder, index, single):
            stored = _read_unlisted(shards, read)
            notes.append(f"no {index}: all {len(shards)} shards are here, and are read by their names")
        else:
            continue
        if not stored:
            raise DtoolError(
                f"{folder} holds no tensors",
                expected="weights",
                found="an empty index or file",
                fix="download the weights again",
            )
        used = {entry.path.name for entry in stored.values()}
        unread = sorted(p.name for p in folder.iterdir() if p.suffix in WEIGHT_FILES and p.name not in used)
        if unread:
            notes.append(f"weights are read from {name_list(sorted(used), 2)}, not from {name_list(unread)}")
        return stored
    gguf = next((p.name for p in sorted(folder.glob("*.gguf"))), None)
    raise NoWeights(
        f"{folder} holds no weights",
        expected="model.safetensors or pytorch_model.bin, or the index of one",
        found=name_list(sorted(p.name for p in folder.iterdir())),
        fix=f"give the file {folder / gguf} itself" if gguf else "convert other formats to safetensors first",
    )


def _find_shards(folder: Path, index: str, single: str) -> list[Path]:
    """The files of the one whole set of shards that lies in a folder without an index; none where there is no shard.

    Their names say how many there are: model-00002-of-00003.safetensors. Raises NoWeights for a set that is not
    whole, and for more than one, of which only the index could say which is the model.
    """
    stem, end = Path(single).stem, Path(single).suffix
    sets: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob(f"{stem}-*-of-*{end}")):
        if found := re.fullmatch(rf"{re.escape(stem)}-(\d+)-of-(\d+){re.escape(end)}", path.name):
            sets.setdefault(int(found[2]), {})[int(found[1])] = path
    whole = [list(shards.values()) for count, shards in sets.items() if set(shards) == set(range(1, count + 1))]
    if not sets or len(whole) == len(sets) == 1:
        return whole[0] if whole else []
    lines = [
        f"{len(shards)} of {count}: {name_list([p.name for p in shards.values()], 3)}" for count, shards in sets.items()
    ]
    raise NoWeights(
        f"{folder} has shards and no {index}",
        expected=f"{index}, or all shards of one set",
        found="\n".join(lines),
        fix="download what is missing" if len(sets) == 1 else f"download {index}, or move the other sets away",
    )


def _read_unlisted(shards: list[Path], read: Callable[[Path], dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors of all shards. Raises DtoolError for one that two of them hold."""
    stored: dict[str, TensorEntry] = {}
    for shard in shards:
        entries = read(shard)
        if twice := [name for name in entries if name in stored]:
            raise DtoolError(
                f"{len(twice)} tensors are in two shards of {shard.parent}",
                expected="every tensor in one shard",
                found=f"{name_list(twice)} in {stored[twice[0]].path.name} and {shard.name}",
                fix="download the shards again, with their index",
            )
        stored |= entries
    return stored


def _read_shards(folder: Path, index: str, read: Callable[[Path], dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    weight_map = _read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DtoolError(
            f"{folder / index} has no weight_map of file names",
            expected='"weight_map": {tensor: file, ...}',
            found=repr(weight_map)[:80],
            fix="download the index again",
        )
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, []).append(name)
    _require_shards(folder, index, shards)
    stored: dict[str, TensorEntry] = {}
    for shard, names in shards.items():
        entries = read(folder / shard)
        if absent := [name for name in names if name not in entries]:
            raise DtoolError(
                f"{folder / shard} lacks {len(absent)} tensors",
                expected=name_list(absent),
                found=f"{len(entries)} others",
                fix=f"download the shard and {index} again, from one revision",
            )
        stored |= {name: entries[name] for name in names}
    return stored


def _require_shards(folder: Path, index: str, shards: dict[str, list[str]]) -> None:
    """Refuse shards that lie elsewhere or are absent, before one is opened."""
    foreign = [shard for shard in shards if Path(shard).name != shard or shard in {"", ".."}]
    if foreign:
        raise DtoolError(
            f"{folder / index} names files outside its folder",
            expected="names of files beside it",
            found=name_list(foreign),
            fix="download the index again",
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise NoWeights(
            f"{len(missing)} of the {len(shards)} shards of {folder} are missing",
            expected=name_list(f"{shard} with {len(shards[shard])} tensors" for shard in missing),
            found="no such file",
            fix="download what is missing",
        )


def _match(
    document: dict[str, Any], config: DecoderConfig, stored: dict[str, Part], notes: list[str]
) -> dict[str, Parameter]:
    """Pair every parameter with its stored tensors one to one, or say exactly what does not fit."""
    wanted = stored_parts(document, config)
    expected = {name: shape for s in wanted.values() for name, shape in zip(s.names, s.shapes, strict=True)}
    benign = benign_suffixes(document)
    missing = [name for name in expected if name not in stored]
    blank = [name for name in stored if name not in expected and _is_blank_bias(name, stored)]
    extra = [name for name in stored if name not in expected and not name.endswith(benign) and name not in blank]
    if missing or extra:
        raise DtoolError(
            "the checkpoint's tensors are not those of its config",
            expected=f"{len(expected)} tensors; {len(missing)} missing: {name_list(missing) or 'none'}",
            found=f"{len(stored)} tensors; {len(extra)} unknown: {name_list(extra) or 'none'}",
            fix="check config.json against the weights; nothing was written",
        )
    if turned := [s.names[0] for s in wanted.values() if s.transposed and isinstance(stored[s.names[0]], CodedTensor)]:
        raise DtoolError(
            "codes of matrices that this family stores as [in, out] are not supported",
            expected="matrices of floats",
            found=name_list(turned),
            fix="give the checkpoint that was not quantized",
        )
    wrong = [name for name, shape in expected.items() if stored[name].shape != shape]
    if wrong:
        raise DtoolError(
            "tensors have another shape than the config gives",
            expected=name_list(f"{name} {list(expected[name])}" for name in wrong),
            found=name_list(f"{name} {list(stored[name].shape)}" for name in wrong),
            fix="check config.json against the weights; nothing was written",
        )
    coded = [f"{name} {stored[name].dtype}" for name in expected if stored[name].dtype not in COMPUTE_FORMATS]
    if coded:
        raise DtoolError(
            "weights are stored as codes, not as numbers",
            expected=f"one of {', '.join(COMPUTE_FORMATS)}",
            found=f"{len(coded)} tensors: {name_list(coded)}",
            fix="give the checkpoint that was not quantized",
        )
    if blank:
        notes.append(f"{len(blank)} biases that the model does not have are zero, and left out: {name_list(blank, 2)}")
    unused = sorted(name for name in stored if name not in expected and name not in blank)
    if unused:
        notes.append(f"{len(unused)} stored tables not used, as they are computed anew: {name_list(unused)}")
    shapes = parameter_shapes(config)
    return {
        name: Parameter(shapes[name], tuple(stored[part] for part in s.names), s.names, s.arrange)
        for name, s in wanted.items()
    }


def _is_blank_bias(name: str, stored: dict[str, Part]) -> bool:
    """Whether a tensor is a bias of zeros, which some quantizers store with every matrix."""
    module, _, kind = name.rpartition(".")
    bias = stored[name]
    coded = kind == "bias" and isinstance(stored.get(f"{module}.weight"), CodedTensor)
    return coded and not isinstance(bias, CodedTensor) and is_zero(bias)


def _rooted(root: str, wanted: dict[str, Stored], stored: dict[str, Part], notes: list[str]) -> dict[str, Part]:
    """The tensors under their full names: a trunk saved without its head leaves out the root of the names."""
    rooted = {name for s in wanted.values() for name in s.names if name.startswith(root)}
    if not root or any(name.startswith(root) for name in stored) or not any(root + name in rooted for name in stored):
        return dict(stored)
    notes.append(f"the tensors' names lack {root!r}: taken as those of the model without its head")
    return {root + name if root + name in rooted else name: entry for name, entry in stored.items()}


def _settle_tie(
    document: dict[str, Any], config: DecoderConfig, stored: dict[str, Part], notes: list[str]
) -> DecoderConfig:
    """The config with the head tied, or untied where the checkpoint holds a head of its own.

    The one matrix may be stored under either name, or under both. Two that differ are two matrices, whatever
    the config says: so transformers 5 loads them.
    """
    untied = config.model_copy(update={"tie_word_embeddings": False})
    parts = stored_parts(document, untied)
    (embedding,), (head,) = parts[EMBEDDING].names, parts[HEAD].names
    if head not in stored:
        return config
    if embedding not in stored:
        stored[embedding] = stored.pop(head)
        return config
    if _same_bytes(stored[embedding], stored[head]):
        del stored[head]
        notes.append(f"the config ties {head} to {embedding}: the stored copy, which is the same, is not used")
        return config
    notes.append(f"the config ties {head} to {embedding}, but the stored ones differ: they are kept apart")
    return untied


def _same_bytes(a: Part, b: Part) -> bool:
    if isinstance(a, CodedTensor) or isinstance(b, CodedTensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(x == y for x, y in zip(read_chunks(a, holes=False), read_chunks(b, holes=False), strict=True))
