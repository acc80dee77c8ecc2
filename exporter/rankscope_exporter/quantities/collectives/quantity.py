"""Tensors that the script's own calls of `torch.distributed` return, and those that they take.

Functions in the place of torch's see the calls while the quantity is on. Calls of torch itself, such as those of DDP
and FSDP, do not count: most of them do not use these functions. Nothing is waited for: the result of an asynchronous
call is read when the script has waited for it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch.distributed as dist

from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.model.name_patterns import target_notices
from rankscope_exporter.model.pytree import MAX_TENSORS
from rankscope_exporter.quantities.base import Hooking, Quantity, QuantityOptions, SamplingGate, Table
from rankscope_exporter.quantities.collectives.call_log import CallLog, InternalCalls
from rankscope_exporter.quantities.collectives.call_sites import CallSites
from rankscope_exporter.quantities.collectives.interception import (
    CollectiveCall,
    Interceptor,
    Output,
    PendingWork,
    pending_work_of,
    stream_of,
)
from rankscope_exporter.quantities.collectives.signatures import (
    OPERATIONS,
    CallTensors,
    TensorPart,
    call_tensors_of,
    is_coalescing,
)
from rankscope_exporter.quantities.hook_handles import CallbackHandle, CoverageNotes, in_backward, listed
from rankscope_exporter.statistics.tensor_access import dtype_name, why_not_measurable


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions(QuantityOptions):
    """Which calls. `targets` name them: `all_reduce` those of a function, `all_reduce@train.py[23]` those of a line."""

    inputs: bool = False
    """Also what a call is given, before it runs."""
    call_sites: tuple[str, ...] = ()
    """Regular expressions, one of which is found in the call stack; without any, all calls count."""
    most_calls: int = 64
    """Of one function at one place within a step; the others have no rows."""
    log_only: bool = False
    """Tell, for the first step (`times` steps), what is called where, and measure nothing."""

    def __post_init__(self) -> None:
        if isinstance(self.call_sites, list):
            object.__setattr__(self, "call_sites", tuple(self.call_sites))
        if self.log_only is True and self.times is None:
            object.__setattr__(self, "times", 1)
        QuantityOptions.__post_init__(self)
        for name in ("inputs", "log_only"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")  # noqa: TRY004 - becomes a ConfigError
        self._check_whole("most_calls", 1)
        if self.most_calls is None:
            raise ValueError("most_calls is a whole number from 1 on, not None")
        self._check_call_sites()

    def _check_call_sites(self) -> None:
        if not isinstance(self.call_sites, tuple) or not all(isinstance(item, str) for item in self.call_sites):
            raise ValueError(f"call_sites is a list of regular expressions, not {self.call_sites!r}")
        for expression in self.call_sites:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"call_sites: {expression!r} is no regular expression: {error}") from error


_NOT_SEEN: Final = (
    "no call of the script was seen in a measured step, so no tensor of one is measured; what compiled code, DDP, FSDP "
    "and other parts of torch send has rows in collectives where torch records it, and no statistics"
)


@dataclass(frozen=True, slots=True)
class _Listener:
    """The quantity as the taps know it; the functions are guarded."""

    gate: SamplingGate
    begins: Callable[[CollectiveCall], None]
    ended: Callable[[CollectiveCall, Any], None]
    waited: Callable[[Any], None]

    @property
    def is_open(self) -> bool:
        return self.gate.is_open


@dataclass(frozen=True, slots=True)
class _Entered:
    """A call that is measured, and what it will give back. `seq` counts within the step: None is the first."""

    name: str
    seq: int | None
    sides: CallTensors
    outputs: list[Output] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """What is known of the sampled step under way."""

    thread: int = 0  # that trains; 0 before the first step
    stream: int | None = None  # of the device that trains
    counts: dict[str, int] = field(default_factory=dict)
    works: PendingWork = field(default_factory=PendingWork)


class Collectives(Quantity):
    """Rows of `comm_out` and, on request, `comm_in`: one for each tensor of each call."""

    name: ClassVar[str] = "collectives"
    options_class: ClassVar[type[QuantityOptions]] = CollectiveOptions
    of_modules: ClassVar[bool] = True  # that is, not of parameters
    options: CollectiveOptions

    def __init__(self, monitored: MonitoredModel, options: QuantityOptions | None = None) -> None:
        super().__init__(monitored, options)
        self._device = monitored.device
        self._sites = CallSites(self.options.call_sites)
        self._step = _Step()
        self._rows: dict[tuple[Kind, str, int | None, int | None], range | None] = {}
        self._gaps = CoverageNotes()
        self._seen: dict[str, str] = {}  # what was called, by name: its function
        self._beside: set[str] = set()  # functions that were called on other threads
        self._is_any_chosen = False
        self._looked_for_silence = False
        self._log = CallLog()
        self._torchs = InternalCalls(self._sites, self.targets)
        self._failed: set[str] = set()  # what could not be read, each said once
        self._hooking: Hooking
        self._gate: SamplingGate

    def kinds(self) -> set[str]:
        """Return the kinds of what is measured."""
        if self.options.log_only:
            return set()
        return {Kind.COMM_IN, Kind.COMM_OUT} if self.options.inputs else {Kind.COMM_OUT}

    def install(self, hooking: Hooking, gate: SamplingGate) -> None:
        """Listen to the functions of torch.distributed."""
        self._hooking, self._gate = hooking, gate
        if not dist.is_available():
            hooking.tell("collectives: this torch has no torch.distributed; nothing is measured")
            return
        begins, ended, waited = (
            hooking.guarded("a collective", self._undisturbed(function), gate)
            for function in (self._begins, self._ended, self._waited)
        )

        def of_training(call: CollectiveCall) -> None:
            if self._is_training():
                begins(call)
            else:
                self._beside.add(call.op)

        listener = _Listener(
            gate,
            of_training,
            lambda call, result: None if call.note is None else ended(call, result),
            lambda work: waited(work) if self._is_training() else None,
        )
        hooking.keep(CallbackHandle(self._release))
        hooking.keep(Interceptor(listener, OPERATIONS))

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Nothing of this step has been called yet."""
        self._release()
        self._step = _Step(threading.get_ident(), stream_of(self._device))

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        """Tell what was called so far."""
        self._log.tell(self._say)

    def on_step_end(self) -> None:
        """Let go of the tensors of calls that were not waited for."""
        self._step.works.let_go()

    def _undisturbed(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function` for calls at any time: long after the update the publisher may just be closing the step."""

        def inside(*args: Any) -> None:
            if self._gate.is_open:
                function(*args)

        return lambda *args: self._hooking.between(lambda: inside(*args))

    def _begins(self, call: CollectiveCall) -> None:
        site = self._sites.of(call.caller)
        sides = None if site is None else call_tensors_of(call.op, call.args, call.kwargs)
        if site is None or sides is None:
            return
        name = f"{call.op}@{site.label}"
        self._seen[name] = call.op
        if not (site.is_chosen and self.targets.selects(name, call.op)):
            return
        self._is_any_chosen = True
        if self.options.log_only:
            self._log.note(name, site, sides)
        elif is_coalescing(sides.group):
            self._gaps.add("is coalesced with others, and what it gives back cannot be told", name)
        else:
            self._enter(call, name, sides)

    def _is_training(self) -> bool:
        """Return whether this thread trains, or computes gradients for the one that does; others run at any time."""
        return threading.get_ident() == self._step.thread or in_backward()

    def _enter(self, call: CollectiveCall, name: str, sides: CallTensors) -> None:
        count = self._step.counts.get(name, 0)
        self._step.counts[name] = count + 1
        if count >= self.options.most_calls:
            self._gaps.add(f"is called more than {self.options.most_calls} times in a step: only these have rows", name)
            return
        entered = call.note = _Entered(name, count or None, sides)
        if self.options.inputs:
            self._measure(self._placed(Kind.COMM_IN, entered, sides.inputs))
        # Rows now and numbers later: the plan is in the order of the calls, whichever is waited for first.
        entered.outputs.extend(self._placed(Kind.COMM_OUT, entered, sides.outputs))

    def _ended(self, call: CollectiveCall, result: Any) -> None:
        entered: _Entered | None = call.note
        if entered is None or not entered.outputs:
            return
        works = pending_work_of(result)
        if works:
            tensors = len(entered.sides.inputs) + len(entered.sides.outputs)
            self._step.works.expect(entered.name, works, entered.outputs, tensors)
        else:
            self._measure(entered.outputs)

    def _waited(self, work: Any) -> None:
        self._measure(self._step.works.waited(work))

    def _measure(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            # The table is read on the stream of the training, which we must not make wait for another.
            if output.tensor.device == self._device and stream_of(self._device) != self._step.stream:
                self._gaps.add("is on another stream than the training, where nothing is measured", output.name)
            else:
                self._gate.table.measure([output.tensor], output.row)

    def _placed(self, kind: Kind, entered: _Entered, parts: Sequence[TensorPart]) -> list[Output]:
        """Return those of `parts` that can be measured, each with its row."""
        side = "input" if kind is Kind.COMM_IN else "output"
        if len(parts) > MAX_TENSORS:
            self._gaps.add(f"{side} is {len(parts)} tensors, of which the first {MAX_TENSORS} have rows", entered.name)
        placed = []
        for part in parts[:MAX_TENSORS]:
            reason = why_not_measurable(part.tensor)
            if reason is not None:
                self._gaps.add(f"{side} is {reason}", entered.name)
                continue
            row = self._row(kind, entered, part)
            if row is not None:
                placed.append(Output(entered.name, row, part.tensor, part.index))
        return placed

    def _row(self, kind: Kind, entered: _Entered, part: TensorPart) -> range | None:
        key = (kind, entered.name, entered.seq, part.index)
        try:
            return self._rows[key]
        except KeyError:
            entry = PlanEntry(
                kind=kind,
                tensor=entered.name,
                index=part.index,
                call_seq=entered.seq,
                dtype=dtype_name(part.tensor.dtype),
                shape=tuple(part.tensor.shape),
            )
            row = self._rows[key] = self._gate.table.add([entry])
            return row

    # What there is to say.

    def _release(self) -> None:
        """Let go of what the last sampled step has left, and say what was missing in it."""
        step = self._step
        if self.options.log_only and step.thread:
            self._note_internal()
        self._log.tell(self._say)
        for name in step.works.missed():
            self._gaps.add("is not waited for within its step by wait(), so what it gives back has no row", name)
        for function in sorted(self._beside.copy()):
            self._gaps.add("is called on a thread beside the training, where nothing is measured", function)
        was_measured, self._step = step.thread, _Step()
        if was_measured and not self._looked_for_silence and not (self.options.log_only and self._log.has_told):
            self._looked_for_silence = True
            self._note_uncalled()
        self._gaps.tell(self._say)

    def _note_internal(self) -> None:
        try:
            self._torchs.note(self._log, self._report)
        except Exception as error:  # noqa: BLE001 - the form of the record is torch's, and handles must be taken away
            self._report("listing the calls of torch itself", error)

    def _report(self, where: str, error: BaseException) -> None:
        if where not in self._failed:
            self._failed.add(where)
            self._say(f"{where} failed: {error!r}")

    def _note_uncalled(self) -> None:
        told = []
        if not (self._seen or self._beside):
            told.append(_NOT_SEEN)
        elif self._seen:
            told += target_notices(self.targets, {*self._seen, *self._seen.values()}, "collective")
            if not (self._is_any_chosen or told):
                told.append(f"call_sites are found in the stack of no call; there are {listed(self._seen)}")
        for sentence in told:
            self._say(sentence)

    def _say(self, message: str) -> None:
        self._hooking.tell(f"collectives: {message}")
