"""The mixture of experts as a model-local ONNX function of standard operators.

Decode gathers the matrices of the experts that its tokens are routed to, so only those are read.
Prefill, where nearly every expert has some token, is dense, as two ordinary products: all tokens meet
the gates and ups of all experts, each expert's activations are weighted (zero where a token is not
routed to it), and the sum over experts is the sum inside the second product:

    y = [r_1 a_1, ..., r_n a_n] . [D_1; ...; D_n],   a_e = act(gate_e x) * up_e x,   r_e the routing weight

Shapes stay static, which compilers need, at the price of n / k times the arithmetic.

Legend: k experts of a token, n experts, E hidden, F feed-forward of one expert.
"""

import onnx

from toolchain.ops.experts import ExpertsSpec
from toolchain.ops.function_body import DOMAIN, OPSET

EXPERTS = "Experts"
FORMALS = ("x", "weights", "ids", "gate_up", "down")

_MATRICES = """
  ex_down_shape = Constant <value_ints=[{n}, {hidden}, {inner}]> ()
  ex_down_nEF = Reshape (ex_down, ex_down_shape)
  ex_last = Constant <value_ints=[-1]> ()
"""

_GATHERED = """
  ex_gate_up_shape = Constant <value_ints=[{n}, {twice}, {hidden}]> ()
  ex_gate_up_nFE = Reshape (ex_gate_up, ex_gate_up_shape)
  ex_two_axes = Constant <value_ints=[2, 4]> ()
  ex_x_column = Unsqueeze (ex_x, ex_two_axes)
  ex_gate_up_picked = Gather <axis=0> (ex_gate_up_nFE, ex_ids)
  ex_hidden_column = MatMul (ex_gate_up_picked, ex_x_column)
  ex_hidden = Squeeze (ex_hidden_column, ex_last)
{activated}
  ex_active_column = Unsqueeze (ex_active, ex_last)
  ex_down_picked = Gather <axis=0> (ex_down_nEF, ex_ids)
  ex_each_column = MatMul (ex_down_picked, ex_active_column)
  ex_each = Squeeze (ex_each_column, ex_last)
  ex_weights_column = Unsqueeze (ex_weights, ex_last)
  ex_weighted = Mul (ex_each, ex_weights_column)
  ex_chosen_axis = Constant <value_ints=[2]> ()
  ex_out = ReduceSum <keepdims=0> (ex_weighted, ex_chosen_axis)
"""

_DENSE = """
  ex_gate_up_E_nF = Transpose <perm=[1, 0]> (ex_gate_up)
  ex_hidden_flat = MatMul (ex_x, ex_gate_up_E_nF)
  ex_hidden_shape = Constant <value_ints=[0, 0, {n}, {twice}]> ()
  ex_hidden = Reshape (ex_hidden_flat, ex_hidden_shape)
{activated}
  ex_first = Constant <value_int=0> ()
  ex_count = Constant <value_int={n}> ()
  ex_step = Constant <value_int=1> ()
  ex_all = Range (ex_first, ex_count, ex_step)
  ex_ids_column = Unsqueeze (ex_ids, ex_last)
  ex_routed = Equal (ex_ids_column, ex_all)
  ex_routed_number = CastLike (ex_routed, ex_x)
  ex_weights_column = Unsqueeze (ex_weights, ex_last)
  ex_routing_k = Mul (ex_routed_number, ex_weights_column)
  ex_chosen_axis = Constant <value_ints=[2]> ()
  ex_routing = ReduceSum <keepdims=0> (ex_routing_k, ex_chosen_axis)
  ex_routing_column = Unsqueeze (ex_routing, ex_last)
  ex_weighted = Mul (ex_active, ex_routing_column)
  ex_weighted_shape = Constant <value_ints=[0, 0, {all_inner}]> ()
  ex_weighted_flat = Reshape (ex_weighted, ex_weighted_shape)
  ex_down_nFE = Transpose <perm=[0, 2, 1]> (ex_down_nEF)
  ex_down_shape_flat = Constant <value_ints=[{all_inner}, {hidden}]> ()
  ex_down_flat = Reshape (ex_down_nFE, ex_down_shape_flat)
  ex_out = MatMul (ex_weighted_flat, ex_down_flat)
"""

_ACTIVATED = """
  ex_gate, ex_up = Split <axis=-1, num_outputs=2> (ex_hidden)
{function}
  ex_active = Mul (ex_acted, ex_up)
"""

_FUNCTIONS = {
    "silu": "  ex_sigmoid = Sigmoid (ex_gate)\n  ex_acted = Mul (ex_gate, ex_sigmoid)",
    "gelu": "  ex_acted = Gelu (ex_gate)",
    "gelu_tanh": '  ex_acted = Gelu <approximate="tanh"> (ex_gate)',
    "relu": "  ex_acted = Relu (ex_gate)",
    "relu2": "  ex_relu = Relu (ex_gate)\n  ex_acted = Mul (ex_relu, ex_relu)",
}


def experts_body(spec: ExpertsSpec, *, decode: bool) -> onnx.FunctionProto:
    """The op for one model and phase."""
    inner = spec.inner_size
    sizes = {"n": spec.num_experts, "twice": 2 * inner, "inner": inner, "hidden": spec.hidden_size}
    sizes["all_inner"] = spec.num_experts * inner
    activated = _ACTIVATED.format(function=_FUNCTIONS[spec.hidden_act])
    body = (_MATRICES + (_GATHERED if decode else _DENSE)).format(activated=activated, **sizes)
    formals = ", ".join(f"ex_{name}" for name in FORMALS)
    return onnx.parser.parse_function(
        f'<opset_import: ["" : {OPSET}], domain: "{DOMAIN}">\n{EXPERTS} ({formals}) => (ex_out) {{{body}}}'
    )
