"""Names under which the existing tool keeps a tensor: `0:layers.0.input_1:0/rank3/actv`. Pure.

Chunk of the model, name, tensor of several, micro-batch; then rank, then what was measured.
"""

from __future__ import annotations

from typing import Final

from rankscope_contract.kinds import Kind
from rankscope_contract.msprobe.layout import row_name

_TASKS: Final[dict[str, str]] = {
    Kind.GRAD_UNREDUCED: "acc_grad",
    Kind.GRAD_REDUCED: "post_grad",
    Kind.PARAM_BEFORE: "param_origin",
    Kind.PARAM_AFTER: "param_updated",
    Kind.ACT_IN: "actv",
    Kind.ACT_OUT: "actv",
    Kind.ACT_GRAD_IN: "actv_grad",
    Kind.ACT_GRAD_OUT: "actv_grad",
}
"""A kind that the tool does not have goes under its own name; its moments have ours."""


def tag(
    kind: str,
    tensor: str,
    rank: int,
    *,
    index: int | None = None,
    micro_step: int | None = None,
    vpp_stage: int | None = None,
) -> str:
    """Return the name of a tensor."""
    micro = "" if micro_step is None else f":{micro_step}"
    return f"{vpp_stage or 0}:{row_name(kind, tensor, index)}{micro}/rank{rank}/{_TASKS.get(kind, kind)}"
