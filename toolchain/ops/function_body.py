"""The ops as model-local ONNX functions of standard operators (opset 24): attention, and experts.

The very file that goes to TensorRT carries this body, so it also runs in ONNX Runtime and passes
the checker. Rules learnt the hard way: an explicit mask (ONNX `is_causal` aligns to the upper left
once a cache is there); one output per Attention; formal names with a prefix of their own; as many
inputs on the node as the function has; sizes baked in, since a Reshape target cannot be an
attribute. The poison guard keeps whatever lies in slots beyond the valid length out of the
products (0 * NaN is NaN). Layers of one model differ in their window, which the body reads from its node,
and in their cache: each kind of cache is an overload of the function, which nodes and bodies name.
"""

from collections.abc import Iterable
from dataclasses import replace

import onnx
import onnx_ir as ir

from toolchain.numerics import CODE_RANGE, SMALLEST_SCALE
from toolchain.ops.attention import ABI, AttentionSpec

DOMAIN = "dtool"
OP_TYPE = "FusedAttention"
OPSET = 24
INPUTS = ("qkv", "cos", "sin", "past_lengths", "past_key", "past_value")
OUTPUTS = ("out", "present_key", "present_value")
SCALE_INPUTS = ("key_scale", "value_scale")
"""Follow INPUTS when the cache is quantized; with scales per token they are caches themselves."""
SCALE_OUTPUTS = ("present_key_scale", "present_value_scale")
"""Follow OUTPUTS when every token has scales of its own."""
NORM_INPUTS = ("q_norm", "k_norm")
"""Come last, when queries and keys are normed."""

_POSITIONS = """
  fa_zero = Constant <value_int=0> ()
  fa_one = Constant <value_int=1> ()
  fa_axis1 = Constant <value_ints=[1]> ()
  fa_tokens_1 = Shape <start=1, end=2> (fa_qkv)
  fa_tokens = Squeeze (fa_tokens_1)
  fa_steps = Range (fa_zero, fa_tokens, fa_one)
  fa_past_column = Unsqueeze (fa_past_lengths, fa_axis1)
  fa_positions = Add (fa_past_column, fa_steps)
  fa_capacity_1 = Shape <start=2, end=3> (fa_past_key)
  fa_capacity = Squeeze (fa_capacity_1)
  fa_slots = Range (fa_zero, fa_capacity, fa_one)
"""

_UNPACKED = """
  fa_sizes = Constant <value_ints=[{heads}, {kv_heads}, {kv_heads}]> ()
  fa_packed_shape = Constant <value_ints=[0, 0, {all_heads}, {dim}]> ()
  fa_packed = Reshape (fa_qkv, fa_packed_shape)
  fa_packed_heads = Transpose <perm=[0, 2, 1, 3]> (fa_packed)
  fa_q_heads, fa_k_heads, fa_v_ready = Split <axis=1> (fa_packed_heads, fa_sizes)
"""

_NORMED = "  fa_{x}_normed = RMSNormalization <axis=-1, epsilon={eps}> (fa_{x}_heads, fa_{x}_norm)\n"

_ROTATED = """
  fa_{x}_cos = CastLike (fa_cos, fa_qkv)
  fa_{x}_sin = CastLike (fa_sin, fa_qkv)
  fa_{x}_ready = RotaryEmbedding <interleaved={interleaved}, rotary_embedding_dim={rotary}>
    ({source}, fa_{x}_cos, fa_{x}_sin, fa_positions)
"""

_STORE = '  fa_present_{name} = TensorScatter <axis=2, mode="linear"> (fa_past_{name}, fa_{x}_ready, fa_past_lengths)\n'

_AS_FLOAT = "  fa_{x}_float = Cast <to=1> (fa_{x}_ready)\n"

_STATIC_SCALE = """
  fa_{x}_scale_shape = Constant <value_ints=[{kv_heads}, 1, 1]> ()
  fa_{x}_scale = Reshape (fa_{name}_scale, fa_{x}_scale_shape)
"""

_OWN_SCALE = """
  fa_{x}_dims = Constant <value_ints=[-1]> ()
  fa_{x}_floor = Constant <value_float={floor}> ()
  fa_{x}_qmax = Constant <value_float={qmax}> ()
  fa_{x}_size = Abs (fa_{x}_float)
  fa_{x}_largest = ReduceMax <keepdims=1> (fa_{x}_size, fa_{x}_dims)
  fa_{x}_amax = Max (fa_{x}_largest, fa_{x}_floor)
  fa_{x}_scale = Div (fa_{x}_amax, fa_{x}_qmax)
  fa_{x}_scale_row = Squeeze (fa_{x}_scale, fa_{x}_dims)
  fa_present_{name}_scale = TensorScatter <axis=2, mode="linear">
    (fa_{name}_scale, fa_{x}_scale_row, fa_past_lengths)
  fa_{x}_read = Unsqueeze (fa_present_{name}_scale, fa_{x}_dims)
"""

_SCALED = """
  fa_{x}_scaled = Div (fa_{x}_float, fa_{x}_scale)
  fa_{x}_unit = Constant <value_float=1.0> ()
"""

_STORE_INT8 = """
  fa_{x}_zero = Constant <value: tensor = int8 {{0}}> ()
  fa_{x}_codes = QuantizeLinear (fa_{x}_scaled, fa_{x}_unit, fa_{x}_zero)
  fa_present_{name} = TensorScatter <axis=2, mode="linear"> (fa_past_{name}, fa_{x}_codes, fa_past_lengths)
  fa_{name}_float = DequantizeLinear <{by}> (fa_present_{name}, {scale})
  fa_{name}_value = CastLike (fa_{name}_float, fa_qkv)
"""

# E4M3 codes pass through float32, where all of them are exact: runtimes scatter no float8. The clip
# keeps every runtime's cast in range.
_STORE_FP8 = """
  fa_{x}_low = Constant <value_float=-448.0> ()
  fa_{x}_high = Constant <value_float=448.0> ()
  fa_{x}_clipped = Clip (fa_{x}_scaled, fa_{x}_low, fa_{x}_high)
  fa_{x}_codes8 = Cast <to=17> (fa_{x}_clipped)
  fa_{x}_codes = Cast <to=1> (fa_{x}_codes8)
  fa_{x}_past = Cast <to=1> (fa_past_{name})
  fa_{name}_codes = TensorScatter <axis=2, mode="linear"> (fa_{x}_past, fa_{x}_codes, fa_past_lengths)
  fa_present_{name} = Cast <to=17> (fa_{name}_codes)
  fa_{name}_float = Mul (fa_{name}_codes, {factor})
  fa_{name}_value = CastLike (fa_{name}_float, fa_qkv)
"""

_STORES = {"none": _STORE, "int8": _STORE_INT8, "fp8_e4m3": _STORE_FP8}

_GUARD = """
  fa_written_axes = Constant <value_ints=[1, 3]> ()
  fa_total_column = Add (fa_past_column, fa_tokens_1)
  fa_written = Less (fa_slots, fa_total_column)
  fa_written_slots = Unsqueeze (fa_written, fa_written_axes)
  fa_nothing_f = Constant <value_float=0.0> ()
  fa_nothing = CastLike (fa_nothing_f, fa_qkv)
  fa_keys = Where (fa_written_slots, {key}, fa_nothing)
  fa_values = Where (fa_written_slots, {value}, fa_nothing)
"""

_MASK = """
  fa_mask_axes = Constant <value_ints=[1, 3]> ()
  fa_query_positions = Unsqueeze (fa_positions, fa_mask_axes)
  fa_{causal} = LessOrEqual (fa_slots, fa_query_positions)
"""

# window 0 sees everything: no slot is further away than the capacity
_WINDOW = """
  fa_asked_window = Constant <value_int: int = @window> ()
  fa_everything = Equal (fa_asked_window, fa_zero)
  fa_window = Where (fa_everything, fa_capacity, fa_asked_window)
  fa_window_start = Sub (fa_query_positions, fa_window)
  fa_in_window = Greater (fa_slots, fa_window_start)
  fa_mask = And (fa_causal, fa_in_window)
"""

_ATTEND = """
  fa_attended = Attention <scale={scale}{softcap}> (fa_q_ready, {keys}, {values}, fa_mask)
  fa_token_major = Transpose <perm=[0, 2, 1, 3]> (fa_attended)
  fa_out_shape = Constant <value_ints=[0, 0, {width}]> ()
  fa_out = Reshape (fa_token_major, fa_out_shape)
"""


def input_names(spec: AttentionSpec) -> tuple[str, ...]:
    """The node's inputs, in order: scales only with a quantized cache, norm weights only with QK-norm."""
    return (*INPUTS, *(SCALE_INPUTS if spec.quantized else ()), *(NORM_INPUTS if spec.qk_norm else ()))


def output_names(spec: AttentionSpec) -> tuple[str, ...]:
    """The node's outputs, in order: scales only where every token has some."""
    return (*OUTPUTS, *(SCALE_OUTPUTS if spec.token_scales else ()))


def overload(spec: AttentionSpec) -> str:
    """Which of the functions serves a node: they differ in how the cache is stored."""
    return f"{spec.cache_format}{'_token' * spec.token_scales}" if spec.quantized else ""


def _stored(spec: AttentionSpec, name: str, x: str) -> str:
    """New keys or values into the cache, and the whole cache as values: `fa_{name}_value` of a quantized one."""
    store = _STORES[spec.cache_format]
    if not spec.quantized:
        return store.format(x=x, name=name)
    if spec.token_scales:
        qmax = CODE_RANGE[spec.cache_format][1]
        made = _OWN_SCALE.format(x=x, name=name, floor=_float(SMALLEST_SCALE * qmax), qmax=_float(qmax))
        by, scale, factor = f"axis=3, block_size={spec.head_dim}", f"fa_{x}_read", f"fa_{x}_read"
    else:
        made = _STATIC_SCALE.format(x=x, name=name, kv_heads=spec.num_kv_heads)
        by, scale, factor = "axis=1", f"fa_{name}_scale", f"fa_{x}_scale"
    body = _AS_FLOAT.format(x=x) + made + _SCALED.format(x=x)
    return body + store.format(x=x, name=name, by=by, scale=scale, factor=factor)


def function_body(
    spec: AttentionSpec, *, windowed: bool | None = None, poison_guard: bool = True
) -> onnx.FunctionProto:
    """The op for one model. Without `poison_guard` the caches must be finite in every slot.

    `windowed`: whether some node has a window; by default whether this spec has one.
    """
    windowed = bool(spec.window) if windowed is None else windowed
    sizes = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "dim": spec.head_dim}
    body = _POSITIONS + _UNPACKED.format(**sizes, all_heads=spec.num_heads + 2 * spec.num_kv_heads)
    for x in ("q", "k"):
        source = f"fa_{x}_heads"
        if spec.qk_norm:
            body, source = body + _NORMED.format(x=x, eps=_float(spec.qk_norm_eps)), f"fa_{x}_normed"
        rotary = spec.rotary_dim if spec.rotary_dim < spec.head_dim else 0  # 0: the whole head
        body += _ROTATED.format(x=x, source=source, rotary=rotary, interleaved=int(spec.interleaved))
    body += _stored(spec, "key", "k") + _stored(spec, "value", "v")
    key, value = ("fa_key_value", "fa_value_value") if spec.quantized else ("fa_present_key", "fa_present_value")
    if poison_guard:
        body += _GUARD.format(key=key, value=value)
        key, value = "fa_keys", "fa_values"
    body += _MASK.format(causal="causal" if windowed else "mask")
    if windowed:
        body += _WINDOW
    softcap = f", softcap={_float(spec.softcap)}" if spec.softcap else ""
    width = spec.num_heads * spec.head_dim
    body += _ATTEND.format(scale=_float(spec.scale), softcap=softcap, keys=key, values=value, width=width)
    formals = ", ".join(f"fa_{name}" for name in input_names(spec))
    results = ", ".join(f"fa_{name}" for name in output_names(spec))
    attributes = " <window>" if windowed else ""
    function = onnx.parser.parse_function(
        f'<opset_import: ["" : {OPSET}], domain: "{DOMAIN}">\n'
        f"{OP_TYPE}{attributes} ({formals}) => ({results}) {{{body}}}"
    )
    function.overload = overload(spec)
    return function


def _float(value: float) -> str:
    """A float as the parser of ONNX text reads one: a whole number keeps its point."""
    text = f"{value:.9g}"
    return text if any(mark in text for mark in ".e") else f"{text}.0"


def attention_functions(specs: Iterable[AttentionSpec], *, poison_guard: bool = True) -> list[onnx.FunctionProto]:
    """The bodies for all attention nodes of a model: one for each kind of cache, whatever the windows."""
    windows: dict[AttentionSpec, bool] = {}
    for spec in specs:
        alike = replace(spec, window=0)
        windows[alike] = windows.get(alike, False) or bool(spec.window)
    bodies = [function_body(spec, windowed=any_, poison_guard=poison_guard) for spec, any_ in windows.items()]
    assert len({body.overload for body in bodies}) == len(bodies), list(windows)
    return bodies


def node_attributes(spec: AttentionSpec) -> list[ir.Attr]:
    """Every attribute of the node, for the plugin; the function body ignores them."""
    return list(
        ir.convenience.convert_attributes(
            {
                "abi": ABI,
                "num_heads": spec.num_heads,
                "num_kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "scale": spec.scale,
                "rotary_dim": spec.rotary_dim,
                "interleaved": int(spec.interleaved),
                "softcap": spec.softcap,
                "window": spec.window,
                "qk_norm_eps": spec.qk_norm_eps,
                "cache_format": spec.cache_format,
                "token_scales": int(spec.token_scales),
                "plugin_version": "1",
                "plugin_namespace": DOMAIN,
            }
        )
    )
