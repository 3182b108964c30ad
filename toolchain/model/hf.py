"""Hugging Face folders: the only file that knows model names and their config keys.

Loading is strict: every parameter is filled exactly once from the file, every tensor of the file is
used or on the short benign list, and every config key with a meaning dtool does not have is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from toolchain.errors import DtoolError, did_you_mean, name_list
from toolchain.model.config import MERGED, DecoderConfig
from toolchain.tensor_file import TensorEntry, read_header

FAMILIES = ("llama",)
BENIGN_SUFFIXES = ("rotary_emb.inv_freq",)
ROPE_KEYS = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
ROPE_TYPES = tuple(ROPE_KEYS)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the decoder: its shape, and the stored tensors whose rows it is made of, in order."""

    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]

    @property
    def dtype(self) -> str:
        """The parts' format; float32 where they differ."""
        found = {part.dtype for part in self.parts}
        return found.pop() if len(found) == 1 else "float32"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked folder: the model's config and where each parameter's bytes lie.

    `parameters` is in the decoder's order, tied matrices once, so that it does not depend on how the
    checkpoint is cut into files. `notes` are things a user should see.
    """

    path: Path
    config: DecoderConfig
    parameters: dict[str, Parameter]
    tokenizer_files: tuple[Path, ...]
    notes: tuple[str, ...]


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, its tensors matched with the decoder's parameters one to one.

    Raises DtoolError: no checkpoint, unknown family or RoPE type, missing shard, truncated file,
    missing, unknown or misshapen tensors.
    """
    if not folder.is_dir():
        raise DtoolError(
            f"{folder} is not a checkpoint",
            expected="a folder",
            found="a file" if folder.exists() else "no such folder",
        )
    document = _read_json(folder / "config.json")
    stored = _read_tensors(folder)
    config = config_from_hf(document, stored)
    notes: list[str] = []
    parameters = _match(config, stored, notes)
    files = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
    if folder / "tokenizer.json" not in files:
        notes.append("no tokenizer.json: text commands will refuse, parity and bench by token ids work")
    return Checkpoint(folder, config, parameters, files, tuple(notes))


def config_from_hf(document: dict[str, Any], stored: dict[str, TensorEntry]) -> DecoderConfig:
    """The config a `config.json` document describes; `stored` tells the dtype when it does not."""
    family = document.get("model_type")
    if family not in FAMILIES:
        raise DtoolError(
            f"model_type {family!r} is not supported",
            expected=", ".join(FAMILIES),
            found=str(family),
            fix=did_you_mean(str(family), FAMILIES),
        )
    try:
        heads = document["num_attention_heads"]
        fields = {
            "vocab_size": document["vocab_size"],
            "hidden_size": document["hidden_size"],
            "intermediate_size": document["intermediate_size"],
            "num_hidden_layers": document["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": document.get("num_key_value_heads") or heads,
            "head_dim": document.get("head_dim") or document["hidden_size"] // heads,
            "max_position_embeddings": document.get("max_position_embeddings", 2048),
            "rms_norm_eps": document.get("rms_norm_eps", 1e-6),
            "rope_theta": _rope_theta(document),
            "rope_scaling": _rope_scaling(document),
            "attention_bias": document.get("attention_bias", False),
            "mlp_bias": document.get("mlp_bias", False),
            "hidden_act": document.get("hidden_act", "silu"),
            "tie_word_embeddings": document.get("tie_word_embeddings", False),
            "dtype": _dtype(document, stored),
            "bos_token_id": document.get("bos_token_id"),
            "eos_token_ids": _ids(document.get("eos_token_id")),
        }
        return DecoderConfig.model_validate(fields)
    except KeyError as error:
        raise DtoolError("config.json is incomplete", expected=f"the key {error}", found="no such key") from error
    except pydantic.ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise DtoolError(
            "config.json describes no decoder dtool can build",
            expected="a decoder of the supported mechanisms",
            found="\n            ".join(lines)[:2000],
            fix="check config.json; dtool never builds something near it",
        ) from error
    except (ZeroDivisionError, TypeError) as error:
        raise DtoolError("config.json describes no decoder dtool can build", found=str(error)) from error


def _rope_theta(document: dict[str, Any]) -> float:
    """rope_parameters.rope_theta, then rope_theta, then the family's 10000 (precedence of transformers 5)."""
    parameters = document.get("rope_parameters") or {}
    return parameters.get("rope_theta", document.get("rope_theta", 10000.0))


def _rope_scaling(document: dict[str, Any]) -> dict[str, Any]:
    block = dict(document.get("rope_parameters") or document.get("rope_scaling") or {})
    block.pop("rope_theta", None)
    old, new = block.pop("type", None), block.pop("rope_type", None)
    rope_type = new or old or "default"
    if rope_type not in ROPE_TYPES:
        raise DtoolError(
            f"RoPE type {rope_type!r} is not supported",
            expected=", ".join(ROPE_TYPES),
            found=str(rope_type),
            fix="use a checkpoint with one of these; nothing is ever rotated plainly instead",
        )
    lacking = [key for key in ROPE_KEYS[rope_type] if key not in block]
    if lacking:
        raise DtoolError(
            f"the {rope_type} RoPE scaling is incomplete",
            expected=", ".join(ROPE_KEYS[rope_type]),
            found=f"no {', '.join(lacking)}",
            fix="complete config.json from the model's source",
        )
    if rope_type == "llama3":
        block.setdefault("original_max_position_embeddings", document.get("max_position_embeddings", 0))
    return {} if rope_type == "default" else {"rope_type": rope_type, **block}


def _dtype(document: dict[str, Any], stored: dict[str, TensorEntry]) -> str:
    """`dtype`, then the older `torch_dtype`, then what the tensors are stored as."""
    named = document.get("dtype") or document.get("torch_dtype")
    return str(named).removeprefix("torch.") if named else next(iter(stored.values())).dtype


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DtoolError(
            f"{path.parent} is not a checkpoint",
            expected=f"a Hugging Face folder with {path.name}",
            found=name_list(sorted(p.name for p in path.parent.iterdir())) or "an empty folder",
            fix="give the folder that holds config.json and *.safetensors",
        )
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DtoolError(f"{path} is not JSON", found=str(error), fix="download the file again") from error
    if not isinstance(document, dict):
        raise DtoolError(f"{path} is not a JSON object", found=type(document).__name__)
    return document


def _read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of the folder: by the index alone where there is one, else of the single file."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        return _read_shards(folder, _read_json(index_path))
    single = folder / "model.safetensors"
    if not single.is_file():
        raise DtoolError(
            f"{folder} holds no weights",
            expected="model.safetensors or model.safetensors.index.json",
            found=name_list(sorted(p.name for p in folder.iterdir())),
            fix="convert other formats to safetensors first",
        )
    return read_header(single)


def _read_shards(folder: Path, index: dict[str, Any]) -> dict[str, TensorEntry]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise DtoolError(f"{folder}/model.safetensors.index.json has no weight_map", fix="download the index again")
    stored: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        names = [name for name, file in weight_map.items() if file == shard]
        if not (folder / shard).is_file():
            raise DtoolError(
                f"a shard of {folder} is missing",
                expected=f"{shard} with {len(names)} tensors",
                found="no such file",
                fix="download the shard again",
            )
        entries = read_header(folder / shard)
        absent = [name for name in names if name not in entries]
        if absent:
            raise DtoolError(f"{folder / shard} lacks {len(absent)} tensors", expected=name_list(absent))
        stored |= {name: entries[name] for name in names}
    return stored


def _match(config: DecoderConfig, stored: dict[str, TensorEntry], notes: list[str]) -> dict[str, Parameter]:
    """Pair every parameter with its stored tensors one to one, or say exactly what does not fit."""
    stored = dict(stored)
    if config.tie_word_embeddings:
        if EMBEDDING not in stored and HEAD in stored:
            stored[EMBEDDING] = stored.pop(HEAD)
        elif stored.pop(HEAD, None) is not None:
            notes.append(f"the config ties {HEAD} to {EMBEDDING}: the stored copy of the head is not used")
    expected = stored_shapes(config)
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected and not name.endswith(BENIGN_SUFFIXES)]
    if missing or extra:
        raise DtoolError(
            "the checkpoint's tensors are not those of its config",
            expected=f"{len(expected)} tensors; {len(missing)} missing: {name_list(missing) or 'none'}",
            found=f"{len(stored)} tensors; {len(extra)} unknown: {name_list(extra) or 'none'}",
            fix="check config.json against the weights; nothing was written",
        )
    wrong = [f"{n} {list(stored[n].shape)} (expected {list(s)})" for n, s in expected.items() if stored[n].shape != s]
    if wrong:
        raise DtoolError("tensors have another shape than the config gives", found=name_list(wrong))
    benign = sorted(name for name in stored if name not in expected)
    if benign:
        notes.append(f"{len(benign)} stored rotary tables not used: they are computed anew")
    return {
        name: Parameter(shape, tuple(stored[part] for part in part_names(name)))
        for name, shape in parameter_shapes(config).items()
    }


def part_names(name: str) -> list[str]:
    """The checkpoint's names of a parameter's parts: itself, or those of a merged matrix."""
    for merged, parts in MERGED.items():
        if f".{merged}." in name:
            return [name.replace(f".{merged}.", f".{part}.") for part in parts]
    return [name]


def stored_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint must hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        rows = config.part_sizes(name) or shape[:1]
        shapes |= {part: (n, *shape[1:]) for part, n in zip(part_names(name), rows, strict=True)}
    return shapes


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the decoder, in order, a tied head left out."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, hidden)}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.qkv_proj", width + 2 * kv_width, hidden, config.attention_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, width, config.attention_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_up_proj", 2 * inner, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (vocab, hidden)
    return shapes
