"""`dtool::Experts`: the feed-forward of a token is the weighted sum of the experts it is routed to.

    y = sum_j weights[j] * down_e(act(gate_e(x)) * up_e(x)),   e = ids[j]        Mixtral, arXiv 2401.04088 eq. 2

The matrices of all experts lie one below the other, so that they are stored, quantized and read as
one: `gate_up` [n * 2F, E] (expert 0's gate, its up, expert 1's gate, ...), `down` [n * E, F]. As with
attention this file holds the plain torch computation and the traceable op; the graph carries a
function body of standard operators (`experts_body`).

Legend: B batch, T new tokens, k experts of a token, n experts, E hidden, F feed-forward of one expert,
M tokens of one expert.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - the usual name

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The sizes and the activation of one mixture."""

    num_experts: int
    hidden_size: int
    inner_size: int
    hidden_act: str


def mix_experts(
    x_BTE: torch.Tensor,
    weights_BTk: torch.Tensor,
    ids_BTk: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    spec: ExpertsSpec,
) -> torch.Tensor:
    """The mixture [B, T, E]; `weights_BTk` are the routing weights of the experts `ids_BTk` (int64)."""
    act, count = ACTIVATIONS[spec.hidden_act], spec.num_experts
    x_ME = x_BTE.flatten(0, 1)
    gate_up_nFE, down_nEF = gate_up.unflatten(0, (count, -1)), down.unflatten(0, (count, -1))
    weights_Mk, ids_Mk = weights_BTk.flatten(0, 1), ids_BTk.flatten(0, 1)
    out_ME = torch.zeros_like(x_ME)
    for expert in ids_Mk.unique().tolist():
        tokens, slots = torch.where(ids_Mk == expert)
        gate_MF, up_MF = F.linear(x_ME[tokens], gate_up_nFE[expert].to(x_ME.dtype)).chunk(2, dim=-1)
        y_ME = F.linear(act(gate_MF) * up_MF, down_nEF[expert].to(x_ME.dtype))
        out_ME.index_add_(0, tokens, y_ME * weights_Mk[tokens, slots, None])
    return out_ME.reshape(x_BTE.shape)


@torch.library.custom_op("dtool::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The op as the exporter sees it. Shapes alone: never computed."""
    raise NotImplementedError("experts is traced, not run: mix_experts computes it")


@experts.register_fake
def _shapes(x, weights, ids, gate_up, down):  # noqa: ANN001, ANN202, ARG001
    return torch.empty_like(x)
