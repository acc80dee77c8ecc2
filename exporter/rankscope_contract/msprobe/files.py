"""Names and formats of msprobe's files other than statistics: call stacks, module structure, anomaly records.

`csv_layout` describes the files of statistics. An anomaly record has a tag such as `0:layers.0.input_1:0/rank3/actv`.
The elements of the tag are the model chunk, the name of the tensor, and the micro-batch; then the rank; then the task,
which is msprobe's term for the kind.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from rankscope_contract.model.kinds import Kind
from rankscope_contract.msprobe.csv_layout import row_name

CSV_KEYS: Final = ("vpp_stage", "name", "step")
"""First columns of each CSV file in which msprobe writes statistics."""
MICRO_STEP: Final = "micro_step"

STACKS_FILE: Final = "stack_info.csv"
STACKS_COLUMNS: Final = ("module_name", "stack_info")
STRUCTURE_FILE: Final = "module_struct.json"
ANOMALY_FOLDER: Final = "anomaly_detected"
ANOMALY_FILE: Final = "anomaly.json"
RANKED_ANOMALY_FILE: Final = "anomaly_analyse.json"
"""Name of the file with the most important anomalies of all ranks.

It repeats records of the anomaly files of the ranks.
"""

NOT_KNOWN: Final = -1
"""Number that represents an unknown call in an anomaly record."""

ANOMALY_TASKS: Final[dict[str, str]] = {
    Kind.GRAD_UNREDUCED: "acc_grad",
    Kind.GRAD_REDUCED: "post_grad",
    Kind.PARAM_BEFORE: "param_origin",
    Kind.PARAM_AFTER: "param_updated",
    Kind.ACT_IN: "actv",
    Kind.ACT_OUT: "actv",
    Kind.ACT_GRAD_IN: "actv_grad",
    Kind.ACT_GRAD_OUT: "actv_grad",
}
"""The msprobe task of each kind that has one.

For all other kinds, the task has the name of the kind. These include the moments, which have the same name in msprobe
and Rankscope.
"""

KINDS_OF_TASKS: Final[dict[str, str]] = {
    "acc_grad": Kind.GRAD_UNREDUCED,
    "pre_grad": Kind.GRAD_UNREDUCED,
    "post_grad": Kind.GRAD_REDUCED,
    "exp_avg": Kind.EXP_AVG,
    "exp_avg_sq": Kind.EXP_AVG_SQ,
    "param_origin": Kind.PARAM_BEFORE,
    "param_updated": Kind.PARAM_AFTER,
    # Older releases of msprobe write the slot of the module as the task.
    "input": Kind.ACT_IN,
    "output": Kind.ACT_OUT,
    "input_grad": Kind.ACT_GRAD_IN,
    "output_grad": Kind.ACT_GRAD_OUT,
}
"""The kind of each msprobe task, except `actv` and `actv_grad`.

For these two tasks, the kind depends on the slot in the name of the tensor.
"""

_TAG: Final = re.compile(r"(?P<name>.*)/rank(?P<rank>\d+)/(?P<task>\w+)", re.DOTALL)
_NAME: Final = re.compile(r"(?:(?P<vpp>\d{1,9}):)?(?P<name>.*?)(?::(?P<micro>\d{1,9}))?", re.DOTALL)
_MESSAGE: Final = re.compile(
    r"Rule (?P<rule>\w+) reports .*, '(?P<op>\w+)'\) at step \d+"
    r"(?:, current value (?P<value>\S+), history mean (?P<baseline>\S+?)\.?$)?",
    re.DOTALL,
)


class AnomalyTag(NamedTuple):
    """Elements of the tag of an msprobe anomaly record: tensor name, task (the kind), and micro-batch.

    Example of a tag: `0:layers.0.input_1:0/rank3/actv`.
    If a text is not a tag, `task` is empty and `name` is the whole text.
    """

    name: str
    task: str = ""
    micro_step: int | None = None


class AnomalyMessage(NamedTuple):
    """Elements of the message of an msprobe anomaly record: rule, op, value, and baseline."""

    rule: str
    op: str
    value: str | None
    baseline: str | None


def anomaly_tag(
    kind: str,
    tensor: str,
    rank: int,
    *,
    index: int | None = None,
    micro_step: int | None = None,
    vpp_stage: int | None = None,
) -> str:
    """Return the tag that identifies a tensor in an msprobe anomaly record.

    Example: `0:layers.0.input_1:0/rank3/actv`.
    """
    micro = "" if micro_step is None else f":{micro_step}"
    return f"{vpp_stage or 0}:{row_name(kind, tensor, index)}{micro}/rank{rank}/{ANOMALY_TASKS.get(kind, kind)}"


def parse_anomaly_tag(tag: str) -> AnomalyTag:
    """Return the elements of `tag`, the tag of a tensor in an msprobe anomaly record."""
    parts = _TAG.fullmatch(tag)
    name = _NAME.fullmatch(parts["name"] if parts else tag)
    assert name is not None  # the expression matches any text
    return AnomalyTag(name["name"], parts["task"] if parts else "", int(name["micro"]) if name["micro"] else None)


def anomaly_message(*, rule: str | None, tag: str, op: str | None, step: int, value: float, baseline: float) -> str:
    """Return the message of an msprobe anomaly record. `step` is the step number of msprobe."""
    return (
        f"Rule {rule} reports anomaly signal in ('{tag}', '{op}') at step {step}, "
        f"current value {value}, history mean {baseline}."
    )


def parse_anomaly_message(message: str) -> AnomalyMessage | None:
    """Return the elements of `message`, the message of an msprobe anomaly record; None if it has another form."""
    found = _MESSAGE.search(message)
    return None if found is None else AnomalyMessage(*found.group("rule", "op", "value", "baseline"))
