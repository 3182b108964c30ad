"""Reading a config.json: every key that is asked for is remembered, so that none is silently ignored.

Knows the spellings of Hugging Face configs, old and new, and no model. As in transformers 5 what a RoPE
block says goes before the top-level keys; its two spellings, `rope_parameters` and `rope_scaling`, may
both be there if they agree.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from toolchain.errors import DtoolError, name_list
from toolchain.model.config import MAX_LAYERS, RopeType

Document = dict[str, Any]

INERT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "transformers_version", "use_cache", "initializer_range",
        "pad_token_id", "pretraining_tp", "model_type", "attention_dropout", "hidden_dropout", "resid_pdrop",
        "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout_prob", "activation_dropout", "layerdrop",
        "embedding_dropout", "residual_dropout", "classifier_dropout", "router_aux_loss_coef", "output_router_logits",
        "router_jitter_noise", "init_std", "problem_type", "id2label", "label2id", "task_specific_params",
        "return_dict", "output_attentions", "output_hidden_states", "torchscript", "is_encoder_decoder",
        "chunk_size_feed_forward", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "_attn_implementation",
        "cache_implementation", "prefix", "sep_token_id", "is_decoder", "add_cross_attention", "tie_encoder_decoder",
        "gradient_checkpointing", "tokenizer_class", "decoder_start_token_id", "keys_to_ignore_at_inference",
        "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty",
    }
)  # fmt: skip
"""Keys that change nothing about inference, or that are read for every model."""

ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        (),
        (
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
}  # fmt: skip
"""The fields that each RoPE type must have, and those it may have."""
ROPE_TYPES = get_args(RopeType)
ROPE_SYNONYMS = {"su": "longrope"}
"""Old names of types."""


MAX_SIZE = 2**31 - 1
FULL, SLIDING = "full_attention", "sliding_attention"
SHARE = "partial_rotary_factor"


class Keys:
    """The keys of one config.json, and which of them were read.

    `aliases`: this family's names of common keys, which go first. `defaults`: what a missing key means,
    by its common name. `inert`: more keys that change nothing. `ignored`: common keys that the family's
    models do not have: they are as good as missing.
    """

    def __init__(
        self,
        document: Document,
        aliases: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        inert: tuple[str, ...] = (),
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.document, self.aliases, self.defaults = document, aliases or {}, defaults or {}
        self.read: set[str] = {*INERT, *inert}
        self.ignored = frozenset(ignored)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, null too; the family's default, or this one, where the key is missing."""
        names = tuple(name for name in (self.aliases.get(key, key), key) if name not in self.ignored)
        self.read.update(names)
        found = [self.document[name] for name in names if name in self.document]
        return found[0] if found else self.defaults.get(key, default)

    def given(self, key: str, default: Any) -> Any:
        """The value; `default` where the key is null, or missing and without a default of the family."""
        value = self.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE, least: int = 1) -> int:
        """A positive integer. Raises DtoolError where the value is none, or missing without a default."""
        value, name = self.given(key, default), self.aliases.get(key, key)
        if value is None:
            names = " or ".join(dict.fromkeys((name, key)))
            raise DtoolError(
                "config.json is incomplete",
                expected=f"the key {names}",
                found="no such key",
                fix="download config.json again, or add the key as the model's authors give it",
            )
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _no(name, "size", f"{least}..{most}", value)
        return value

    def real(self, key: str, default: float, *, positive: bool = False) -> float:
        """A number, above zero where it must be `positive`. Raises DtoolError for any other value."""
        value, name = self.given(key, default), self.aliases.get(key, key)
        if not isinstance(value, int | float) or isinstance(value, bool) or (positive and not value > 0):
            raise _no(name, "number", "one above zero" if positive else "one without quotes", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises DtoolError for any other value, of which "no" would be true."""
        value = self.given(key, default)
        if not isinstance(value, bool):
            raise _no(self.aliases.get(key, key), "truth value", "true or false, without quotes", value)
        return value

    def counts(self, key: str, default: list[int]) -> list[int]:
        """A list of integers, or of truth values. Raises DtoolError for any other value."""
        value = self.given(key, default)
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            raise _no(self.aliases.get(key, key), "list of integers", "numbers without quotes", value)
        return value

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def only(self, key: str, allowed: Any) -> None:
        """Refuse any value but `allowed`, which is the only one that is supported, and null."""
        found = self.given(key, allowed)
        if found != allowed:
            raise DtoolError(
                f"config.json sets {key}, which is not supported for this model",
                expected=f"{key} {allowed!r}",
                found=repr(found)[:80],
                fix="use a checkpoint without it; dtool never leaves a mechanism out",
            )

    def one_of(self, key: str, meanings: dict[Any, Any], default: Any) -> Any:
        """What the value means. Raises DtoolError for a value without a meaning, naming those that have one."""
        found = self.given(key, default)
        if not isinstance(found, str) or found not in meanings:
            raise DtoolError(
                f"{self.aliases.get(key, key)} {found!r:.80} is not supported",
                expected=", ".join(map(str, meanings)),
                found=repr(found)[:80],
                fix="use a checkpoint with one of these; nothing near it is ever computed instead",
            )
        return meanings[found]

    def unread(self) -> list[str]:
        """Keys that nothing asked for, nulls and ignored ones apart."""
        return sorted(k for k, v in self.document.items() if k not in self.read | self.ignored and v is not None)


def _no(name: str, kind: str, expected: str, value: Any) -> DtoolError:
    fix = "mend config.json by the model's source"
    return DtoolError(f"{name} of config.json is no {kind}", expected=expected, found=repr(value)[:80], fix=fix)


def windows(keys: Keys, window: int | None, slides: Callable[[int], bool]) -> list[int]:
    """The window of every layer, 0 for none: by `layer_types` where it is given, else by the family's rule."""
    kinds = keys.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if window is not None and slides(i) else FULL for i in range(keys.layers)]
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown or (SLIDING in kinds and (type(window) is not int or window < 1)):
        raise DtoolError(
            "config.json asks for a kind of attention that is not supported",
            expected=f"{FULL}, or {SLIDING} with a sliding_window of at least 1",
            found=name_list(map(str, unknown)) if unknown else f"{SLIDING} with {window!r}",
            fix="check layer_types and sliding_window in config.json; dtool never builds something near it",
        )
    return [window or 0 if kind == SLIDING else 0 for kind in kinds]


def head_size(keys: Keys) -> int:
    """Elements of one head."""
    return keys.size("head_dim", keys.size("hidden_size") // keys.size("num_attention_heads"))


def rotary_size(keys: Keys) -> int:
    """Leading elements of a head that are rotated: a share of it in families that have a default for the share."""
    share = rope_block(keys, FULL).get(SHARE, keys.given(SHARE, 1.0))
    if not isinstance(share, int | float) or isinstance(share, bool):
        raise _no(SHARE, "number", "one without quotes", share)
    if SHARE not in keys.defaults and share != 1:
        raise DtoolError(
            f"config.json sets {SHARE}, but this family rotates whole heads",
            expected=f"{SHARE} of 1, or none",
            found=str(share),
            fix="remove it, or correct model_type in config.json",
        )
    return int(head_size(keys) * share)


def rope_block(keys: Keys, layer_type: str | None = None) -> Document:
    """What the document's RoPE blocks say, nulls left out; of one layer type where they are nested.

    Where they are not they speak of full attention. Raises DtoolError when the two contradict each other.
    """
    newer, older = (_block_part(keys.get(name), layer_type) for name in ("rope_parameters", "rope_scaling"))
    clash = sorted(name for name in newer.keys() & older.keys() if newer[name] != older[name])
    if clash:
        raise DtoolError(
            "rope_parameters and rope_scaling contradict each other",
            expected=", ".join(f"{name} {newer[name]!r}" for name in clash),
            found=", ".join(f"{name} {older[name]!r}" for name in clash),
            fix="remove the wrong one from config.json",
        )
    return newer | older


def _block_part(block: Any, layer_type: str | None) -> Document:
    if not block:
        return {}
    if not isinstance(block, dict):
        raise DtoolError(
            "the RoPE block of config.json is not an object",
            expected="{ ... }",
            found=repr(block)[:80],
            fix="correct it in config.json",
        )
    if layer_type is not None:
        nested = any(isinstance(value, dict) for value in block.values())
        block = (block.get(layer_type) or {}) if nested else block if layer_type == FULL else {}
    block = {name: value for name, value in dict(block).items() if value is not None}
    old_name = block.pop("type", None)
    return block if old_name is None else {"rope_type": old_name} | block


def rope_fields(keys: Keys, layer_type: str | None = None, theta_key: str = "rope_theta") -> Document:
    """The fields of `Rope`, of one layer type where they differ; `theta_key`: where the base stands outside a block.

    Raises DtoolError for an unknown type, naming the supported ones, and for missing or unknown fields.
    """
    block = rope_block(keys, layer_type)
    named = block.pop("rope_type", "default")
    rope_type = ROPE_SYNONYMS.get(named, named)
    if rope_type not in ROPE_FIELDS:
        raise DtoolError(
            f"RoPE type {rope_type!r} is not supported",
            expected=", ".join(ROPE_TYPES),
            found=str(rope_type),
            fix="use a checkpoint with one of these; nothing is ever rotated plainly instead",
        )
    outside = keys.given(theta_key, 10000.0)
    theta = block.pop("rope_theta", outside)
    block.pop(SHARE, None)
    needed, optional = ROPE_FIELDS[rope_type]
    _check_rope(rope_type, block, needed, optional)
    fields = {"rope_theta": theta, "rope_type": rope_type} | block
    longest, original = keys.size("max_position_embeddings", 2048), "original_max_position_embeddings"
    trained = None if keys.get(original) is None else keys.size(original)
    if rope_type in {"yarn", "llama3", "longrope"}:
        if trained is not None:  # some models keep it beside the block, where it wins
            fields[original] = trained
        fields.setdefault(original, longest)
        if type(fields[original]) is not int or fields[original] < 1:
            raise _no(original, "size", f"1..{MAX_SIZE}", fields[original])
    if rope_type == "dynamic":
        fields[original] = longest
    if rope_type in {"yarn", "longrope"}:
        fields.setdefault("factor", longest / fields[original])
    return fields


def _check_rope(rope_type: str, block: Document, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    lacking = [key for key in needed if key not in block]
    unknown = [key for key in block if key not in (*needed, *optional)]
    if lacking or (unknown and rope_type != "default"):
        raise DtoolError(
            f"the {rope_type} RoPE scaling is {'incomplete' if lacking else 'not understood'}",
            expected=", ".join(needed) + (f" (and {', '.join(optional)})" if optional else ""),
            found=f"no {', '.join(lacking)}" if lacking else f"unknown {name_list(unknown)}",
            fix="complete config.json from the model's source",
        )
    if unknown:
        raise DtoolError(
            "the RoPE block names no type but has fields of one",
            expected="rope_type (or type) beside them",
            found=name_list(unknown),
            fix=f"name the type: {', '.join(ROPE_TYPES)}",
        )


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids or null, as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
