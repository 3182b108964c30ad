"""The plugin driven as TensorRT drives it, from its creator to enqueue, with a stand-in for the CUDA driver."""

import subprocess

import pytest

from tests.ops_plugin.conftest import FULL, INT8, PLAIN, SHARED, TIMEOUT_S, TOKEN, attributes, no_driver, read_calls
from toolchain.ops.attention import ABI
from toolchain.ops.kernels.tiles import MOST_SPLITS

FLOAT, HALF, INT8_TYPE, FP8_TYPE, BF16, INT64 = 0, 1, 2, 6, 7, 8
OUT, WORKSPACE, STREAM = 0xF0000, 0xA00000, 0x77  # addresses that the harness passes
INPUT = [0x10000 * (i + 1) for i in range(10)]
NAMES = ("qkv", "cos", "sin", "past_lengths", "key_cache", "value_cache")


@pytest.fixture
def drive(harness, plugin, fake_environment):
    """Run the harness on commands; returns its answers, its stderr and the driver's log."""

    def drive_(*commands, environment=None, **device):
        fake, log = fake_environment(**device)
        done = subprocess.run(
            [harness, plugin.path],
            input="\n".join(commands),
            env=environment or fake,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr, log

    return drive_


def fields(spec):
    kinds = {int: "int", float: "float", str: "text"}
    values = {name: value for name, value in attributes(spec).items() if not name.startswith("plugin_")}
    return [f"field {kinds[type(value)]} {name} {value}" for name, value in values.items()]


def tensors(spec, batch, tokens, capacity, compute=HALF):
    cache = {"none": compute, "int8": INT8_TYPE, "fp8_e4m3": FP8_TYPE}[spec.cache_format]
    kept = f"tensor {cache} {batch} {spec.num_kv_heads} {capacity} {spec.head_dim}"
    table = f"tensor {FLOAT} 128 {spec.rotary_dim // 2}"
    lines = [
        f"tensor {compute} {batch} {tokens} {spec.packed_width}",
        table,
        table,
        f"tensor {INT64} {batch}",
        kept,
        kept,
    ]
    scale = kept.replace(f"tensor {cache}", f"tensor {FLOAT}").rsplit(" ", 1)[0]
    lines += [scale if spec.token_scales else f"tensor {FLOAT} {spec.num_kv_heads}"] * 2 * spec.quantized
    lines += [f"tensor {compute} {spec.head_dim}"] * 2 * spec.qk_norm
    lines += [f"tensor {compute} {batch} {tokens} {spec.num_heads * spec.head_dim}", kept, kept]
    return [*lines, *[scale] * 2 * spec.token_scales]


def test_it_says_what_it_is(drive):
    answers, _, _ = drive(*fields(FULL), "create build", "restore", "declared", "aliases")
    said = (
        "6 query and 2 KV heads of 18, scale 0.125, rotary_dim 8 interleaved, cache int8, softcap 30, window 96, "
        "qk_norm_eps 9.99999997e-07"
    )
    assert answers[:2] == [said, said]  # and the same after being saved and made again
    assert answers[2].split()[0] == "abi:5"
    assert answers[3].split() == ["-1", "4", "5"]
    assert ABI == 3


def test_scales_of_tokens_are_caches_too(drive):
    answers, _, _ = drive(*fields(TOKEN), "create build", "restore", "aliases")
    said = (
        "6 query and 2 KV heads of 18, scale 0.125, rotary_dim 8, cache int8 with a scale per token, softcap 30, "
        "window 96, qk_norm_eps 9.99999997e-07"
    )
    assert answers[:2] == [said, said]
    assert answers[2].split() == ["-1", "4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("spec", "compute", "expected"),
    [
        (PLAIN, HALF, "1 7 |0 |0 |8 |1 |1 |1 |1 |1"),
        (PLAIN, BF16, "1 7 |0 |0 |8 |7 |7 |7 |7 |7"),
        (INT8, HALF, "1 7 |0 |0 |8 |2 |2 |0 |0 |1 |2 |2"),
        (FULL, BF16, "1 7 |0 |0 |8 |2 |2 |0 |0 |7 |7 |7 |2 |2"),
        (TOKEN, BF16, "1 7 |0 |0 |8 |2 |2 |0 |0 |7 |7 |7 |2 |2 |0 |0"),
    ],
)
def test_formats_are_linear_and_of_one_type_each(drive, spec, compute, expected):
    answers, _, _ = drive(*fields(spec), "create build", *tensors(spec, 2, 4, 64, compute), "formats")
    assert answers[1].replace("| ", "|").strip() == expected


def test_workspace_is_for_the_most_splits_of_the_largest_batch(drive):
    commands = [*fields(PLAIN), "create build", *tensors(PLAIN, 5, 32, 64), "configure", "workspace 1", "workspace 2"]
    answers, _, _ = drive(*commands)
    partials = 5 * PLAIN.num_heads * MOST_SPLITS
    assert answers[1:] == ["0", str(partials * PLAIN.head_dim * 4 + partials * 4), "0"]


def test_a_runtime_loads_the_kernels_before_the_first_call(drive):
    commands = [*fields(FULL), "create run", "attach", *tensors(FULL, 2, 5, 64), "shapes"]
    answers, stderr, log = drive(*commands)
    assert answers[1:] == ["attached", "0"]
    assert stderr == ""
    assert [c["label"] for c in read_calls(log, "cuModuleLoadData")] == [
        f"spec3.float16.sm89.{name}" for name in SHARED
    ]
    assert read_calls(log, "cuLaunchKernel") == []


def test_a_builder_needs_no_device(drive):
    commands = [*fields(PLAIN), "create build", "attach", *tensors(PLAIN, 2, 5, 64), "shapes"]
    answers, stderr, log = drive(*commands, sm=120)
    assert answers[1:] == ["attached", "0"]
    assert stderr == ""
    assert read_calls(log) == []


@pytest.mark.parametrize("spec", [FULL, TOKEN])
def test_enqueue_runs_prefill_and_decode(drive, spec):
    prompt, token = tensors(spec, 2, 5, 64), tensors(spec, 2, 1, 64)
    commands = [
        *fields(spec),
        "create run",
        "attach",
        *prompt,
        "shapes",
        "enqueue",
        "clear",
        *token,
        "shapes",
        "enqueue",
    ]
    answers, stderr, log = drive(*commands, processors=16)
    assert answers[1:] == ["attached", "0", "0", "0", "0"]
    assert stderr == ""
    launches = read_calls(log, "cuLaunchKernel")
    assert [made["kernel"] for made in launches] == ["cache_write", "prefill", "decode_split", "decode_merge"]
    assert {made["stream"] for made in launches} == {STREAM}
    inputs = dict(zip((*NAMES, "key_scale", "value_scale", "q_norm", "k_norm"), INPUT, strict=True))
    known = inputs | {"out": OUT, "new_tokens": 5, "capacity": 64, "splits": 2, "partial_out": WORKSPACE}
    known["partial_lse"] = WORKSPACE + 1792  # 2 rows of 6 heads of 2 splits of 18 floats, aligned
    for made in launches:
        assert made["arguments"] == {name: known[name] for name in made["arguments"]}
    assert [made["grid"] for made in launches] == [[1, 2, 2], [1, 2, 2], [2, 2, 2], [6, 2, 1]]
    assert len(read_calls(log, "cuModuleLoadData")) == 4


def test_inputs_a_node_does_not_have_are_null(drive):
    answers, _, log = drive(*fields(PLAIN), "create run", *tensors(PLAIN, 2, 5, 64, BF16), "enqueue")
    assert answers[1:] == ["0"]
    write, attend = read_calls(log, "cuLaunchKernel")
    assert write["label"] == "spec0.bfloat16.sm89.cache_write"
    assert [write["arguments"][name] for name in ("key_scale", "value_scale", "k_norm")] == [0, 0, 0]
    assert attend["arguments"]["q_norm"] == 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (PLAIN, "present_value: expected the memory of past_value (PreviewFeature ALIASED_PLUGIN_IO_10_03)"),
        (TOKEN, "present_value_scale: expected the memory of value_scale (PreviewFeature"),
    ],
)
def test_a_cache_that_is_not_written_in_place_is_refused(drive, spec, said):
    answers, stderr, log = drive(*fields(spec), "create run", *tensors(spec, 2, 5, 64), "unaliased", "enqueue")
    assert answers[1:] == ["1"]
    assert said in stderr
    assert read_calls(log, "cuLaunchKernel") == []


def test_a_device_without_kernels_is_named_at_load_and_at_shapes(drive):
    commands = [*fields(PLAIN), "create run", "attach", *tensors(PLAIN, 2, 5, 64), "shapes", "enqueue"]
    answers, stderr, _ = drive(*commands, sm=90)
    assert answers[1:] == ["attached", "1", "1"]
    assert stderr.count("no kernels for sm90") == 3
    assert "expected one of the embedded: sm80, sm89" in stderr


@pytest.mark.parametrize("command", ["shapes", "configure"])
def test_shapes_of_a_run_are_checked(drive, command):
    commands = [*fields(PLAIN), "create run", *tensors(PLAIN, 2, 65, 64), command]
    answers, stderr, _ = drive(*commands)
    assert answers[1:] == ["1"]
    assert "new tokens of qkv: expected at most the cache's capacity of 64, found 65" in stderr


@no_driver
def test_a_runtime_without_a_driver_says_so(drive):
    commands = [*fields(PLAIN), "create run", "attach", *tensors(PLAIN, 2, 5, 64), "enqueue"]
    answers, stderr, _ = drive(*commands, environment={"LANG": "C"})
    assert answers[1:] == ["attached", "1"]
    assert stderr.count("cannot load the NVIDIA driver") == 2
