"""The scales of a checkpoint's cache: found among its tensors, and named as the decoder's.

A scale is of the tensor, or of each KV head, and stands at the attention (`k_scale`) or under the projection that
makes the key or the value (`k_proj.k_scale`, older: `k_proj.output_scale`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from toolchain.errors import DtoolError, name_list
from toolchain.model.foreign.coded import Part
from toolchain.model.foreign.scheme import INSTEAD, Scheme
from toolchain.tensor_file import TensorEntry

CACHE_SCALE = re.compile(r"\.([kv]_scale|[kv]_proj\.output_scale)$")
SCALES = {"k": "k_scale", "v": "v_scale"}
"""What checkpoints and artifacts alike call the scales of keys and of values."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """The quantization a checkpoint came with: its scheme, and the scales of its cache by our names."""

    scheme: Scheme
    cache: dict[str, TensorEntry]


def take_cache_scales(found: dict[str, Part], scheme: Scheme) -> dict[str, TensorEntry]:
    """The scales of the cache, by their stored names, taken out of the tensors; none where the config has none."""
    if scheme.kv_format is None:
        return {}
    names = [name for name in found if CACHE_SCALE.search(name)]
    taken = {name: found.pop(name) for name in names}
    return {name: entry for name, entry in taken.items() if isinstance(entry, TensorEntry)}


def name_cache_scales(
    taken: Mapping[str, TensorEntry], projections: Iterable[tuple[str, ...]], notes: list[str]
) -> dict[str, TensorEntry]:
    """The scales of the cache by our names.

    `projections`: by layer, what the checkpoint calls the weights that make queries, keys and values. Raises
    DtoolError where some layers have scales and others none, or one belongs to no layer.
    """
    found: dict[str, TensorEntry] = {}
    used: set[str] = set()
    lacking = []
    for i, names in enumerate(projections):
        attention = names[0].rsplit(".", 2)[0]
        for part, scale in SCALES.items():
            own = [name.removesuffix(".weight") for name in names if name.endswith(f"{part}_proj.weight")]
            places = [f"{attention}.{scale}", *(f"{m}.{kind}" for m in own for kind in (scale, "output_scale"))]
            present = [place for place in places if place in taken]
            used.update(present[:1])
            if present:
                found[f"model.layers.{i}.self_attn.{scale}"] = taken[present[0]]
            else:
                lacking.append(places[0])
    if unknown := [name for name in taken if name not in used]:
        expected = f"{len(found) + len(lacking)}, of the keys and values of each layer"
        raise DtoolError(
            "scales of a cache belong to no layer", expected=expected, found=name_list(unknown), fix=INSTEAD
        )
    if not found:
        notes.append("the config names a format for the cache, but no scales of it are stored")
    elif lacking:
        raise DtoolError(
            "some layers have no scale for their cache",
            expected=name_list(lacking),
            found=f"{len(found)} of {len(found) + len(lacking)} scales",
            fix=INSTEAD,
        )
    return found
