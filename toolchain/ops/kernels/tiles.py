"""Tile sizes by GPU, head dim and bytes of a cache element: one small table, and why.

Prefill keeps a BLOCK_M x E accumulator, BLOCK_M x BLOCK_N scores and `stages` tiles of K and of V
(BLOCK_N x E) at once. What bounds them:

    registers   (E + 1.5 BLOCK_N) BLOCK_M / (32 warps) <= about 200 of 255
    shared      stages * 2 * BLOCK_N * E * bytes, + 2 BLOCK_M E where Q is read from shared memory (sm90, sm100),
                + a converted K and V tile there for a cache of codes; <= 163 KB (sm80), 99 (86, 89, 120), 227 (90, 100)

sm90 multiplies by warpgroups of 64 rows from shared memory, so two of them (BLOCK_M 128, 8 warps) and
BLOCK_N 128: with 64 columns reading both operands costs as long as multiplying them. sm80 takes operands from
registers and gains from a longer pipeline: BLOCK_N 64, three stages. The 99 KB parts take two.

Decode waits for memory alone. By Little's law 4.8 TB/s at about 0.8 us needs 30 KB in flight on each
multiprocessor of an H200: tiles of about 16 KB for K and for V, three stages, 4 warps, two or three
programs resident. Narrow caches take more slots a tile, so that the bytes stay.

Nothing may spill. Left alone, ptxas holds decode at 128 registers for a fourth program and stores what is
over, yet three stages of 16 KB tiles leave shared memory for three programs: there the kernel is compiled for
three, 65536 / (3 * 128) = 168 registers. Smaller tiles (codes of 64 dims or fewer, 99 KB parts) fit in less,
and more programs of them are resident. Prefill uses all 255 registers in its richest variants (softcap, window
and QK-norm) and still fits: the window's part of the key loop carries none of the diagonal's masks, some tiles are
narrower when there is more to do than attention alone (`_prefill`), and queries are rotated one half after the
other (APART) where that helps; elsewhere ptxas does better with all loads in flight.

Given up: no autotuning at run time (an engine must hold one fixed kernel); one choice for all lengths.
"""

from dataclasses import dataclass

from toolchain.errors import DtoolError

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory a thread block may have, by compute capability. CUDA C++ guide, table of capabilities."""
MERGE_SPLITS = 16
"""Splits that `decode_merge` loads at a time; it takes any number."""
MOST_SPLITS = 128
"""Most splits of a row: the workspace of a decode holds so many partial results. `kMaxSplits` of the plugin."""
RESIDENT = 3
"""Programs of decode that a multiprocessor is to hold at once. `kResident` of the plugin."""
REGISTERS = 65536
"""Registers of a multiprocessor, every GPU here."""
FEWEST_ROWS = 16
"""Rows of the smallest tensor core product."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is compiled: block sizes by name, warps, pipeline stages, most registers (None: ptxas chooses)."""

    tile: dict[str, int]
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Triton's options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


_PREFILL = {
    (80, 64): (128, 64, 8, 3),
    (80, 128): (128, 64, 8, 3),
    (80, 256): (64, 64, 8, 2),
    (86, 64): (128, 64, 8, 2),
    (86, 128): (128, 64, 8, 2),
    (86, 256): (64, 32, 8, 2),
    (90, 64): (128, 128, 8, 2),
    (90, 128): (128, 128, 8, 2),
    (90, 256): (64, 64, 8, 2),
    (100, 64): (128, 128, 8, 2),
    (100, 128): (128, 128, 8, 2),
    (100, 256): (64, 64, 8, 2),
}
"""BLOCK_M, BLOCK_N, warps, stages by family and padded head dim. At 256 the accumulator leaves room for 64 rows."""
_TOKEN_SCALES_BLOCK_N = {(80, 128): 32, (86, 128): 32, (90, 64): 64, (90, 256): 32}
"""Most columns where every slot brings its scales: they multiply scores and weights, which takes registers."""
_APART = frozenset({(90, 256)})
"""Families and padded head dims whose prefill rotates in two halves: see `rotated_rows`."""
_FAMILY = {80: 80, 86: 86, 89: 86, 90: 90, 100: 100, 120: 86}
_DECODE_TILE_BYTES = {80: 16 * 1024, 86: 8 * 1024, 90: 16 * 1024, 100: 16 * 1024}
_DECODE_STAGES = 3
_DECODE_WARPS = 4


def padded_dim(head_dim: int) -> int:
    """The power of two, at least 32, that a tile of heads spans: pairs of codes halve it, products take 16."""
    return max(32, 1 << (head_dim - 1).bit_length())


def launches(
    sm: int, head_dim: int, group: int, cache_bytes: int, extras: frozenset[str] = frozenset()
) -> dict[str, Launch]:
    """The `Launch` of each kernel by its name. Raises DtoolError for a GPU not in the table.

    Args:
        sm: Compute capability, 10 * major + minor.
        head_dim: Dims of a head, not padded.
        group: Query heads of a KV head.
        cache_bytes: Bytes of a cache element.
        extras: What there is to do besides: window, softcap, qk_norm, token_scales.
    """
    if sm not in _FAMILY:
        known = ", ".join(map(str, sorted(_FAMILY)))
        raise DtoolError(
            f"there are no attention kernels for sm_{sm}",
            expected=f"one of sm {known}",
            found=f"sm_{sm}",
            fix="build for one of these, or use a backend other than tensorrt",
        )
    padded, family = padded_dim(head_dim), _FAMILY[sm]
    return {
        "cache_write": Launch({"BLOCK_T": max(1, 2048 // padded)}, 4, 1),
        "prefill": _prefill(family, padded, extras),
        "decode_split": _decode(family, padded, group, cache_bytes, extras),
        "decode_merge": Launch({"BLOCK_S": MERGE_SPLITS}, 4, 1),
    }


def _prefill(family: int, padded: int, extras: frozenset[str]) -> Launch:
    """The table's tile, narrower where extras would not leave room for its registers."""
    block_m, block_n, warps, stages = _PREFILL[family, max(64, padded)]
    apart = (family, padded) in _APART
    if extras and padded == 128 and family in (90, 100):
        block_n, apart = 64, family == 100
    if (family, padded) == (90, 256) and "window" in extras and "qk_norm" not in extras:
        block_n = 32
    if (family, padded) == (100, 256) and "qk_norm" in extras:
        block_n, apart = 32, True
    if "token_scales" in extras:
        block_n = min(block_n, _TOKEN_SCALES_BLOCK_N.get((family, max(64, padded)), block_n))
        if (family, padded) == (90, 256) and {"window", "qk_norm"} <= extras:
            stages = 1  # the pipeline's addresses would not fit either
    rows = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    return Launch(rows | ({"APART": 1} if apart else {}), warps, stages)


def _decode(family: int, padded: int, group: int, cache_bytes: int, extras: frozenset[str]) -> Launch:
    most = 64 if padded == 32 and "token_scales" in extras else 128
    slots = min(most, max(16, _DECODE_TILE_BYTES[family] // (padded * cache_bytes)))
    tile = {"BLOCK_G": max(FEWEST_ROWS, 1 << (group - 1).bit_length()), "BLOCK_N": slots}
    full = slots * padded * cache_bytes >= 16 * 1024
    registers = REGISTERS // (RESIDENT * _DECODE_WARPS * 32) // 8 * 8  # given out by eights
    return Launch(tile, _DECODE_WARPS, _DECODE_STAGES, registers if full else None)


def choose_splits(batch: int, kv_heads: int, slots: int, block_n: int, multiprocessors: int) -> int:
    """Splits that fill the GPU in one wave: three programs a multiprocessor, none less than one tile.

    `split_count` of the plugin computes the same. It depends on shapes and device alone, so a captured CUDA
    graph stays right while the rows grow.

    Args:
        batch: Rows.
        kv_heads: KV heads.
        slots: Those the longest row may see: its capacity, or the window where that is less.
        block_n: Slots of a tile of `decode_split`.
        multiprocessors: Multiprocessors of the device.
    """
    wanted = RESIDENT * multiprocessors // (batch * kv_heads)
    return max(1, min(wanted, -(-slots // block_n), MOST_SPLITS))
