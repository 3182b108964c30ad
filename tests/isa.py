"""Run the numeric tests under each instruction set that this processor can be held to: `make isa`.

Sums in float32 differ by the kernels that form them, and so do products of integers where a processor
saturates. What is right on one processor has to be right on all, so the tests that compare numbers run
with torch, oneDNN and MKL held to older instruction sets. ONNX Runtime chooses its kernels by CPUID and
reads no variable: an emulated processor (qemu-user) holds it down, for the embedded engine's tests.

    python -m tests.isa                 under every cap
    python -m tests.isa sse4.1 avx2     under some; one line a cap, exit 1 when tests of one fail
"""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPORTS = "tests/export_stage/test_export_families.py::test_exported_graphs_equal_hugging_face"
NUMERIC = (
    "tests/test_isa.py",
    "tests/model/test_decoder.py",
    "tests/model/test_families.py",
    "tests/model/test_positions.py",
    "tests/ops/test_attention.py",
    "tests/test_function_body.py",
    *(f"{EXPORTS}[{name}]" for name in ("mixtral", "mixtral_window", "qwen2_moe", "qwen3_moe", "olmoe", "phi3_long")),
    "tests/engine/test_engine_families.py",
    "tests/engine/test_engine_onnxruntime.py",
    "tests/engine/test_engine_rotated.py",
    "tests/parity/test_parity_kv_contract.py",
    "tests/parity/test_parity_layerwise.py",
    "tests/quantize/test_cache.py",
    "tests/quantize/test_center.py",
    "tests/quantize/test_gptq.py",
    "tests/quantize/test_quantize.py",
    "tests/quantize/test_rotation.py",
    "tests/runners/test_cache_faults.py",
)
"""What compares logits or tensors within a tolerance, or bit for bit where no rounding is involved.

Of the exports those with experts, and one beside them: the graphs of the other mechanisms are below the
embedded engines.
"""
EMBEDDED = "computes_the_artifacts_arithmetic and exported- or equals_prefill or saturate or zeros"
"""Of the embedded engine's tests, those an emulator takes minutes for, not hours."""


@dataclass(frozen=True, slots=True)
class Cap:
    """One instruction set: the processor's flag that it needs, and what holds the libraries to it.

    `emulates` is a processor of qemu's in place of variables, and `saturates` whether its products of
    uint8 and int8 do.
    """

    needs: str = ""
    variables: tuple[str, ...] = ()
    emulates: str = ""
    saturates: bool = False


CAPS = {
    "sse4.1": Cap(
        "sse4_1",
        ("ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=SSE41", "MKL_CBWR=COMPATIBLE", "OMP_NUM_THREADS=1"),
    ),
    "avx2": Cap("avx2", ("ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2", "MKL_CBWR=AVX2", "OMP_NUM_THREADS=2")),
    "avx512": Cap(
        "avx512bw",
        ("ATEN_CPU_CAPABILITY=avx512", "ONEDNN_MAX_CPU_ISA=AVX512_CORE", "MKL_CBWR=AVX512", "OMP_NUM_THREADS=1"),
    ),
    "vnni": Cap("avx512_vnni", ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI", "OMP_NUM_THREADS=2")),
    "amx": Cap("amx_int8", ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX", "OMP_NUM_THREADS=1")),
    "nehalem": Cap(emulates="Nehalem"),
    "haswell": Cap(emulates="Haswell", saturates=True),
}


def reason_to_skip(cap: Cap) -> str:
    """Why this machine cannot be held to a cap; empty when it can."""
    if cap.emulates:
        return "" if shutil.which("qemu-x86_64") else "qemu-x86_64 is not installed (apt-get install qemu-user)"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "" if cap.needs in flags else f"this processor has no {cap.needs}"


def run_capped(cap: Cap) -> tuple[bool, str]:
    """Whether the tests pass under a cap, and pytest's count or the last lines it printed."""
    if not cap.emulates:
        return run_tests(["-n", "2", *NUMERIC], dict(pair.split("=") for pair in cap.variables))
    python = ["qemu-x86_64", "-cpu", cap.emulates, sys.executable]
    probe = (
        "from toolchain.processor import probe_integer_products as exact; print('exact' if exact() else 'saturates')"
    )
    found = subprocess.run([*python, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=False)
    expected = "saturates" if cap.saturates else "exact"
    if found.stdout.strip() != expected:
        return False, f"integer products of the emulated processor: {found.stdout or found.stderr}, not {expected}"
    chosen = ["-k", EMBEDDED, "tests/engine/test_engine_onnxruntime.py"]
    return run_tests(chosen, {"OMP_NUM_THREADS": "1"}, python)  # one process: workers would not be emulated


def run_tests(arguments: list[str], variables: dict[str, str], python: list[str] | None = None) -> tuple[bool, str]:
    """Run pytest with variables of the environment; see `run_capped`."""
    command = [*(python or [sys.executable]), "-m", "pytest", "--tb=short", *arguments]
    environment = os.environ | variables
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    counts = re.findall(r"^.*\d+ passed.* in .*$", ran.stdout, re.MULTILINE)
    if ran.returncode == 0 and counts:
        return True, re.sub(r" in .*", "", counts[-1])
    return False, f"{(ran.stdout + ran.stderr)[-8000:]}\nexit status {ran.returncode}"


def main(names: list[str]) -> int:
    """Print a line for each cap; the exit status."""
    unknown = set(names) - set(CAPS)
    if unknown:
        print(f"no such cap: {', '.join(sorted(unknown))}; there are {', '.join(CAPS)}")
        return 2
    failed = False
    for name in names or CAPS:
        cap, begin = CAPS[name], time.monotonic()
        held = f"qemu-x86_64 -cpu {cap.emulates}" if cap.emulates else " ".join(cap.variables)
        skipped = reason_to_skip(cap)
        passed, result = (True, f"skipped: {skipped}") if skipped else run_capped(cap)
        failed |= not passed
        seconds = time.monotonic() - begin
        print(f"{name:8}  {result if passed else 'FAILED'}, {seconds:.0f} s   ({held})", flush=True)
        if not passed:
            print(result, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
