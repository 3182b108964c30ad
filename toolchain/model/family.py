"""How a Hugging Face family is described, and what follows from a description. Knows no model.

A family is what differs from Llama: constant fields of `DecoderConfig`, a function for those that
depend on config keys, what a missing key means, and a map from the decoder's modules to the stored
ones. `hf` holds the table of all families; CONTRIBUTING.md shows how one is added.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic

from toolchain.errors import DtoolError, name_list
from toolchain.model.config import DecoderConfig
from toolchain.model.config_keys import Document, Keys, head_size, rope_fields, rotary_size, token_ids
from toolchain.model.parameters import parameter_shapes
from toolchain.tensor_file import TensorEntry

Fields = dict[str, Any]
Shape = tuple[int, ...]
Names = Mapping[str, str | tuple[str, ...]]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds for one parameter: names and shapes, and how one tensor becomes the parameter.

    `transposed`: the tensor is [in, out].
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    arrange: Callable[[Any], Any] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How a stored tensor differs from the parameter: its shape, and the way back (torch in, torch out)."""

    stored_shape: Callable[[DecoderConfig, Shape], Shape]
    arrange: Callable[[DecoderConfig, Any], Any]


def _ungroup(config: DecoderConfig, tensor: Any) -> Any:
    import torch

    groups = config.num_attention_heads // config.num_key_value_heads
    grouped = tensor.reshape(config.num_key_value_heads, groups + 2, config.head_dim, *tensor.shape[1:])
    parts = grouped[:, :groups], grouped[:, groups : groups + 1], grouped[:, groups + 1 :]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


TRANSPOSED = Layout(lambda _, shape: shape[::-1], lambda _, tensor: tensor.mT if tensor.ndim > 1 else tensor)
"""[in, out] instead of [out, in]; vectors are the same."""
GROUPED = Layout(lambda _, shape: shape, _ungroup)
"""qkv by KV head: its query heads, its key, its value, then the next."""
BY_HEAD = Layout(
    lambda config, shape: (shape[0] // config.head_dim, config.head_dim), lambda _, tensor: tensor.flatten()
)
"""A weight per head and dim as a matrix [heads, D]."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type.

    `fixed` and `fields`: what differs from Llama in `DecoderConfig`, always and by the config's keys.
    `aliases`: its names of common keys. `defaults`: what a missing key means, by its common name.
    `names`: by the decoder's module, the stored module, or those whose rows follow one another; `{e}`
    runs over the experts, `{h}` over the heads. `layer`: where layer `{i}` is stored; `root`: what a
    trunk saved without its head leaves out. `benign`: stored tables that are computed anew. `inert`:
    keys that change nothing about inference. `ignored`: common keys that its models do not have.
    """

    fields: Callable[[Keys], Fields] = lambda _: {}
    fixed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Names | Callable[[DecoderConfig], Names] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    layer: str = "model.layers.{i}"
    root: str = "model."
    benign: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


LLAMA_NAMES: Names = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.experts.gate_up_proj": ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "mlp.experts.down_proj": "mlp.experts.{e}.down_proj",
}


COMMON: dict[str, Callable[[Keys], Any]] = {
    "vocab_size": lambda c: c.size("vocab_size"),
    "hidden_size": lambda c: c.size("hidden_size"),
    "intermediate_size": lambda c: c.size("intermediate_size"),
    "num_hidden_layers": lambda c: c.layers,
    "num_attention_heads": lambda c: c.size("num_attention_heads"),
    "num_key_value_heads": lambda c: c.size("num_key_value_heads", c.size("num_attention_heads")),
    "head_dim": head_size,
    "max_position_embeddings": lambda c: c.size("max_position_embeddings", 2048),
    "rotary_dim": rotary_size,
    "rope": rope_fields,
    "norm_eps": lambda c: c.real("rms_norm_eps", 1e-6, positive=True),
    "qkv_bias": lambda c: c.flag("attention_bias", False),
    "o_bias": lambda c: c.flag("attention_bias", False),
    "mlp_bias": lambda c: c.flag("mlp_bias", False),
    "hidden_act": lambda c: c.one_of("hidden_act", ACTIVATIONS, "silu"),
    "tie_word_embeddings": lambda c: c.flag("tie_word_embeddings", False),
    "bos_token_id": lambda c: c.get("bos_token_id"),
    "eos_token_ids": lambda c: token_ids(c.get("eos_token_id")),
}
"""What a family says nothing about is spelled as in Llama's configs, and means the same."""


def read_config(
    family: Family,
    document: Document,
    stored: Mapping[str, TensorEntry],
    context_len: int | None = None,
    notes: list[str] | None = None,
) -> DecoderConfig:
    """The config a document of this family describes; see `hf.config_from_hf`."""
    keys = Keys(document, family.aliases, family.defaults, family.inert, family.ignored)
    try:
        unknown_class = _require_causal(keys)
        keys.only("quantization_config", None)
        fields = {"dtype": _dtype(document, stored), **family.fixed, **family.fields(keys)}
        common = {name: read(keys) for name, read in COMMON.items() if name not in fields}
        config = _with_context(DecoderConfig.model_validate(common | fields), context_len)
    except pydantic.ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']} (got {e['input']!r:.80})" for e in error.errors()
        ]
        raise DtoolError(
            "config.json describes no decoder dtool can build",
            expected="a decoder of the supported mechanisms",
            found="\n".join(lines)[:2000],
            fix="check config.json; dtool never builds something near it",
        ) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DtoolError(
            "config.json describes no decoder dtool can build",
            expected="a decoder of the supported mechanisms",
            found=str(error),
            fix="check config.json; dtool never builds something near it",
        ) from error
    if notes is not None:
        if unread := keys.unread():
            notes.append(f"config keys that dtool does not know: {name_list(unread, 8)}")
        notes += unknown_class + _token_notes(config)
        if ignored := sorted(key for key in keys.ignored if document.get(key) is not None):
            notes.append(f"config keys that models of this family do not have, left out: {name_list(ignored)}")
        if config.context_len < config.max_position_embeddings:
            notes.append(f"serves {config.context_len} of {config.max_position_embeddings} positions (context_len)")
    return config


def _require_causal(keys: Keys) -> list[str]:
    """Refuse a model that is no causal decoder with a language head; a note on a class of an unknown kind."""
    keys.only("is_encoder_decoder", False)
    keys.only("add_cross_attention", False)
    classes = keys.given("architectures", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise DtoolError(
            "architectures of config.json is no list of names",
            expected='["...ForCausalLM"]',
            found=repr(classes)[:80],
            fix="correct it in config.json",
        )
    if not classes or any(name.endswith(("ForCausalLM", "LMHeadModel", "Model")) for name in classes):
        return []
    if any("For" in name for name in classes):
        raise DtoolError(
            "the checkpoint is no causal language model",
            expected="architectures with a class ...ForCausalLM",
            found=name_list(classes),
            fix="give the model's causal checkpoint; this one has another head",
        )
    return [f"the config's architectures say {name_list(classes)}: taken as a causal language model"]


def _token_notes(config: DecoderConfig) -> list[str]:
    """A note on special tokens that no text can hold."""
    named = {"bos_token_id": [config.bos_token_id], "eos_token_id": config.eos_token_ids}
    odd = [f"{key} {i}" for key, ids in named.items() for i in ids if i is not None and not 0 <= i < config.vocab_size]
    return [f"outside the vocabulary of {config.vocab_size} tokens, so never met: {name_list(odd)}"] if odd else []


def _dtype(document: Document, stored: Mapping[str, TensorEntry]) -> str:
    """`dtype`, then the older `torch_dtype`, then what the tensors are stored as."""
    named = document.get("dtype") or document.get("torch_dtype")
    found = (entry.dtype for entry in stored.values())
    return str(named).removeprefix("torch.") if named else next(found, "float32")


def _with_context(config: DecoderConfig, asked: int | None) -> DecoderConfig:
    """The config for `asked` positions; without, for all that one set of rotary frequencies can serve.

    Types whose frequencies depend on the length serve the trained context unless more is asked for.
    """
    ropes = [rope for rope in map(config.rope_named, config.rope_names) if rope is not None]
    by_length = [r for r in ropes if r.rope_type in {"dynamic", "longrope"}]
    trained = min((r.original_max_position_embeddings for r in by_length), default=config.max_position_embeddings)
    if asked is None:
        return config.model_copy(update={"context_len": min(trained, config.max_position_embeddings)})
    stretched = (int(r.factor * r.original_max_position_embeddings) for r in ropes)
    most = max(config.max_position_embeddings, *stretched, 0)
    if not 1 <= asked <= most:
        raise DtoolError(
            f"context_len {asked} is not in 1..{most}",
            expected=f"at most the {most} positions of the model",
            found=str(asked),
            fix=f"--set context_len={most}",
        )
    return DecoderConfig.model_validate(config.model_dump() | {"context_len": asked})


def stored_tensors(family: Family, config: DecoderConfig) -> dict[str, Stored]:
    """By parameter of the decoder, in order: the tensors a checkpoint of this family must hold for it."""
    own = family.names(config) if callable(family.names) else family.names
    names = {**LLAMA_NAMES, **own}
    return {n: _stored(family, names, config, n, shape) for n, shape in parameter_shapes(config).items()}


def _stored(family: Family, names: Names, config: DecoderConfig, name: str, shape: Shape) -> Stored:
    module, _, kind = name.rpartition(".")
    inner, layer = module, ""
    if module.startswith("model.layers."):
        _, _, index, inner = module.split(".", 3)
        layer = family.layer.format(i=index) + "."
    found = names.get(inner, inner)
    parts = (found,) if isinstance(found, str) else found
    rows = config.part_sizes(name) or shape[:1]
    if "{e}" in parts[0]:
        parts = tuple(part.format(e=e) for e in range(config.num_experts) for part in parts)
    elif "{h}" in parts[0]:
        rows = (config.head_dim,) * (shape[0] // config.head_dim)
        parts = tuple(parts[0].format(h=h) for h in range(len(rows)))
    full = tuple(f"{layer}{part}.{kind}" for part in parts)
    layout = family.layouts.get(inner)
    if layout is not None:
        stored_shape = layout.stored_shape(config, shape)
        return Stored(full, (stored_shape,), lambda tensor: layout.arrange(config, tensor), layout is TRANSPOSED)
    return Stored(full, tuple((n, *shape[1:]) for n in (rows if len(parts) > 1 else shape[:1])))
