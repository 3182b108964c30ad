"""Kernels in Triton's interpreter, in a process of their own.

TRITON_INTERPRET takes effect when triton is first imported, so it cannot be turned on in a test process
that may have imported triton (torch.export does) or wants to compile. One child a test session has it
set before any import; calls go there as bytes of torch.save (plain pickle lacks float8).
"""

import io
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def _turn_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _pack(value: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpack(packed: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(packed), weights_only=False)


def _call(request: bytes) -> bytes:
    import torch

    torch.set_num_threads(1)
    function, arguments = _unpack(request)
    return _pack(function(*arguments))


class Interpreter:
    """Runs module-level functions in the child; `close` ends it."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_turn_on)

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        return _unpack(self._pool.submit(_call, _pack((function, arguments))).result(timeout=300))

    def close(self) -> None:
        self._pool.shutdown()


def run_attend(case: Any, inputs: dict) -> tuple:
    """Output, both caches, and the scales where the cache is quantized, by the kernels."""
    from toolchain.ops.kernels.launch import attend

    names = ("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache")
    options = {"scales": inputs["scales"], "norms": inputs["norms"], "splits": case.splits, "sm": case.sm}
    out = attend(*(inputs[name] for name in names), case.spec, **options)
    return out, inputs["key_cache"], inputs["value_cache"], *(inputs["scales"] or ())


def run_write(case: Any, inputs: dict) -> tuple:
    """Both caches after `cache_write` alone."""
    from toolchain.ops.kernels import launch
    from toolchain.ops.kernels.bindings import plan

    new, capacity = inputs["qkv"].shape[1], inputs["key_cache"].shape[2]
    key_scale, value_scale = inputs["scales"] or (inputs["cos"], inputs["cos"])
    values = inputs | {"key_scale": key_scale, "value_scale": value_scale, "k_norm": inputs["qkv"]}
    launches = plan(case.spec, case.sm, str(inputs["qkv"].dtype).removeprefix("torch."))
    grid = (-(-new // launches["cache_write"].tile["BLOCK_T"]), case.spec.num_kv_heads, len(inputs["qkv"]))
    launch._run(
        "cache_write",
        grid,
        values | {"new_tokens": new, "capacity": capacity, "out": inputs["qkv"]},
        case.spec,
        launches,
    )
    return inputs["key_cache"], inputs["value_cache"]
