"""The C++ file that embeds the kernels in the plugin, and the JSON that describes them."""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from toolchain.errors import DtoolError
from toolchain.ops.attention import ABI, AttentionSpec

COMPUTE_DTYPES = ("float16", "bfloat16")
"""In the order of the C++ `ComputeType`."""

TILES = {"cache_write": "BLOCK_T", "prefill": "BLOCK_M", "decode_split": "BLOCK_N", "decode_merge": None}
"""The four kernels of a set, and the tile size that the launch needs of each."""

_CACHE_FORMATS = {"none": "kNone", "int8": "kInt8", "fp8_e4m3": "kFp8"}


class KernelBinary(Protocol):
    """One compiled kernel, as `toolchain.ops.kernels.compile` returns it."""

    @property
    def name(self) -> str: ...
    @property
    def cubin(self) -> bytes: ...
    @property
    def function(self) -> str: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def tile(self) -> dict[str, int]: ...
    @property
    def registers(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The four kernels of one spec, compute dtype and SM."""

    spec: AttentionSpec
    compute_dtype: str
    sm: int
    kernels: Sequence[KernelBinary]

    def kernel(self, name: str) -> KernelBinary:
        """The kernel of one name. Raises DtoolError when the set has none."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        names = ", ".join(kernel.name for kernel in self.kernels)
        raise DtoolError(
            "a kernel set is incomplete",
            expected=f"a kernel {name}",
            found=names or "no kernel",
            fix="build the plugin again",
        )

    def launch_tile(self, name: str) -> int:
        """The tile size the launch of one kernel divides by; 1 where it divides by none."""
        key, tile = TILES[name], self.kernel(name).tile
        if key is None:
            return 1
        if tile.get(key, 0) < 1:
            raise DtoolError(
                f"kernel {name} does not say how it is launched",
                expected=f"tile {key}",
                found=str(tile),
                fix="build the plugin again",
            )
        return tile[key]


def specs_of(sets: Sequence[KernelSet]) -> list[AttentionSpec]:
    """The specs of some sets, each once, in order."""
    return list(dict.fromkeys(kernel_set.spec for kernel_set in sets))


def describe(sets: Sequence[KernelSet], versions: dict[str, str]) -> dict[str, Any]:
    """The description the library carries."""
    specs = specs_of(sets)
    return {
        "abi": ABI,
        "specs": [asdict(spec) for spec in specs],
        "compute_dtypes": _unique(kernel_set.compute_dtype for kernel_set in sets),
        "sms": sorted({kernel_set.sm for kernel_set in sets}),
        "sets": [
            {
                "spec": specs.index(kernel_set.spec),
                "compute_dtype": kernel_set.compute_dtype,
                "sm": kernel_set.sm,
                "kernels": [_describe_kernel(kernel_set.kernel(name)) for name in TILES],
            }
            for kernel_set in sets
        ],
        "versions": versions,
    }


def _describe_kernel(kernel: KernelBinary) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "function": kernel.function,
        "num_warps": kernel.num_warps,
        "shared_bytes": kernel.shared_bytes,
        "tile": kernel.tile,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "cubin_bytes": len(kernel.cubin),
        "cubin_sha256": hashlib.sha256(kernel.cubin).hexdigest(),
    }


def _unique(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def write_table(sets: Sequence[KernelSet], description: dict[str, Any], folder: Path) -> Path:
    """Write `table.cpp` and the files it includes to a folder; it must be compiled in that folder."""
    (folder / "description.json").write_text(json.dumps(description, sort_keys=True), "utf-8")
    blobs: dict[bytes, str] = {}
    for kernel_set in sets:
        for name in TILES:
            cubin = kernel_set.kernel(name).cubin
            if cubin not in blobs:
                blobs[cubin] = f"dtool_cubin_{len(blobs)}"
                (folder / f"{blobs[cubin]}.bin").write_bytes(cubin)
    specs = specs_of(sets)
    text = "\n".join(
        [
            '#include "kernel_table.h"',
            *(_embed(label, f"{label}.bin") for label in blobs.values()),
            _embed("dtool_description", "description.json"),
            "namespace dtool {",
            f"Spec const kSpecs[] = {{{', '.join(map(_spec, specs))}}};",
            f"int32_t const kSpecCount = {len(specs)};",
            "KernelSet const kKernelSets[] = {",
            *(f"{_kernel_set(kernel_set, blobs)}," for kernel_set in sets),
            "};",
            f"int32_t const kKernelSetCount = {len(sets)};",
            "char const* const kDescription = reinterpret_cast<char const*>(dtool_description);",
            "}",
        ]
    )
    path = folder / "table.cpp"
    path.write_text(f"{text}\n", "utf-8")
    return path


def _embed(label: str, file: str) -> str:
    """Put a file's bytes and a closing zero into the library under a label no one outside sees."""
    lines = (".pushsection .rodata", ".balign 64", f"{label}:", f'.incbin "{file}"', ".byte 0", ".popsection")
    return (
        f'extern "C" __attribute__((visibility("hidden"))) unsigned char const {label}[];\n'
        f"__asm__({json.dumps(''.join(f'{line}{chr(10)}' for line in lines))});"
    )


def _kernel_set(kernel_set: KernelSet, blobs: dict[bytes, str]) -> str:
    kernels = []
    for name in TILES:
        kernel = kernel_set.kernel(name)
        tile = kernel_set.launch_tile(name)
        function = json.dumps(kernel.function)
        kernels.append(f"{{{function}, {blobs[kernel.cubin]}, {kernel.num_warps}, {kernel.shared_bytes}, {tile}}}")
    dtype = COMPUTE_DTYPES.index(kernel_set.compute_dtype)
    head = f"{_spec(kernel_set.spec)}, static_cast<ComputeType>({dtype}), {kernel_set.sm}"
    return f"{{{head}, {', '.join(kernels)}}}"


def _spec(spec: AttentionSpec) -> str:
    values = (
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        _float(spec.scale),
        spec.rotary_dim,
        f"CacheFormat::{_CACHE_FORMATS[spec.cache_format]}",
        str(spec.interleaved).lower(),
        _float(spec.softcap),
        spec.window,
        _float(spec.qk_norm_eps),
        str(spec.token_scales).lower(),
    )
    return f"{{{', '.join(map(str, values))}}}"


def _float(value: float) -> str:
    """A C++ literal of the float32 nearest to a number, which is what an ONNX attribute stores."""
    return f"{struct.unpack('f', struct.pack('f', value))[0].hex()}f"
