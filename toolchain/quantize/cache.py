"""Which layers keep a quantized cache, by exact name, and in what format."""

from toolchain.errors import DtoolError
from toolchain.model.caches import CacheFormat
from toolchain.model.config import DecoderConfig
from toolchain.quantize.plan import match_patterns
from toolchain.recipe import Recipe

ATTENTION_NAME = "model.layers.{}.self_attn"


def plan_caches(config: DecoderConfig, recipe: Recipe, compute_dtype: str) -> tuple[CacheFormat, ...]:
    """The cache of every layer: the recipe's, or the compute type where it is left out.

    Raises DtoolError for a pattern that matches no layer, and for patterns that leave no layer.
    """
    asked, plain = recipe.kv_cache, CacheFormat(compute_dtype)
    names = [ATTENTION_NAME.format(i) for i in range(config.num_hidden_layers)]
    kept = match_patterns("kv_cache.skip", asked.skip, names, what="layer")
    if asked.format == "none":
        return (plain,) * len(names)
    if len(kept) == len(names):
        raise DtoolError(
            "kv_cache.skip leaves no layer with a quantized cache",
            expected=f"fewer than all {len(names)} layers",
            found=", ".join(asked.skip),
            fix="skip fewer, or set kv_cache.format to none",
        )
    quantized = CacheFormat(asked.format, token_scales=asked.granularity == "token")
    return tuple(plain if name in kept else quantized for name in names)
