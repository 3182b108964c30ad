"""Position tables: rotary angles for every position that is served, and sinusoidal embeddings.

    default    f_i = theta^(-2i / d)                                    RoFormer, arXiv 2104.09864 section 3.4.2
    linear     f_i / factor                                             position interpolation, arXiv 2306.15595
    ntk        theta' = theta * factor^(d / (d - 2))                    NTK-aware (bloc97), arXiv 2306.15595 app. A
    dynamic    theta' = theta * (factor * L / L0 - factor + 1)^(d / (d - 2)),  L = max(context_len, L0)
    yarn       f_i * (1 - r_i) + f_i / factor * r_i, r ramps over pairs   arXiv 2309.00071 eq. 17-22
    llama3     as yarn, the ramp over wavelengths                       Llama 3.1
    longrope   f_i / short_i, or f_i / long_i beyond L0                 arXiv 2402.13753

L0 is the context of the pre-training. YaRN and LongRoPE also multiply cosine and sine by an attention
factor, so scores grow by its square.

Where frequencies depend on the length of the text (dynamic, longrope), keys in a cache would keep the
old rotation while new ones get another, so one set is chosen for good by `context_len`: up to L0 that
is the unscaled (short) one, beyond it the one of that length (long), and no runtime goes past it.

Angles are formed in float32, as Hugging Face does, so that both agree at every position; the cosine
of that angle is taken in float64 and rounded once.

Legend: P positions, R rotary pairs, E hidden.
"""

import math

import torch

from toolchain.errors import DtoolError
from toolchain.model.config import DecoderConfig, Rope, RopeName

SINUSOIDAL = "position_table"
"""Name of the sinusoidal table, [context_len, hidden_size]."""
MAX_TABLE_BYTES = 4 << 30


def rope_table_names(name: RopeName) -> tuple[str, str]:
    """Names of the cosine and sine tables of one rotation."""
    return f"{name}.cos", f"{name}.sin"


def position_tables(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Every table the layers of this model use, float32, by name: [P, R] of cosines and sines, [P, E] sinusoidal.

    Raises DtoolError, before anything is built, where they would take more than MAX_TABLE_BYTES.
    """
    _require_small(config)
    tables: dict[str, torch.Tensor] = {}
    for name in config.rope_names:
        rope = config.rope_named(name)
        tables |= dict(zip(rope_table_names(name), rope_tables(config, rope), strict=True))
    if config.position_embedding == "sinusoidal":
        tables[SINUSOIDAL] = sinusoidal_table(config)
    return tables


def _require_small(config: DecoderConfig) -> None:
    sinusoidal = config.hidden_size if config.position_embedding == "sinusoidal" else 0
    each = 4 * (len(config.rope_names) * (config.rotary_dim // 2) * 2 + sinusoidal)
    most = MAX_TABLE_BYTES // each
    if config.context_len > most:
        raise DtoolError(
            f"the position tables of {config.context_len} positions are too large",
            expected=f"at most {MAX_TABLE_BYTES / 2**30:g} GiB, which is {most} positions",
            found=f"{config.context_len * each / 2**30:.1f} GiB",
            fix=f"serve fewer: --set context_len={min(most, 131072)}, or what you need",
        )


def rope_tables(config: DecoderConfig, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosine and sine tables [context_len, rotary_dim / 2]; without a rotation, of the angle zero."""
    if rope is None:
        still = torch.zeros(config.context_len, config.rotary_dim // 2, device="cpu")
        return still + 1, still
    positions = torch.arange(config.context_len, dtype=torch.float32, device="cpu")
    angles_PR = (positions[:, None] * inverse_frequencies(config, rope)[None, :]).double()
    factor = attention_factor(rope)
    return (angles_PR.cos() * factor).float(), (angles_PR.sin() * factor).float()


def inverse_frequencies(config: DecoderConfig, rope: Rope) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians per position, scaled as the config says."""
    dim, theta = config.rotary_dim, rope.rope_theta
    stretch = dim / (dim - 2) if dim > 2 else 1.0
    if rope.rope_type == "ntk":
        theta *= rope.factor**stretch
    if rope.rope_type == "dynamic":
        length = max(config.context_len, rope.original_max_position_embeddings)
        theta *= (rope.factor * length / rope.original_max_position_embeddings - (rope.factor - 1)) ** stretch
    powers_R = theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim)
    if rope.rope_type == "longrope":
        factors = rope.long_factor if _is_long(config, rope) else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers_R)
    inv_freq_R = 1.0 / powers_R
    if rope.rope_type == "linear":
        return inv_freq_R / rope.factor
    if rope.rope_type == "llama3":
        return _blend(inv_freq_R, rope.factor, _llama3_kept(inv_freq_R, rope))
    if rope.rope_type == "yarn":
        return _blend(inv_freq_R, rope.factor, 1 - _yarn_ramp(dim, rope))
    return inv_freq_R


def _is_long(config: DecoderConfig, rope: Rope) -> bool:
    return config.context_len > rope.original_max_position_embeddings


def _blend(inv_freq_R: torch.Tensor, factor: float, kept_R: torch.Tensor) -> torch.Tensor:
    return (1 - kept_R) * (inv_freq_R / factor) + kept_R * inv_freq_R


def _llama3_kept(inv_freq_R: torch.Tensor, rope: Rope) -> torch.Tensor:
    """0 for wavelengths beyond L0 / low, 1 for those below L0 / high, between linear in 1 / wavelength."""
    turns_R = rope.original_max_position_embeddings / (2 * math.pi / inv_freq_R)
    return ((turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)


def _yarn_ramp(dim: int, rope: Rope) -> torch.Tensor:
    """0 for pairs that turn more than beta_fast times in L0, 1 for less than beta_slow, between linear in the pair."""

    def pair_turning(times: float) -> float:
        wavelength = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    pairs_R = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    return ((pairs_R - low) / (high - low)).clamp(0.0, 1.0)


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied by: as given, or the rule of YaRN or LongRoPE."""
    if rope.rope_type not in {"yarn", "longrope"}:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        grown = math.log(rope.factor) / math.log(rope.original_max_position_embeddings)
        return math.sqrt(1 + grown) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def sinusoidal_table(config: DecoderConfig) -> torch.Tensor:
    """float32 [context_len, hidden_size]: sines, then cosines, of p * 10000^(-i / (E / 2 - 1)), p from the offset.

    Source: arXiv 1706.03762 section 3.5 in the layout of tensor2tensor and fairseq.
    """
    half, width = config.hidden_size // 2, config.hidden_size
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device="cpu") * -(math.log(10000.0) / (half - 1)))
    positions = torch.arange(config.context_len, dtype=torch.float32, device="cpu") + config.position_offset
    angles_PE = positions[:, None] * frequencies[None, :]
    table_PE = torch.cat((angles_PE.sin(), angles_PE.cos()), dim=1)
    return torch.nn.functional.pad(table_PE, (0, width - table_PE.shape[1]))
