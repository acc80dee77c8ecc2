"""Tags of tensors in msprobe's form: `{vpp}:{name}.{input|output}:{micro}/{rank}/{task}_{op}`.

Tags of activations have the side (input or output) and the number of the micro-batch. Tags of parameters and gradients
have neither: `{vpp}:{name}/{rank}/{task}_{op}`. Tags are parsed from the right, because names may contain `/`. A `:` or
`%` in a name is percent-encoded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.event_tags import event_tag, scalar_tag
from rankscope_contract.model.kinds import BASELINE_OPS, COUNT_OPS, VALUE_OPS, Kind
from rankscope_msprobe.files.csv_layout import CALLS, FAMILY_OF, KIND_OF_TASK, SLOT_OF, SLOTS, numbered, parse_call

OPS: Final = (*VALUE_OPS, *COUNT_OPS, *BASELINE_OPS)

_TASKS: Final[dict[str, str]] = {**{kind: kind for kind in Kind}, **KIND_OF_TASK}

_TAG: Final = re.compile(r"(-?\d{1,9}):(.*)/(?:rank)?(\d{1,9})/([a-z_]+)", re.DOTALL)
_MICRO: Final = re.compile(r"(.*):(?:micro)?(\d{1,9})", re.DOTALL)
_SIDE: Final = re.compile(r"(.*)\.(input|output|in|out)(?:_(\d{1,9}))?", re.DOTALL)
_TREE_TAG: Final = re.compile(r"vp(-?\d{1,9}):(.*)/([a-z_]+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTag:
    """The columns of one statistic that its TensorBoard tag contains."""

    kind: str
    tensor: str
    op: str
    rank: int | None = None
    vpp_stage: int | None = None
    micro_step: int | None = None
    index: int | None = None
    call_seq: int | None = None


def tensor_tag(parts: TensorTag) -> str:
    """Return the tag of a statistic. Without a virtual stage, the tag has stage 0, as in msprobe."""
    side = SLOT_OF.get(parts.kind)
    family = FAMILY_OF.get(parts.kind, "other")
    task = f"{parts.kind if family == 'other' else family}_{parts.op}"
    name = numbered(f"{parts.tensor}.{side}", parts.index) if side else parts.tensor
    return event_tag(name, task, rank=parts.rank or 0, vpp_stage=parts.vpp_stage or 0, micro_step=parts.micro_step)


def parse_tensor_tag(tag: str) -> TensorTag | None:
    """Return the parts of `tag`, or None if it is not a tag of a tensor in msprobe's form."""
    match = _TAG.fullmatch(tag)
    task_op = _task_and_op(match[4]) if match else None
    if match is None or task_op is None:
        return None
    return _read(int(match[1]), match[2], int(match[3]), *task_op)


def parse_tree_tag(tag: str, family: str, rank: int | None) -> TensorTag | None:
    """Return the parts of a tag that msprobe's TensorBoard converter wrote; None for a tag of another form.

    Such a tag is `vp0:name:micro1/norm`, in the folder `rank0/<family>`.
    """
    match = _TREE_TAG.fullmatch(tag)
    if match is None or match[3] not in OPS or family not in {*_TASKS, *SLOTS}:
        return None
    return _read(int(match[1]), match[2], rank, family, match[3])


def _read(vpp_stage: int, rest: str, rank: int | None, task: str, op: str) -> TensorTag | None:
    micro_step = index = None
    if match := _MICRO.fullmatch(rest):
        rest, micro_step = match[1], int(match[2])
    kind = _TASKS.get(task)
    if task in SLOTS:
        sided = _SIDE.fullmatch(rest)
        if sided is None:
            return None
        rest, side = sided[1], "input" if sided[2].startswith("in") else "output"
        kind, index = SLOTS[task][side], None if sided[3] is None else int(sided[3])
    if kind is None:
        return None
    tensor, call_seq = rest.replace("%3A", ":").replace("%25", "%"), None
    if kind in CALLS:
        tensor, call_seq, index = parse_call(tensor)
    return TensorTag(
        kind=str(kind),
        tensor=tensor,
        op=op,
        rank=rank,
        vpp_stage=vpp_stage,
        micro_step=micro_step,
        index=index,
        call_seq=call_seq,
    )


def _task_and_op(text: str) -> tuple[str, str] | None:
    for op in OPS:
        task = text.removesuffix(f"_{op}")
        if task != text and task in {*_TASKS, *SLOTS}:
            return task, op
    return None


def labelled(name: str, labels: str | None) -> str:
    """Return the tag of a scalar whose labels are the JSON text `labels`. Other text is appended as it is."""
    try:
        return name if labels is None else scalar_tag(name, json.loads(labels))
    except (ValueError, AttributeError):
        return f"{name}/{labels}"
