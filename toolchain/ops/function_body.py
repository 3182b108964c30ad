"""The attention op as a model-local ONNX function of standard operators (opset 24).

The very file that goes to TensorRT carries this body, so it also runs in ONNX Runtime and passes
the checker. Rules learnt the hard way: an explicit mask (ONNX `is_causal` aligns to the upper left
once a cache is there); one output per Attention; formal names with a prefix of their own; as many
inputs on the node as the function has; sizes baked in, since a Reshape target cannot be an
attribute. The poison guard keeps whatever lies in slots beyond the valid length out of the
products (0 * NaN is NaN).
"""

import onnx
import onnx_ir as ir

from toolchain.ops.attention import ABI, AttentionSpec

DOMAIN = "dtool"
OP_TYPE = "FusedAttention"
OPSET = 24
INPUTS = ("q", "k", "v", "cos", "sin", "past_lengths", "past_key", "past_value")
SCALE_INPUTS = ("key_scale", "value_scale")
"""Follow INPUTS when the cache is quantized."""

_POSITIONS = """
  fa_zero = Constant <value_int=0> ()
  fa_one = Constant <value_int=1> ()
  fa_axis1 = Constant <value_ints=[1]> ()
  fa_tokens_1 = Shape <start=1, end=2> (fa_q)
  fa_tokens = Squeeze (fa_tokens_1)
  fa_steps = Range (fa_zero, fa_tokens, fa_one)
  fa_past_column = Unsqueeze (fa_past_lengths, fa_axis1)
  fa_positions = Add (fa_past_column, fa_steps)
  fa_capacity_1 = Shape <start=2, end=3> (fa_past_key)
  fa_capacity = Squeeze (fa_capacity_1)
  fa_slots = Range (fa_zero, fa_capacity, fa_one)
"""

_ROTATED = """
  fa_{x}_shape = Constant <value_ints=[0, 0, {heads}, {dim}]> ()
  fa_{x}_split = Reshape (fa_{x}, fa_{x}_shape)
  fa_{x}_heads = Transpose <perm=[0, 2, 1, 3]> (fa_{x}_split)
  fa_{x}_cos = CastLike (fa_cos, fa_{x})
  fa_{x}_sin = CastLike (fa_sin, fa_{x})
  fa_{x}_ready = RotaryEmbedding <interleaved=0> (fa_{x}_heads, fa_{x}_cos, fa_{x}_sin, fa_positions)
"""

_SPLIT = """
  fa_{x}_shape = Constant <value_ints=[0, 0, {heads}, {dim}]> ()
  fa_{x}_split = Reshape (fa_{x}, fa_{x}_shape)
  fa_{x}_ready = Transpose <perm=[0, 2, 1, 3]> (fa_{x}_split)
"""

_STORE = '  fa_present_{name} = TensorScatter <axis=2, mode="linear"> (fa_past_{name}, fa_{x}_ready, fa_past_lengths)\n'

_STORE_INT8 = """
  fa_{x}_scale_shape = Constant <value_ints=[{heads}, 1, 1]> ()
  fa_{x}_scale = Reshape (fa_{name}_scale, fa_{x}_scale_shape)
  fa_{x}_float = Cast <to=1> (fa_{x}_ready)
  fa_{x}_scaled = Div (fa_{x}_float, fa_{x}_scale)
  fa_{x}_unit = Constant <value_float=1.0> ()
  fa_{x}_zero = Constant <value: tensor = int8 {{0}}> ()
  fa_{x}_codes = QuantizeLinear (fa_{x}_scaled, fa_{x}_unit, fa_{x}_zero)
  fa_present_{name} = TensorScatter <axis=2, mode="linear"> (fa_past_{name}, fa_{x}_codes, fa_past_lengths)
  fa_{name}_float = DequantizeLinear <axis=1> (fa_present_{name}, fa_{name}_scale)
  fa_{name}_value = CastLike (fa_{name}_float, fa_{x})
"""

_GUARD = """
  fa_written_axes = Constant <value_ints=[1, 3]> ()
  fa_total_column = Add (fa_past_column, fa_tokens_1)
  fa_written = Less (fa_slots, fa_total_column)
  fa_written_slots = Unsqueeze (fa_written, fa_written_axes)
  fa_nothing_f = Constant <value_float=0.0> ()
  fa_nothing = CastLike (fa_nothing_f, fa_q)
  fa_keys = Where (fa_written_slots, {key}, fa_nothing)
  fa_values = Where (fa_written_slots, {value}, fa_nothing)
"""

_ATTEND = """
  fa_mask_axes = Constant <value_ints=[1, 3]> ()
  fa_query_positions = Unsqueeze (fa_positions, fa_mask_axes)
  fa_mask = LessOrEqual (fa_slots, fa_query_positions)
  fa_attended = Attention <scale={scale:.9g}> (fa_q_ready, {keys}, {values}, fa_mask)
  fa_token_major = Transpose <perm=[0, 2, 1, 3]> (fa_attended)
  fa_out_shape = Constant <value_ints=[0, 0, {width}]> ()
  fa_out = Reshape (fa_token_major, fa_out_shape)
"""


def function_body(spec: AttentionSpec, *, poison_guard: bool = True) -> onnx.FunctionProto:
    """The op for one model. Without `poison_guard` the caches must be finite in every slot."""
    kv = {"heads": spec.num_kv_heads, "dim": spec.head_dim}
    store = _STORE_INT8 if spec.quantized else _STORE
    key, value = ("fa_key_value", "fa_value_value") if spec.quantized else ("fa_present_key", "fa_present_value")
    body = _POSITIONS
    body += _ROTATED.format(x="q", heads=spec.num_heads, dim=spec.head_dim)
    body += _ROTATED.format(x="k", **kv) + _SPLIT.format(x="v", **kv)
    body += store.format(name="key", x="k", **kv) + store.format(name="value", x="v", **kv)
    if poison_guard:
        body += _GUARD.format(key=key, value=value)
        key, value = "fa_keys", "fa_values"
    body += _ATTEND.format(scale=spec.scale, keys=key, values=value, width=spec.num_heads * spec.head_dim)
    names = (*INPUTS, *SCALE_INPUTS) if spec.quantized else INPUTS
    formals = ", ".join(f"fa_{name}" for name in names)
    return onnx.parser.parse_function(
        f'<opset_import: ["" : {OPSET}], domain: "{DOMAIN}">\n'
        f"{OP_TYPE} ({formals}) => (fa_out, fa_present_key, fa_present_value) {{{body}}}"
    )


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
                "cache_format": spec.cache_format,
                "plugin_version": "1",
                "plugin_namespace": DOMAIN,
            }
        )
    )
