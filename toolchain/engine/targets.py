"""The GPUs an engine can be compiled for: who compiles for each, and which number formats it has.

Sources: TensorRT-RTX support matrix and its `ComputeCapability` enum (1.7.1); CUDA C++ programming
guide, "Compute Capabilities" (bf16 from 8.0, fp8 from 8.9, fp4 from 10.0).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from toolchain.errors import DtoolError, did_you_mean

RTX, TENSORRT = "tensorrt-rtx", "tensorrt"
FORMAT_SINCE = {"bfloat16": 80, "fp8_e4m3": 89, "fp4": 100}
"""First SM with the format; formats that are not listed run everywhere."""


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU generation: its SM number, GPUs a user may know, and the backends that compile for it."""

    sm: int
    gpus: str
    backends: tuple[str, ...]

    @property
    def name(self) -> str:
        """As recipes write it: sm89."""
        return f"sm{self.sm}"

    @property
    def compute_capability(self) -> str:
        """As NVIDIA writes it: 8.9."""
        return f"{self.sm // 10}.{self.sm % 10}"

    def has_format(self, name: str) -> bool:
        """Whether its tensor cores take the format."""
        return self.sm >= FORMAT_SINCE.get(name, 0)


TARGETS = {
    t.name: t
    for t in (
        Target(75, "T4, RTX 20", (RTX, TENSORRT)),
        Target(80, "A100, A30", (RTX, TENSORRT)),
        Target(86, "A10, RTX 30", (RTX, TENSORRT)),
        Target(89, "L4, L40S, RTX 40", (RTX, TENSORRT)),
        Target(90, "H100, H200", (TENSORRT,)),
        Target(100, "B200, GB200", (TENSORRT,)),
        Target(103, "B300, GB300", (TENSORRT,)),
        Target(120, "RTX 50, RTX PRO 6000", (RTX, TENSORRT)),
        Target(121, "DGX Spark (GB10)", (RTX, TENSORRT)),
    )
}


def targets_named(names: Iterable[str], backend: str) -> tuple[Target, ...]:
    """The targets of a recipe, each once, in its order.

    Raises DtoolError when there is none, for an unknown name, and for one `backend` cannot compile.
    """
    names = tuple(dict.fromkeys(names))
    possible = [t.name for t in TARGETS.values() if backend in t.backends]
    if not names:
        raise DtoolError(
            f"the {backend} backend needs a target",
            expected=f"engine.targets with one or more of {', '.join(possible)}",
            found="none",
            fix="for example --set 'engine.targets=[\"sm89\"]' (" + TARGETS["sm89"].gpus + ")",
        )
    for name in names:
        if name not in TARGETS:
            raise DtoolError(
                f"unknown target {name!r}", expected="an SM, as sm89", found=name, fix=did_you_mean(name, TARGETS)
            )
        if backend not in TARGETS[name].backends:
            raise DtoolError(
                f"{backend} cannot compile for {name} ({TARGETS[name].gpus})",
                expected=f"one of {', '.join(possible)}",
                found=f"{name}, which {' or '.join(TARGETS[name].backends)} compiles, on a host with such a GPU",
                fix="choose another target, or engine.backend onnxruntime, which needs none",
            )
    return tuple(TARGETS[name] for name in names)


def require_format(targets: Iterable[Target], fmt: str, found: str, fix: str) -> None:
    """Refuse a number format that one of the targets does not have."""
    targets = tuple(targets)
    lacking = [t for t in targets if not t.has_format(fmt)]
    if lacking:
        raise DtoolError(
            f"{lacking[0].name} ({lacking[0].gpus}) has no {fmt}",
            expected="formats that every target has",
            found=f"{found}; targets {', '.join(t.name for t in targets)}",
            fix=fix,
        )
