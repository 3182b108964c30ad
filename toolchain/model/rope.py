"""Rotary position tables.

    inv_freq[i] = theta^(-2i / d)            RoFormer, arXiv 2104.09864 section 3.4.2
    cos[p, i]   = cos(p * inv_freq[i])

Angles are formed in float32, as Hugging Face does, so that both agree at every position; the cosine
of that angle is taken in float64 and rounded once.
"""

import math

import torch

from toolchain.model.config import DecoderConfig


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """float32 [head_dim / 2], scaled as the config says."""
    dim, scaling = config.head_dim, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3_bands(inv_freq, config)
    return inv_freq


def _llama3_bands(inv_freq: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Wavelengths beyond context / low are divided, below context / high kept, between blended."""
    s = config.rope_scaling
    wavelength = 2 * math.pi / inv_freq
    blend = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / s.factor + blend * inv_freq


def rope_tables(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosine and sine tables [max_position_embeddings, head_dim / 2]."""
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
    angles = (positions[:, None] * inverse_frequencies(config)[None, :]).double()
    return angles.cos().float(), angles.sin().float()
