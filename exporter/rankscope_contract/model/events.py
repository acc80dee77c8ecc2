"""Event types, severities, run states, and the causal order of anomalies within a step."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from rankscope_contract.model.kinds import CAUSAL_STAGE, EVALUATION_STAGE, LOSS_STAGE, SCALAR_STAGE
from rankscope_contract.model.redaction import redacted_json, redacted_text


class EventType(enum.StrEnum):
    """Type of an event."""

    ANOMALY = "anomaly"  # a rule fired
    STEP_SKIPPED = "step_skipped"  # gradients were computed, the optimizer was not run
    GAP = "gap"  # the ring overwrote records before they were read: `details` holds first and last seq
    EXIT = "exit"  # the process ends: `details` holds reason and last step
    PHASE = "phase"  # training entered or left a named phase
    LAUNCH = "launch"  # a new attempt registered
    INCIDENT = "incident"  # the service grouped anomalies of one cause: `details` holds key, state and extent
    FAULT = "fault"  # Rankscope caught an internal error on the rank
    NOTE = "note"  # a message of the training script or of the monitor
    HANG = "hang"  # no call into the monitor for a while, or the first call afterwards: `details` has state and seconds
    STACKS = "stacks"  # stacks of all threads of the process: `details` is a stacks.StackDump
    SWITCH = "switch"  # the sampling configuration changed: `details` holds step, source, before and after
    BUDGET = "budget"  # max_overhead changed the sampling interval: `details` has was, now, share and max_overhead
    CAPTURE = "capture"  # extra measurements because a rule fired: `details` holds state, rank, steps and samples
    FLIGHT_RECORD = "flight_record"  # the latest collectives: `details` is a stacks.FlightRecord
    CLOCK = "clock"  # the clock was set: `value` is the seconds, negative for back; `details` has offset_us
    XID = "xid"  # the driver reports a critical error of the GPU: `value` is its number, `details` holds xid and gpu
    GPU = "gpu"  # uncorrectable memory errors of the GPU, or throttling: `rule` is the name, `details` holds gpu
    SILENCE = "silence"  # a user silenced messages: `run` and `rule` are patterns, `details` has until, user and note
    # The following types come from imported logs.
    LOSS_MISSING = "loss_missing"  # a step was logged without a loss; some programs print a NaN loss this way
    CHECKPOINT = "checkpoint"  # a checkpoint is being, or was, saved or loaded: `details` holds action and path
    EVALUATION = "evaluation"  # the model was evaluated; the numbers are scalars
    ERROR = "error"  # the log contains an error: `op` holds its class
    IMPORT = "import"  # a log was imported: `details` holds its path and the position up to which it was read


class Severity(enum.StrEnum):
    """Urgency of an event."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class ExitReason(enum.StrEnum):
    """Reason of the exit of a process, as the process reported it."""

    COMPLETED = "completed"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    UNKNOWN = "unknown"  # the process ended without closing the monitor


class RunState(enum.StrEnum):
    """State of a run. The service derives the state from registrations, records, exit events and missing responses."""

    PENDING = "pending"  # registered, no step seen
    RUNNING = "running"
    STALLED = "stalled"  # alive, but no step for longer than expected
    COMPLETED = "completed"
    STOPPED = "stopped"  # ended by a signal, or without reporting completion
    FAILED = "failed"  # exception, or a rank that stopped responding without an exit event


REPLICA_DESYNC: Final = "ReplicaDesync"
"""Name of the rule for replica divergence, which fires if a tensor that must be bit-identical differs between ranks.

Only the service detects replica divergence.
"""

GPU_XID: Final = "GpuXid"
GPU_ECC: Final = "GpuEccUncorrected"
GPU_THROTTLED: Final = "GpuThrottled"
INGEST_LOSING: Final = "IngestLosing"
RULES_OF_MACHINES: Final = frozenset({GPU_XID, GPU_ECC, GPU_THROTTLED, INGEST_LOSING})
"""Names of the rules about GPUs and lost records. Their firings have no step, and types of events other than `anomaly`.

Prometheus has an alert of the same name for each of them.
"""

CLOSED: Final = "closed"
"""State of an incident that a person closed: `details` of the event holds user and note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a rank. Its step and time are those of the record that contains the event.

    Secrets in its texts are masked, and long texts are cut.
    """

    type: str
    severity: str = Severity.INFO
    rule: str | None = None
    kind: str | None = None
    tensor: str | None = None
    op: str | None = None
    value: float | None = None
    baseline: float | None = None
    threshold: float | None = None
    pp_stage: int | None = None
    vpp_stage: int | None = None
    micro_step: int | None = None
    call_id: int | None = None
    message: str = ""
    details: Any = None  # a JSON value or its text; stored as text

    def __post_init__(self) -> None:
        """Mask secrets and cut long texts. The message of an anomaly has only names, which are clean, and numbers."""
        if self.type != EventType.ANOMALY:
            object.__setattr__(self, "message", redacted_text(self.message))
        details = self.details
        if not isinstance(details, str | None):
            # The escape of a lone surrogate is valid in JSON.
            details = json.dumps(details, default=str, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        object.__setattr__(self, "details", redacted_json(details))


JUMP_MICROSECONDS: Final = 2_000_000
"""Smallest difference between a wall clock and a clock that is never set, from one check to the next, that is a jump.

NTP corrects smaller differences slowly, and changes the speed of both clocks then."""


def clock_jump(jump: int, *, owner: str, remark: str) -> tuple[str, dict[str, Any]]:
    """Return message and details of the event that the clock of `owner` was set by `jump` µs.

    The details are the direction, and the seconds, which are negative if the clock was set back.
    """
    direction = "back" if jump < 0 else "forward"
    message = f"the clock of the {owner} was set {direction} by {abs(jump) / 1e6:.1f} s; {remark}"
    return message, {"direction": direction, "seconds": jump / 1e6}


WHOLE_MODEL: Final = "(model)"
"""Name that users read for the outermost module, of which torch has the empty name."""


def subject_name(tensor: str | None, op: str | None) -> str | None:
    """Return the name for users of the tensor, module or scalar that an anomaly is about; None if it has no name."""
    return op if tensor is None else tensor or WHOLE_MODEL


EVALUATION_NAME: Final = r"(^|[/._])(eval|evaluation|val|valid|validation|dev|test)[/._]"
"""Regular expression for the names of scalars of an evaluation, such as `eval_loss` and `val/loss`."""


def causal_stage(kind: str | None, op: str | None = None) -> float:
    """Return the position of `kind` in the causal order of a step; without a kind, that of the scalar or summary `op`.

    The loss precedes the gradients, which are not finite if it is not. The results of an evaluation come last.
    """
    if kind is not None:
        return CAUSAL_STAGE.get(kind, SCALAR_STAGE)
    if op is None or op == "loss":
        return LOSS_STAGE if op else SCALAR_STAGE
    return EVALUATION_STAGE if re.search(EVALUATION_NAME, op) else SCALAR_STAGE + 0.1


NO_CALL: Final = 1 << 62
"""Sort position of an event for which the step, the micro-batch or the order of calls is unknown.

It is after all known positions.
"""


def causal_micro_step(micro_step: int | None, stage: float) -> int:
    """Return the sort position of an event among the micro-batches of a step.

    Without a micro-batch, the loss sorts into the first one, parameters before the update precede all, others follow.
    """
    if micro_step is not None:
        return micro_step
    if stage == LOSS_STAGE:
        return 0
    return -1 if stage < CAUSAL_STAGE["act_in"] else NO_CALL


def causal_key(
    *,
    step: int | None,
    micro_step: int | None,
    kind: str | None,
    vpp_stage: int | None,
    pp_stage: int | None,
    call_id: int | None,
    op: str | None = None,
) -> tuple[float, ...]:
    """Return a sort key that puts the first cause first.

    The order is: step, micro-batch, stage within the step, virtual and real pipeline stage, call order. Pipeline stages
    ascend before the backward pass and descend after it, because gradients flow from the last stage to the first.
    Missing elements sort last. `op` is the scalar of an event without a kind.
    """
    stage = causal_stage(kind, op)
    forward = stage < CAUSAL_STAGE["act_grad_in"]
    sign = 1 if forward else -1
    return (
        NO_CALL if step is None else step,
        causal_micro_step(micro_step, stage),
        stage,
        sign * (vpp_stage or 0),
        sign * (pp_stage or 0),
        NO_CALL if call_id is None else call_id,
    )
