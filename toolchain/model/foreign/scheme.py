"""Which layout a quantized checkpoint has, by its config: every key with a meaning is used, noted or refused.

Reads `quantization_config` of config.json, or the file that TensorRT Model Optimizer writes beside it. Which
matrices are codes is told by the tensors themselves, so lists of modules left in float are not needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolchain.errors import DtoolError, name_list
from toolchain.model.config_keys import Document, Keys

QUANT_FILE = "hf_quant_config.json"
STORED_SCALES = "stored_scales.safetensors"
"""Where an export keeps the scales of its checkpoint."""
STORED_DETAILS = "stored_quantization"
"""What its manifest says of them."""
INSTEAD = "give the checkpoint that was not quantized, and let a recipe quantize it"
Activations = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint is quantized.

    `layout`: gptq | awq | packed | plain. `weight_format`: int4 | int8 | fp8_e4m3, none where only the cache is
    quantized. `group_size`: inputs of one scale, None for all of a channel. `symmetric`: what the config promises,
    None where it promises nothing. `zero_offset`: what is added to stored zero points. `ordered`: each matrix has
    a group index of its own. `activations`: (format, token | tensor) of the products' inputs; `offset_inputs`: they
    have zero points, and are left out. `kv_format`: of the cache.
    """

    method: str
    layout: str = "plain"
    weight_format: str = "none"
    group_size: int | None = None
    symmetric: bool | None = None
    zero_offset: int = 0
    ordered: bool = False
    activations: Activations | None = None
    offset_inputs: bool = False
    kv_format: str | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.weight_format == "int4" else 8

    def text(self) -> str:
        """The scheme in a line."""
        group = f", groups of {self.group_size}" if self.group_size else ""
        cache = f", cache {self.kv_format}" if self.kv_format else ""
        activations = f", activations {self.activations[0]} by {self.activations[1]}" if self.activations else ""
        return f"{self.method}: weights {self.weight_format}{group}{activations}{cache}"


def read_scheme(document: Document, quant_file: Document | None, notes: list[str]) -> tuple[Document, Scheme | None]:
    """The config without its quantization, and the scheme; None where the checkpoint is not quantized.

    `quant_file`: the content of `QUANT_FILE`, where there is one. Raises DtoolError for a method, layout or
    width that is not supported, and for a key that would change what the tensors mean.
    """
    plain = {key: value for key, value in document.items() if key != "quantization_config"}
    block = document.get("quantization_config")
    if block is None and quant_file is None:
        return plain, None
    block = _with_quant_file({} if block is None else block, quant_file)
    method = block.get("quant_method")
    if method not in METHODS:
        raise DtoolError(
            f"quant_method {method!r:.80} is not supported",
            expected=", ".join(METHODS),
            found=repr(method)[:80],
            fix=INSTEAD,
        )
    keys = Keys(block, inert=INERT[method])
    keys.get("quant_method")
    scheme = METHODS[method](keys, notes)
    if unread := [key for key in keys.unread() if block[key] not in (False, "", [], {})]:
        notes.append(f"keys of quantization_config that dtool does not know: {name_list(unread, 8)}")
    notes.append(f"stored as codes ({scheme.text()}); exported as the numbers they stand for")
    return plain, scheme


def _with_quant_file(block: Any, quant_file: Document | None) -> Document:
    """The block of config.json, completed by the separate file, whose keys are older."""
    if not isinstance(block, dict):
        found, fix = repr(block)[:80], "mend config.json"
        raise DtoolError("quantization_config is no object", expected="{ ... }", found=found, fix=fix)
    if quant_file is None:
        return block
    inner = quant_file.get("quantization")
    if not isinstance(inner, dict):
        raise DtoolError(
            f"{QUANT_FILE} does not say how the checkpoint is quantized",
            expected="the key quantization, an object",
            found=repr(inner)[:80],
            fix="download the file again",
        )
    both = {"quant_method": "modelopt"} | inner
    clash = [key for key in ("quant_method", "quant_algo") if block.get(key, both.get(key)) != both.get(key)]
    if clash:
        raise DtoolError(
            f"config.json and {QUANT_FILE} describe two quantizations",
            expected=", ".join(f"{key} {both.get(key)!r}" for key in clash),
            found=", ".join(f"{key} {block[key]!r}" for key in clash),
            fix="remove the one that is not of these weights",
        )
    return both | block


def _meaning(name: str, found: Any, meanings: Mapping[Any, Any]) -> Any:
    """What a value means. Raises DtoolError with the values that have a meaning."""
    if isinstance(found, list | dict) or found not in meanings:
        raise DtoolError(
            f"{name} {found!r:.80} of the checkpoint's quantization is not supported",
            expected=", ".join(str(value) for value in meanings),
            found=repr(found)[:80],
            fix=INSTEAD,
        )
    return meanings[found]


def _choice(keys: Keys, key: str, meanings: Mapping[Any, Any], default: Any = None) -> Any:
    """What the value of a key means, `default` where it is missing or null."""
    return _meaning(key, keys.given(key, default), meanings)


def _group(keys: Keys, key: str, default: int | None = None) -> int | None:
    """The group size; None for -1, which is all inputs."""
    found = keys.get(key, default)
    if found is None:
        raise DtoolError(
            f"the checkpoint's quantization does not say its {key}",
            expected="inputs of one scale, or -1 for all",
            found="no such key",
            fix="download config.json again",
        )
    return None if found == -1 else keys.size(key, default)


def _none(keys: Keys, *names: str) -> None:
    """Refuse keys that would change what the tensors mean, unless they are empty."""
    for name in names:
        if found := keys.get(name):
            raise DtoolError(
                f"{name} of the checkpoint's quantization is not supported",
                expected="none",
                found=repr(found)[:120],
                fix=INSTEAD,
            )


def _gptq(keys: Keys, _: list[str]) -> Scheme:
    kind = "checkpoint_format" if keys.get("checkpoint_format") is not None else "format"
    offset = _choice(keys, kind, {"gptq": 1, "gptq_v2": 0}, "gptq")
    _none(keys, "dynamic", "is_marlin_format", "adapter", "rotation")
    _choice(keys, "pack_dtype", {"int32": None}, "int32")
    return Scheme(
        "gptq",
        layout="gptq",
        weight_format=_choice(keys, "bits", {4: "int4", 8: "int8"}),
        group_size=_group(keys, "group_size"),
        symmetric=True if keys.flag("sym", False) else None,
        zero_offset=offset,
        ordered=keys.flag("desc_act", False),
    )


def _awq(keys: Keys, _: list[str]) -> Scheme:
    version = keys.given("version", "gemm")
    _meaning("version", version.lower() if isinstance(version, str) else version, {"gemm": None})
    bits, group = (new if new in keys.document else old for new, old in AWQ_KEYS)
    zeros = keys.flag("zero_point", True)
    return Scheme(
        "awq",
        layout="awq",
        weight_format=_choice(keys, bits, {4: "int4"}),
        group_size=_group(keys, group, 128),
        symmetric=None if zeros else True,
    )


def _compressed(keys: Keys, notes: list[str]) -> Scheme:
    sparsity = keys.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        _none(keys, "sparsity_config")
    _none(keys, "transform_config")
    kv_format = _cache(keys.get("kv_cache_scheme"))
    groups = keys.given("config_groups", {})
    if not groups and kv_format:
        return Scheme("compressed-tensors", kv_format=kv_format)
    weights, inputs, forms = _one_group(groups)
    form = keys.given("format", forms[0] if forms else None)
    weight = Keys(weights, inert=ARGUMENTS_INERT)
    number = (weight.get("type", "int"), weight.get("num_bits", 8))
    layouts = PACKED if form == "pack-quantized" else PLAIN.get(form, {})
    if number not in layouts or any(other != form for other in forms):
        raise DtoolError(
            "the format of the compressed-tensors checkpoint is not supported",
            expected="one of pack-quantized with int 4 or 8, int-quantized with int 8, float-quantized with float 8",
            found=f"{name_list(map(str, {form, *forms}))} with {number[0]} {number[1]}",
            fix=INSTEAD,
        )
    grouped = weight.get("group_size")  # beside another strategy it means nothing
    strategy = weight.get("strategy") or ("group" if grouped else "tensor")
    by_group = _meaning("strategy", strategy, {"tensor": False, "channel": False, "group": True})
    order = _choice(weight, "actorder", ORDERS, False)
    _none(weight, "dynamic", "block_structure")
    group = _group(weight, "group_size") if by_group else None
    symmetric = True if weight.flag("symmetric", True) else None
    if unread := weight.unread():
        notes.append(f"arguments of the checkpoint's weights that dtool does not know: {name_list(unread)}")
    activations, offset = _activations(inputs, notes)
    return Scheme(
        "compressed-tensors",
        layout="packed" if form == "pack-quantized" else "plain",
        weight_format=layouts[number],
        group_size=group,
        symmetric=symmetric,
        ordered=order,
        activations=activations,
        offset_inputs=offset,
        kv_format=kv_format,
    )


def _one_group(groups: Any) -> tuple[Document, Document | None, list[str]]:
    """The arguments of the weights and of the inputs, which all groups share, and the groups' formats."""
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if not schemes or not all(isinstance(s, dict) and isinstance(s.get("weights"), dict) for s in schemes):
        raise DtoolError(
            "config_groups says nothing of the weights",
            expected="an object of groups, each with an object weights",
            found=repr(groups)[:120],
            fix=INSTEAD,
        )
    for scheme in schemes:
        _none(Keys(scheme), "output_activations")
    kinds = {str([s["weights"], s.get("input_activations")]) for s in schemes}
    if len(kinds) > 1:
        raise DtoolError(
            "the checkpoint mixes several kinds of quantization",
            expected="config_groups that differ in their targets alone",
            found=name_list(map(str, groups)),
            fix=INSTEAD,
        )
    return schemes[0]["weights"], schemes[0].get("input_activations"), [s["format"] for s in schemes if s.get("format")]


def _activations(inputs: Document | None, notes: list[str]) -> tuple[Activations | None, bool]:
    """Format and granularity of the inputs (by token if dynamic, by tensor if stored), and whether they are offset."""
    if inputs is None:
        return None, False
    keys = Keys(inputs, inert=ARGUMENTS_INERT)
    fmt = _meaning("input_activations", f"{keys.get('type', 'int')} {keys.get('num_bits', 8)}", EIGHT_BITS)
    _choice(keys, "strategy", {"token": None, "tensor": None}, "tensor")
    if not keys.flag("symmetric", True):
        notes.append("the checkpoint's activations have zero points: left out, as no target takes them")
        return None, True
    return (fmt, "token" if keys.flag("dynamic", False) else "tensor"), False


def _cache(scheme: Any) -> str | None:
    """The cache's format by its arguments."""
    if not scheme:
        return None
    keys = Keys(scheme if isinstance(scheme, dict) else {"type": scheme}, inert=ARGUMENTS_INERT)
    fmt = _meaning("kv_cache_scheme", f"{keys.get('type', 'int')} {keys.get('num_bits', 8)}", EIGHT_BITS)
    _choice(keys, "strategy", {"tensor": None, "attn_head": None}, "tensor")
    _choice(keys, "symmetric", {True: None}, default=True)
    _choice(keys, "dynamic", {False: None}, default=False)
    return fmt


def _modelopt(keys: Keys, _: list[str]) -> Scheme:
    _none(keys, "quantized_layers")
    kv_format = _cache(keys.get("kv_cache_scheme")) or _choice(keys, "kv_cache_quant_algo", CACHE_ALGORITHMS, "none")
    named = keys.given("quant_algo", "none")
    fmt, granularity = _meaning("quant_algo", named.upper() if isinstance(named, str) else named, ALGORITHMS)
    if fmt != "none":
        return Scheme(
            "modelopt", weight_format=fmt, symmetric=True, activations=(fmt, granularity), kv_format=kv_format
        )
    if kv_format is None:
        raise DtoolError(
            "the checkpoint's quantization names no quant_algo",
            expected=", ".join(ALGORITHMS),
            found="none",
            fix="download its configuration again, or take the checkpoint before it was quantized",
        )
    return Scheme("modelopt", kv_format=kv_format)


AWQ_KEYS = (("bits", "w_bit"), ("group_size", "q_group_size"))
"""New names and old."""
ORDERS = {False: False, True: True, "weight": False, "static": False, "group": True, "dynamic": True}
"""By actorder: whether the groups of inputs are stored."""
EIGHT_BITS = {"int 8": "int8", "float 8": "fp8_e4m3"}
PACKED = {("int", 4): "int4", ("int", 8): "int8"}
PLAIN = {
    "int-quantized": {("int", 8): "int8"},
    "float-quantized": {("float", 8): "fp8_e4m3"},
    "naive-quantized": {("int", 8): "int8", ("float", 8): "fp8_e4m3"},
}
CACHE_ALGORITHMS = {"none": None, "FP8": "fp8_e4m3", "INT8": "int8"}
ALGORITHMS = {
    "NONE": ("none", ""),
    "FP8": ("fp8_e4m3", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", "token"),
    "W8A8_SQ_PER_CHANNEL": ("int8", "tensor"),
    "INT8_SQ": ("int8", "tensor"),
}
METHODS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "modelopt": _modelopt}
ARGUMENTS_INERT = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mse")
INERT = {
    "gptq": (
        "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset", "tokenizer",
        "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "use_cuda_fp16",
        "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "cache_block_outputs", "backend",
        "modules_in_block_to_quantize", "model_name_or_path", "model_file_base_name", "lm_head", "meta", "mse",
        "quantizer", "hyb_act", "act_group_aware", "v2", "gptaq", "offload_to_disk", "method",
    ),
    "awq": (
        "modules_to_not_convert", "modules_to_fuse", "do_fuse", "fuse_max_seq_len", "backend", "exllama_config", "meta",
    ),
    "compressed-tensors": (
        "ignore", "quantization_status", "global_compression_ratio", "version", "run_compressed",
    ),
    "modelopt": ("ignore", "exclude_modules", "producer", "config_groups", "group_size"),
}  # fmt: skip
"""By method: keys of how the codes were found, or which the tensors tell."""
