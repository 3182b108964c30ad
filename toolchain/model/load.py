"""Filling the decoder with weights: from a checkpoint, or from an artifact with its quantization."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from toolchain.artifact import Artifact
from toolchain.errors import DtoolError
from toolchain.formats import format_named
from toolchain.model.config import DecoderConfig
from toolchain.model.decoder import Decoder
from toolchain.model.hf import open_checkpoint, parameter_shapes
from toolchain.model.quantized import KV_SCALES, SCALE_SUFFIX, QuantizedEmbedding, QuantizedLinear
from toolchain.tensor_file import TensorEntry, read_header, read_tensor


def load_decoder(folder: Path, dtype: str = "float32") -> Decoder:
    """The decoder of a checkpoint folder, in `dtype`, in eval mode."""
    checkpoint = open_checkpoint(folder)
    decoder = empty_decoder(checkpoint.config)
    fill_parameters(decoder, checkpoint.tensors, dtype)
    return decoder


def load_artifact_decoder(artifact: Artifact) -> tuple[Decoder, str]:
    """The decoder of an export or quantized artifact, with its exact rounding, and its cache format."""
    if "weights.safetensors" not in artifact.manifest.files or artifact.manifest.stage == "engine":
        raise DtoolError(
            f"{artifact.path} holds no weights by parameter name",
            expected="an export or quantized artifact",
            found=f"stage {artifact.manifest.stage}",
            fix="give the artifact the engine was built from",
        )
    config = DecoderConfig.model_validate(artifact.json("decoder.json"))
    entries = read_header(artifact.file("weights.safetensors"))
    dtype = str(artifact.manifest.details["compute_dtype"])
    decoder = empty_decoder(config)
    plain = {n: e for n, e in entries.items() if n in parameter_shapes(config) and e.dtype != "int8"}
    fill_parameters(decoder, plain, dtype, partial=True)
    per_token = frozenset(artifact.manifest.details.get("per_token", ()))
    _install_quantized(decoder, entries, per_token, format_named(dtype).torch_dtype)
    _install_cache_scales(decoder, entries)
    _refuse_meta(decoder)
    return decoder.eval(), str(artifact.manifest.details.get("kv_format", "none"))


def empty_decoder(config: DecoderConfig) -> Decoder:
    """The decoder on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Decoder(config).eval()


def fill_parameters(decoder: Decoder, tensors: Mapping[str, TensorEntry], dtype: str, *, partial: bool = False) -> None:
    """Load each tensor into the parameter of its name; a tied head follows the embedding."""
    target = format_named(dtype).torch_dtype
    for name, entry in tensors.items():
        module, attribute = _owner(decoder, name)
        setattr(module, attribute, nn.Parameter(read_tensor(entry).to(target), requires_grad=False))
    if decoder.config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    if not partial:
        _refuse_meta(decoder)


def _refuse_meta(decoder: Decoder) -> None:
    unfilled = [name for name, p in decoder.named_parameters() if p.is_meta]
    if unfilled:
        raise DtoolError("parameters are not filled", found=", ".join(unfilled[:5]), fix="make the artifact again")


def _owner(decoder: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return decoder.get_submodule(path), attribute


def _install_quantized(
    decoder: Decoder, entries: Mapping[str, TensorEntry], per_token: frozenset[str], dtype: torch.dtype
) -> None:
    for name, entry in entries.items():
        if entry.dtype != "int8":
            continue
        codes, scale = read_tensor(entry), read_tensor(entries[name + SCALE_SUFFIX])
        path = name.removesuffix(".weight")
        parent, attribute = _owner(decoder, path)
        old = getattr(parent, attribute)
        if isinstance(old, nn.Embedding):
            setattr(parent, attribute, QuantizedEmbedding(codes, scale, dtype))
            if decoder.config.tie_word_embeddings:
                decoder.lm_head = QuantizedLinear(codes, scale, None, per_token="lm_head" in per_token)  # type: ignore[assignment]
        else:
            setattr(parent, attribute, QuantizedLinear(codes, scale, old.bias, per_token=path in per_token))


def _install_cache_scales(decoder: Decoder, entries: Mapping[str, TensorEntry]) -> None:
    for i, block in enumerate(decoder.model.layers):
        for scale in KV_SCALES:
            name = f"model.layers.{i}.self_attn.{scale}"
            if name in entries:
                setattr(block.self_attn, scale, read_tensor(entries[name]))
