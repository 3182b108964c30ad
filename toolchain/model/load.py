"""Filling the decoder with weights: from a checkpoint, or from an artifact with its quantization."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError, name_list
from toolchain.formats import format_named
from toolchain.memory import require_memory
from toolchain.model.caches import caches_of
from toolchain.model.checkpoint import Parameter, open_checkpoint
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Decoder
from toolchain.model.foreign.coded import read_part
from toolchain.model.parameters import parameter_shapes
from toolchain.model.quantized import (
    CENTER,
    CHANNEL_WEIGHT,
    CHANNELS,
    FEED_FORWARD_ROTATION,
    INPUT_SCALE,
    KV_SCALES,
    LIMIT,
    OFFSET,
    ROTATION,
    SCALE_SUFFIX,
    InputShape,
    QuantizedEmbedding,
    QuantizedLinear,
    checked_scale,
)
from toolchain.tensor_file import TensorEntry, read_header, read_tensor


def load_decoder(folder: Path, dtype: str = "float32", context_len: int | None = None) -> Decoder:
    """The decoder of a checkpoint folder, in `dtype`, in eval mode."""
    checkpoint = open_checkpoint(folder, context_len)
    shapes = [parameter.shape for parameter in checkpoint.parameters.values()]
    require_memory(_plain_bytes(shapes, dtype), f"{folder} in {dtype}")
    decoder = empty_decoder(checkpoint.config)
    fill_parameters(decoder, checkpoint.parameters, dtype)
    return decoder


def load_artifact_decoder(artifact: Artifact, dtype: str = "") -> Decoder:
    """The decoder of an export or quantized artifact, with its exact rounding; in `dtype` where not in its own."""
    if "weights.safetensors" not in artifact.manifest.files or artifact.manifest.stage == "engine":
        raise DtoolError(
            f"{artifact.path} holds no weights by parameter name",
            expected="an export or quantized artifact",
            found=f"stage {artifact.manifest.stage}",
            fix="give the artifact the engine was built from",
        )
    config = artifact.read("decoder.json", DecoderConfig)
    entries = read_header(artifact.file("weights.safetensors"))
    dtype = dtype or str(artifact.manifest.details["compute_dtype"])
    decoder = empty_decoder(config)
    quantized = {n for n in entries if n + SCALE_SUFFIX in entries}
    shapes = parameter_shapes(config)
    plain = {n: Parameter(e.shape, (e,), (n,)) for n, e in entries.items() if n in shapes and n not in quantized}
    held = sum(entry.length for name, entry in entries.items() if name not in plain)
    require_memory(held + _plain_bytes([p.shape for p in plain.values()], dtype), f"{artifact.path} in {dtype}")
    fill_parameters(decoder, plain, dtype, partial=True)
    details = artifact.manifest.details
    rounding = {name: tuple(how) for name, how in details.get("rounded_inputs", {}).items()}
    _install_quantized(decoder, entries, rounding, format_named(dtype).torch_dtype)
    _install_bases(decoder, entries, format_named(dtype).torch_dtype)
    for i, cache in enumerate(caches_of(artifact.manifest.kv_contract, config.num_hidden_layers)):
        if cache.quantized:
            scales = None if cache.token_scales else _cache_scales(entries, config, i)
            decoder.model.layers[i].self_attn.quantize_cache(cache.dtype, scales)  # type: ignore[operator]
    _refuse_meta(decoder)
    return decoder.eval()


def _plain_bytes(shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
    """Bytes of tensors of these shapes in a number format."""
    return format_named(dtype).bytes * sum(map(math.prod, shapes))


def empty_decoder(config: DecoderConfig) -> Decoder:
    """The decoder on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Decoder(config).eval()


def fill_parameters(
    decoder: Decoder, parameters: Mapping[str, Parameter], dtype: str, *, partial: bool = False
) -> None:
    """Load each parameter from its stored parts; a tied head follows the embedding."""
    target = format_named(dtype).torch_dtype
    for name, parameter in parameters.items():
        module, attribute = _owner(decoder, name)
        tensors = [read_part(part).to(target) for part in parameter.parts]
        value = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if parameter.arrange is not None:
            value = parameter.arrange(value).contiguous()
        setattr(module, attribute, nn.Parameter(value, requires_grad=False))
    if decoder.config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    if not partial:
        _refuse_meta(decoder)


def _refuse_meta(decoder: Decoder) -> None:
    unfilled = [name for name, p in decoder.named_parameters() if p.is_meta]
    if unfilled:
        raise DtoolError(
            "parameters are not filled",
            expected="every parameter in the weights",
            found=f"none for {name_list(unfilled)}",
            fix="make the artifact again",
        )


def _owner(decoder: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return decoder.get_submodule(path), attribute


def _install_quantized(
    decoder: Decoder, entries: Mapping[str, TensorEntry], rounding: Mapping[str, tuple[str, ...]], dtype: torch.dtype
) -> None:
    """`rounding`: (format, granularity) by the name of the product whose input is rounded."""

    def linear(path: str, codes: torch.Tensor, scale: torch.Tensor, bias: Any) -> QuantizedLinear:
        names = (f"{path}.{part}" for part in (INPUT_SCALE, CENTER, OFFSET))
        input_scale, *means = (read_tensor(entries[name]) if name in entries else None for name in names)
        held = (None if mean is None else mean.to(dtype) for mean in means)
        return QuantizedLinear(codes, scale, bias, rounding.get(path), input_scale, *held)

    for name, entry in entries.items():
        if name + SCALE_SUFFIX not in entries:
            continue
        codes, scale = read_tensor(entry), read_tensor(entries[name + SCALE_SUFFIX])
        path = name.removesuffix(".weight")
        parent, attribute = _owner(decoder, path)
        old = getattr(parent, attribute)
        if isinstance(old, nn.Embedding):
            setattr(parent, attribute, QuantizedEmbedding(codes, scale, dtype))
            if decoder.config.tie_word_embeddings:
                decoder.lm_head = linear("lm_head", codes, scale, None)  # type: ignore[assignment]
        else:
            setattr(parent, attribute, linear(path, codes, scale, old.bias))


def _install_bases(decoder: Decoder, entries: Mapping[str, TensorEntry], dtype: torch.dtype) -> None:
    """The bases of the stream and of the feed-forward's inputs, and the excess of some channels."""

    def held(name: str) -> torch.Tensor:
        tensor = read_tensor(entries[name])
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    read = {name: held(name) for name in (ROTATION, FEED_FORWARD_ROTATION) if name in entries}
    decoder.rotation_EE, rotation_nn = read.get(ROTATION), read.get(FEED_FORWARD_ROTATION)
    for i, block in enumerate(decoder.model.layers):
        names = [f"model.layers.{i}.mlp.down_proj.{part}" for part in (LIMIT, CHANNELS, CHANNEL_WEIGHT)]
        excess = [held(name) for name in names if name in entries]
        if rotation_nn is not None or excess:
            block.mlp.shape = InputShape(rotation_nn, *excess)  # type: ignore[union-attr]


def _cache_scales(
    entries: Mapping[str, TensorEntry], config: DecoderConfig, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    names, shape = (f"model.layers.{layer}.self_attn.{scale}" for scale in KV_SCALES), (config.num_key_value_heads,)
    key, value = (checked_scale(name, read_tensor(entries[name]), shape) for name in names)
    return key, value
