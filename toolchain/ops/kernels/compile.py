"""The four kernels as cubins, ahead of time and without a GPU.

Triton lowers each kernel to PTX and its own ptxas assembles it for the exact GPU (sm_90a, sm_100a where
there is such). Line information is left out, so the bytes depend on the kernel alone. Registers and
spills are read back from the cubin by cuobjdump: what will run, not what a log said. A spilled register
lies in the kernel's stack frame, so without a stack there is none. A kernel that asked for global scratch
memory would need an allocator at launch; none may.

Under TRITON_INTERPRET the kernels are Python functions and cannot be compiled: a child process without it
does the work.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolchain.errors import DtoolError
from toolchain.memory import NO_MEMORY, WAYS_OUT, ending, memory_at_hand
from toolchain.ops.attention import AttentionSpec
from toolchain.ops.kernels.bindings import ARGUMENTS, COMPUTE, INTEGERS, argument_type, constants, plan
from toolchain.ops.kernels.tiles import Launch


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one GPU, and what its launch needs.

    Attributes:
        name: Name of the kernel, a key of `bindings.ARGUMENTS`.
        sm: Compute capability, 10 * major + minor.
        cubin: The binary.
        function: Symbol of the kernel in the binary.
        num_warps: Warps of a thread block; its threads are 32 times as many.
        shared_bytes: Dynamic shared memory to launch with, bytes.
        tile: Block sizes by name, for the grid.
        registers: Registers of a thread.
        spill_bytes: Local memory of a thread, bytes: registers that did not fit. 0 means no spill at all.
    """

    name: str
    sm: int
    cubin: bytes
    function: str
    num_warps: int
    shared_bytes: int
    tile: dict[str, int]
    registers: int
    spill_bytes: int


def compile_kernels(
    spec: AttentionSpec, sm: int, compute_dtype: str, *, cache_dir: Path | None = None
) -> tuple[CompiledKernel, ...]:
    """The four kernels for one attention node on one GPU; the same bytes for the same request.

    Args:
        spec: The attributes of the node.
        sm: Compute capability, 10 * major + minor.
        compute_dtype: `float16` or `bfloat16`.
        cache_dir: Folder for Triton's own cache; a per-user folder when None.

    Raises:
        DtoolError: for a GPU or a spec the kernels do not cover, when triton is missing, or when it fails.
    """
    launch_of = plan(spec, sm, compute_dtype)
    if compute_dtype not in COMPUTE or compute_dtype == "float32":
        raise DtoolError(
            f"the attention kernels do not compute in {compute_dtype}",
            expected="float16 or bfloat16",
            found=compute_dtype,
            fix="set the recipe's engine dtype to float16 or bfloat16",
        )
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtool" / "triton"
    triton = _import_triton()
    if triton.knobs.runtime.interpret:
        return _compile_in_child(spec, sm, compute_dtype, folder)
    with _settings(triton, folder):
        return tuple(_compile_one(triton, name, spec, sm, compute_dtype, launch_of[name]) for name in ARGUMENTS)


def _import_triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise DtoolError(
            "the attention kernels need triton to compile",
            expected="triton 3.6.0",
            found="no triton in this environment",
            fix="pip install 'dtool[plugin]'",
        ) from error
    return triton


@contextmanager
def _settings(triton: Any, folder: Path) -> Iterator[None]:
    """Triton's settings for reproducible bytes: nothing from the environment but where its tools are."""
    knobs = triton.knobs
    with knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope(), knobs.runtime.scope():
        knobs.cache.dir = str(folder)
        knobs.compilation.disable_line_info = True
        yield


def _compile_one(
    triton: Any, name: str, spec: AttentionSpec, sm: int, compute_dtype: str, launch: Launch
) -> CompiledKernel:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    from toolchain.ops.kernels.decode import decode_merge, decode_split
    from toolchain.ops.kernels.prefill import cache_write, prefill

    kernel: Any = {
        "cache_write": cache_write,
        "prefill": prefill,
        "decode_split": decode_split,
        "decode_merge": decode_merge,
    }[name]
    fixed = constants(name, spec, launch.tile)
    signature = {argument: argument_type(argument, compute_dtype, spec.cache_format) for argument in ARGUMENTS[name]}
    signature |= dict.fromkeys(kernel.arg_names[len(signature) :], "constexpr")
    # every binding is aligned to 16 bytes; row strides follow from constants, so loads become vectors
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(ARGUMENTS[name]) if arg not in INTEGERS}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(key),): v for key, v in fixed.items()}, aligned)
    target = GPUTarget("cuda", sm, 32)
    try:
        compiled = triton.compile(source, target=target, options=launch.options)
    except (TritonError, RuntimeError) as error:  # MLIR's passes fail with RuntimeError
        raise _failed(name, spec, sm, compute_dtype, error) from error
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise RuntimeError(f"{name} asks for global scratch memory, which the plugin does not allocate")
    cubin = compiled.asm["cubin"]
    registers, spilled = resource_usage(triton.knobs.nvidia.cuobjdump.path, cubin)
    return CompiledKernel(name, sm, cubin, meta.name, meta.num_warps, meta.shared, launch.tile, registers, spilled)


def _failed(name: str, spec: AttentionSpec, sm: int, compute_dtype: str, error: Exception) -> DtoolError:
    what = f"head_dim {spec.head_dim}, {compute_dtype}, cache {spec.cache_format}"
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return DtoolError(
        f"triton cannot compile attention kernel {name} for sm_{sm}: {what}",
        expected=f"machine code of {name}",
        found=said[-1][:500],
        fix="use kv_cache.format none or a backend other than tensorrt, and report this attention node",
    )


def resource_usage(cuobjdump: str, cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory (stack and static) of a thread, of the kernel in `cubin`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - triton's own tool
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


_CHILD = "import sys; from toolchain.ops.kernels.compile import _child; _child(sys.argv[1])"


def _compile_in_child(spec: AttentionSpec, sm: int, compute_dtype: str, folder: Path) -> tuple[CompiledKernel, ...]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as scratch:
        request = Path(scratch) / "request"
        request.write_bytes(pickle.dumps((spec, sm, compute_dtype, folder)))
        command = [sys.executable, "-c", _CHILD, str(request)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)  # noqa: S603 - ourselves
        if done.returncode:
            raise _child_failed(done.returncode, done.stderr)
        answer = pickle.loads(request.with_suffix(".done").read_bytes())  # noqa: S301 - our own child wrote it
    if isinstance(answer, DtoolError):
        raise answer
    return answer


def _child_failed(status: int, log: str) -> DtoolError:
    last = "\n".join(log.strip().splitlines()[-4:])[-1000:] or "no message"
    no_memory = status == -signal.SIGKILL or NO_MEMORY.search(log)
    return DtoolError(
        "the attention kernels could not be compiled",
        expected="a child process that compiles them",
        found=f"{ending(status)}; {f'{memory_at_hand()}; ' if no_memory else ''}its last lines: {last}",
        fix=WAYS_OUT if no_memory else "report it with these lines",
    )


def _child(request: str) -> None:
    spec, sm, compute_dtype, folder = pickle.loads(Path(request).read_bytes())  # noqa: S301 - our own parent wrote it
    try:
        answer = compile_kernels(spec, sm, compute_dtype, cache_dir=folder)
    except DtoolError as error:
        answer = error
    Path(request).with_suffix(".done").write_bytes(pickle.dumps(answer))
