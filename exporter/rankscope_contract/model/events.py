"""Event types, severities, and the causal order in which anomalies are read."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from rankscope_contract.model.kinds import CAUSAL_STAGE, SCALAR_STAGE


class EventType(enum.StrEnum):
    """What an event says happened."""

    ANOMALY = "anomaly"  # a rule fired
    STEP_SKIPPED = "step_skipped"  # gradients were computed, the optimizer was not run
    GAP = "gap"  # records the ring had already overwritten: `details` holds first and last seq
    EXIT = "exit"  # the process says why it ends: `details` holds reason and last step
    PHASE = "phase"  # training entered or left a named phase
    LAUNCH = "launch"  # a new attempt registered
    INCIDENT = "incident"  # the service grouped anomalies of one cause: `details` holds key, state and extent
    FAULT = "fault"  # Rankscope itself swallowed an error on the rank
    NOTE = "note"  # free text of the training script
    HANG = "hang"  # training gives no sign of life, or does so again: `details` holds state and seconds
    STACKS = "stacks"  # where the threads of the process stand: `details` holds them, see stacks.StackDump
    SWITCH = "switch"  # what is measured changed while training ran: `details` holds step, source, before and after
    BUDGET = "budget"  # sampling was stretched or tightened: `details` holds was, now, share and max_overhead
    CAPTURE = "capture"  # more is measured because a rule fired: `details` holds state, rank, steps and samples
    FLIGHT_RECORD = "flight_record"  # the latest collectives: `details` holds them, see stacks.FlightRecord
    XID = "xid"  # the driver reports a critical error of the GPU: `value` is its number, `details` holds xid and gpu
    # What logs of other tools tell:
    LOSS_MISSING = "loss_missing"  # a step was logged without a loss, which is how some tools print NaN
    CHECKPOINT = "checkpoint"  # one is being, or was, saved or loaded: `details` holds action and path
    EVALUATION = "evaluation"  # the model was evaluated; the numbers are scalars
    ERROR = "error"  # the log shows an error: `op` holds its class
    IMPORT = "import"  # a log was brought into the store: `details` says which, and how far it was read


class Severity(enum.StrEnum):
    """How urgent an event is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class ExitReason(enum.StrEnum):
    """Why a process ended, as it said itself."""

    COMPLETED = "completed"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    UNKNOWN = "unknown"  # the process ended without leaving the monitor's context


class RunState(enum.StrEnum):
    """Where a run stands; the service decides it from registrations, records, exit events and silence."""

    PENDING = "pending"  # registered, no step seen
    RUNNING = "running"
    STALLED = "stalled"  # alive, yet no step for longer than expected
    COMPLETED = "completed"
    STOPPED = "stopped"  # ended on request (signal) or without saying it was done
    FAILED = "failed"  # exception, or a rank that vanished without a word


REPLICA_DESYNC: Final = "ReplicaDesync"
"""Rule name of what the service finds where ranks hold different bits of what should be equal; no rank judges it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened on one rank. `step` and `ts` come from the record that carries it."""

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
    details: str | None = None  # JSON


def causal_stage(kind: str | None) -> float:
    """Return the position of `kind` in the flow of a step; an event without one summarises the step's tensors."""
    return SCALAR_STAGE if kind is None else CAUSAL_STAGE.get(kind, SCALAR_STAGE)


NO_CALL: Final = 1 << 62


def causal_micro_step(micro_step: int | None, stage: float) -> int:
    """Return the place among micro-batches; without one, parameters stand before all, sums and updates behind."""
    if micro_step is not None:
        return micro_step
    return -1 if stage < CAUSAL_STAGE["act_in"] else NO_CALL


def causal_key(
    *,
    step: int | None,
    micro_step: int | None,
    kind: str | None,
    vpp_stage: int | None,
    pp_stage: int | None,
    call_id: int | None,
) -> tuple[float, ...]:
    """Return the sort key that puts the first cause first.

    Order: step, micro step, stage within the step, virtual and real pipeline stage (ascending before the backward
    pass, descending after it, since gradients flow from the last stage to the first), call order. Missing parts
    sort last.
    """
    stage = causal_stage(kind)
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
