"""How each layer keeps its keys and values, and how a manifest says so.

A layer's cache holds values of the compute type, codes with static scales (one per KV head, weights of
the model), or codes with a float32 scale for every token and KV head, which then lie in the cache beside
the codes and are written with them. Layers may differ. Imports no torch.

Legend: K KV heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolchain.formats import FORMATS

TOKEN_SUFFIX = "_token"  # noqa: S105 - no password
VALUE_PARTS, SCALE_PARTS = ("key", "value"), ("key_scale", "value_scale")
"""The tensors of one layer's cache: [batch, K, capacity, D], and with token scales float32 [batch, K, capacity]."""
SCALE_FORMAT = "float32"


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The cache of one layer: the format of its elements, and whether every token brings scales of its own."""

    dtype: str
    token_scales: bool = False

    @property
    def quantized(self) -> bool:
        """Whether it holds codes."""
        return FORMATS[self.dtype].qmax is not None

    @property
    def name(self) -> str:
        """In a word: float16, int8, int8_token."""
        return self.dtype + (TOKEN_SUFFIX if self.token_scales else "")

    @property
    def parts(self) -> tuple[str, ...]:
        """Its tensors in the order of the graph contract."""
        return (*VALUE_PARTS, *(SCALE_PARTS if self.token_scales else ()))

    def part_format(self, part: str) -> str:
        """The number format of one of its tensors."""
        return SCALE_FORMAT if part in SCALE_PARTS else self.dtype

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one token of one sequence: K and V, and their scales where tokens have some."""
        scale = FORMATS[SCALE_FORMAT].bytes if self.token_scales else 0
        return 2 * kv_heads * (head_dim * FORMATS[self.dtype].bytes + scale)


def cache_format_named(name: str) -> CacheFormat:
    """The format that calls itself `name`."""
    dtype = name.removesuffix(TOKEN_SUFFIX)
    return CacheFormat(dtype, token_scales=dtype != name)


def name_caches(caches: Sequence[CacheFormat]) -> str:
    """The caches of all layers in a few words: int8_token, or int8 with 2 of 30 layers in float16."""
    main = main_cache(caches)
    others = [cache for cache in caches if cache != main]
    return f"{main.name} with {len(others)} of {len(caches)} layers in {others[0].name}" if others else main.name


def main_cache(caches: Sequence[CacheFormat]) -> CacheFormat:
    """The quantized one, where some layers keep values."""
    return next((cache for cache in caches if cache.quantized), caches[0])


def describe_caches(caches: Sequence[CacheFormat]) -> dict[str, Any]:
    """What a manifest's `kv_contract` says of the caches: the quantized format, and the layers that keep values."""
    main = main_cache(caches)
    said: dict[str, Any] = {"dtype": main.dtype}
    if main.quantized:
        where = "in the cache: float32 [batch, kv_heads, capacity]" if main.token_scales else "in weights.safetensors"
        per = "per layer, token and KV head" if main.token_scales else "per layer and KV head"
        said |= {"token_scales": main.token_scales, "scales": f"{per}, {where}"}
    others = {i: cache.dtype for i, cache in enumerate(caches) if cache != main}
    if others:
        said["not_quantized"] = {"dtype": next(iter(others.values())), "layers": sorted(others)}
    return said


def caches_of(contract: Mapping[str, Any], layers: int) -> tuple[CacheFormat, ...]:
    """The cache of each layer, from what `describe_caches` left in a manifest."""
    main = CacheFormat(str(contract["dtype"]), bool(contract.get("token_scales", False)))
    others = contract.get("not_quantized", {"layers": ()})
    kept = set(others["layers"])
    return tuple(CacheFormat(others["dtype"]) if i in kept else main for i in range(layers))
