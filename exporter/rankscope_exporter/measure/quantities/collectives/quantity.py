"""Quantity `collectives`: output and input tensors of the script's own calls of `torch.distributed`.

Replacements of torch's functions intercept the calls while the quantity is active. Calls that torch makes, for example
in DDP and FSDP, are not measured, because most of them do not use these functions. The quantity never waits: the result
of an asynchronous call is read after the script has waited for it.

Log of collective calls for the option `log_only`.

The log contains the function, dtypes, shapes, group, call stack and number of the calls. Calls that torch makes, for
example for DDP and FSDP, are read from torch's flight record, with their stacks. The flight record also contains the
calls of the script. They are skipped, because the quantity has already logged them.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

import torch.distributed as dist

from rankscope_contract.model.collective_format import dtype_text
from rankscope_contract.model.kinds import Kind
from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.adapters.hook_context import Hook, HookContext
from rankscope_exporter.adapters.parameter_hooks import CallbackHandle
from rankscope_exporter.adapters.parameter_names import Targets, target_notices
from rankscope_exporter.adapters.process_group import has_groups
from rankscope_exporter.adapters.pytree import MAX_TENSORS, Slot
from rankscope_exporter.measure.kernels.compiled import stream_of
from rankscope_exporter.measure.kernels.isolation import some_of
from rankscope_exporter.measure.kernels.tensor_access import dtype_name, why_not_measurable
from rankscope_exporter.measure.quantities.base import Quantity, QuantityOptions, SamplingGate
from rankscope_exporter.measure.quantities.collectives import interception
from rankscope_exporter.measure.quantities.module_quantity import CoverageNotes, in_backward
from rankscope_exporter.measure.table import Table
from rankscope_exporter.monitors.flight_recorder.poller import read_before, row_of
from rankscope_exporter.monitors.flight_recorder.torch_api import Raw, Report, ranks_by_group, read_with_stacks
from rankscope_exporter.process.validation import Checked, at_least, list_of

MAX_NOTICES: Final = 200
_FRAMES_SHOWN: Final = 8


class CallLog:
    """Stores the collective calls since the last report, for notices to the user.

    Calls of torch itself are read from its flight record. The first read returns all calls that no monitor has read
    before.

    Calls are equal if function, line, dtypes, shapes, group and the innermost 8 lines of the call stack are equal.
    Equal calls are reported in one notice with the number of calls, in the order of the first calls. Every call is
    counted in exactly one notice. If a call repeats after a report, it is reported again.
    """

    def __init__(self, sites: interception.CallSites, targets: Targets) -> None:
        self._sites = sites
        self._targets = targets
        self._after = read_before()
        self._new: Counter[str] = Counter()
        self._known: set[str] = set()
        self._dropped = 0
        self.has_reported = False

    def note(self, name: str, description: str, site: interception.CallSite) -> None:
        """Add a collective call: its function and line (`name`), its dtypes, shapes and group, and its call site."""
        text = f"{name}: {description}, called from {_stack(site)}"
        if text not in self._known and len(self._known) >= MAX_NOTICES:
            self._dropped += 1
            return
        self._known.add(text)
        self._new[text] += 1

    def note_internal(self, report: Report) -> None:
        """Add the calls of torch in its flight record. Calls that the quantity intercepted are skipped.

        If a flight recorder of torch cannot be read, the function `report` receives a message and the recorder is
        skipped.
        """
        if not has_groups():
            return
        ranks = ranks_by_group(report)
        for recorder, raws in read_with_stacks(report).items():
            last = self._after.get(recorder, -1)
            for raw in raws:
                if int(raw["record_id"]) > last and not _is_intercepted(raw):
                    self._note_raw(raw, ranks)
            self._after[recorder] = max(last, *(int(raw["record_id"]) for raw in raws))

    def _note_raw(self, raw: Raw, ranks: Mapping[str, tuple[int, ...]]) -> None:
        row = row_of(raw, ranks)
        site = self._sites.of_record(raw.get("frames", ()))
        name = f"{row['op']}@{site.label}"
        if not (site.is_chosen and self._targets.selects(name, row["op"])):
            return
        forms = f"{_call_forms(raw, 'input')} -> {_call_forms(raw, 'output')}"
        size = f" of {row['group_size']} ranks" if row["group_size"] else ""
        self.note(name, f"{forms}, group {row['group']}{size}", site)

    def report(self, notice: Callable[[str], None]) -> None:
        """Call the function `notice` once with a text for each group of equal calls since the last report."""
        new, self._new = self._new, Counter()
        self.has_reported = self.has_reported or bool(new)
        for text, count in new.items():
            notice(text if count == 1 else f"{count} times {text}")
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            notice(
                f"{dropped} calls are not listed, because {MAX_NOTICES} different calls were listed before: select "
                "fewer calls with targets or call_sites"
            )


def _forms(parts: Sequence[Slot]) -> str:
    """Return the dtypes and shapes of inputs or outputs as text, such as "float32[2, 3]"."""
    return some_of(f"{dtype_name(part.tensor.dtype)}{list(part.tensor.shape)}" for part in parts) or "nothing"


def _stack(site: interception.CallSite) -> str:
    shown = site.stack[-_FRAMES_SHOWN:]
    return " > ".join(shown if len(shown) == len(site.stack) else ("…", *shown)) or "no Python code"


def _is_intercepted(raw: Raw) -> bool:
    return any(frame["filename"] == interception.__file__ for frame in raw.get("frames", ()))


def _call_forms(raw: Raw, side: str) -> str:
    types: Sequence[Any] = raw.get(f"{side}_dtypes", ())
    sizes = raw.get(f"{side}_sizes", ())
    forms = [f"{dtype_text(types[min(at, len(types) - 1) :][:1])}{list(size)}" for at, size in enumerate(sizes)]
    return some_of(forms) or "nothing"


def _check_all(expressions: Iterable[str]) -> None:
    """Raise ValueError for an invalid regular expression."""
    for expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"call_sites: {expression!r} is not a regular expression: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions(QuantityOptions):
    """Options of the quantity `collectives`: the calls to measure.

    A target names all calls of a function, `all_reduce`, or all calls at a line of the script,
    `all_reduce@train.py[23]`.
    """

    inputs: bool = False
    """Also measure the input tensors of a call, before the call runs."""
    call_sites: Annotated[tuple[str, ...], list_of(str, "a list of regular expressions"), Checked(_check_all)] = ()
    """Regular expressions.

    A collective call is measured if one of the expressions is found in the call stack of the call. Without expressions,
    all calls are measured.
    """
    most_calls: Annotated[int, at_least(1)] = 64
    """Largest number of measured calls per step, for one function at one line of the script."""
    log_only: bool = False
    """True: measure no tensors, but log the calls of collectives and the lines of code that made them.

    The log contains the calls of the first sampled step, or of `times` sampled steps.
    """

    def __post_init__(self) -> None:
        if self.log_only is True and self.times is None:
            object.__setattr__(self, "times", 1)
        QuantityOptions.__post_init__(self)


_NOT_SEEN: Final = (
    "no call of the script was seen in a sampled step, so no tensor is measured; calls of compiled code, DDP, FSDP and "
    "other parts of torch have rows in the dataset collectives if torch records them, but no statistics"
)


@dataclass(slots=True)
class _StepCalls:
    """The state of the quantity `collectives` during a sampled step.

    It contains the number of calls by name, and the asynchronous calls that the script has not waited for.
    """

    thread: int = 0  # of the training; 0 before the first step
    stream: int = 0  # current stream of the training thread
    counts: dict[str, int] = field(default_factory=dict)
    works: interception.PendingWork = field(default_factory=interception.PendingWork)


class Collectives(Quantity):
    """Measures outputs (`comm_out`) and, on request, inputs (`comm_in`) of collective calls: one row per tensor."""

    name: ClassVar[str] = "collectives"
    options_class: ClassVar[type[QuantityOptions]] = CollectiveOptions
    of_modules: ClassVar[bool] = True  # that is, not of parameters
    options: CollectiveOptions

    def kinds(self) -> set[str]:
        if self.options.log_only:
            return set()
        return {Kind.COMM_IN, Kind.COMM_OUT} if self.options.inputs else {Kind.COMM_OUT}

    def install(self, hooking: HookContext, gate: SamplingGate) -> None:
        self._hooking, self._gate = hooking, gate
        self._device = self.monitored.device
        self._sites = interception.CallSites(self.options.call_sites)
        self._step = _StepCalls()
        self._notes = CoverageNotes()
        self._seen: dict[str, str] = {}  # name of a call -> its function
        self._on_other_threads: set[str] = set()  # functions that were called on other threads
        self._is_any_chosen = False
        self._has_noted_uncalled = False
        self._log = CallLog(self._sites, self.targets)
        if not dist.is_available():
            hooking.tell("collectives: this torch has no torch.distributed; nothing is measured")
            return
        begins, ended, waited = (
            Hook(hooking, "a collective", self._undisturbed(function), gate=gate)
            for function in (self._begins, self._ended, self._waited)
        )

        def begins_in_training(call: interception.CollectiveCall) -> None:
            if self._is_training():
                begins(call)
            else:
                self._on_other_threads.add(call.op)

        listener = interception.Listener(
            gate,
            begins_in_training,
            lambda call, result: None if call.note is None else ended(call, result),
            lambda work: waited(work) if self._is_training() else None,
        )
        gate.keep(CallbackHandle(self._release))
        gate.keep(interception.intercept(listener, interception.OPERATIONS))

    def on_step_begin(self, table: Table) -> None:  # noqa: ARG002 - the signature of every event
        self._release()
        self._step = _StepCalls(threading.get_ident(), stream_of(self._device))

    def on_optimizer_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        self._log.report(self._notice)

    def on_step_end(self, table: Table) -> None:  # noqa: ARG002 - see above
        self._step.works.release_tensors()

    def _undisturbed(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `function` while no step can begin or end.

        A call of a collective may come long after the update of a step.
        """

        def undisturbed(*args: Any) -> None:
            with self._hooking.lock:
                if self._gate.is_open:
                    function(*args)

        return undisturbed

    def _begins(self, call: interception.CollectiveCall) -> None:
        site = self._sites.of(call.caller)
        sides = None if site is None else interception.call_tensors_of(call.op, call.args, call.kwargs)
        if site is None or sides is None:
            return
        name = f"{call.op}@{site.label}"
        self._seen[name] = call.op
        if not (site.is_chosen and self.targets.selects(name, call.op)):
            return
        self._is_any_chosen = True
        if self.options.log_only:
            forms = f"{_forms(sides.inputs)} -> {_forms(sides.outputs)}"
            self._log.note(name, f"{forms}, {interception.group_text(sides.group)}", site)
        elif interception.is_coalescing(sides.group):
            self._notes.add("is coalesced with other calls, so its outputs are not known", name)
        else:
            self._enter(call, name, sides)

    def _is_training(self) -> bool:
        """Return whether this is the training thread or one of its backward pass: others call at any time."""
        return threading.get_ident() == self._step.thread or in_backward()

    def _enter(self, call: interception.CollectiveCall, name: str, sides: interception.CallTensors) -> None:
        count = self._step.counts.get(name, 0)
        self._step.counts[name] = count + 1
        if count >= self.options.most_calls:
            self._notes.add(
                f"is called more than {self.options.most_calls} times in a step; further calls have no rows", name
            )
            return
        seq = count or None
        if self.options.inputs:
            self._measure(self._placed(Kind.COMM_IN, name, seq, sides.inputs))
        # Rows now and numbers later: the plan is in the order of the calls, whichever is waited for first.
        if outputs := self._placed(Kind.COMM_OUT, name, seq, sides.outputs):
            call.note = outputs, len(sides.inputs) + len(sides.outputs)

    def _ended(self, call: interception.CollectiveCall, result: Any) -> None:
        outputs, tensors = call.note
        results = result if isinstance(result, list) else [result]
        if works := [item for item in results if isinstance(item, dist.Work)]:
            self._step.works.expect(works, outputs, tensors)
        else:
            self._measure(outputs)

    def _waited(self, work: Any) -> None:
        self._measure(self._step.works.waited(work))

    def _measure(self, outputs: Iterable[interception.Output]) -> None:
        for output in outputs:
            # The table belongs to the stream of the training, which must not wait for another stream.
            if output.tensor.device == self._device and stream_of(self._device) != self._step.stream:
                self._notes.add("is on another stream than the training and is not measured", output.name)
            else:
                self._gate.table.measure([output.tensor], output.slot)

    def _placed(self, kind: Kind, name: str, seq: int | None, parts: Sequence[Slot]) -> list[interception.Output]:
        """Return those tensors of `parts`, inputs or outputs of a collective call, that can be measured.

        Each tensor is returned with its row in the table of statistics. `seq` is the number of earlier calls with the
        same name in this step; None for the first call.
        """
        side = "input" if kind is Kind.COMM_IN else "output"
        if len(parts) > MAX_TENSORS:
            self._notes.add(f"{side} has {len(parts)} tensors; only the first {MAX_TENSORS} have rows", name)
        placed = []
        for part in parts[:MAX_TENSORS]:
            reason = why_not_measurable(part.tensor)
            if reason is not None:
                self._notes.add(f"{side} is {reason}", name)
                continue
            dtype, shape = dtype_name(part.tensor.dtype), tuple(part.tensor.shape)
            entry = PlanEntry(kind, name, part.index, call_seq=seq, dtype=dtype, shape=shape)
            slot = self._gate.table.add((kind, name, seq, part.index), lambda: [entry])  # noqa: B023 - called at once
            if slot is not None:
                placed.append(interception.Output(name, slot, part.tensor, part.index))
        return placed

    def _release(self) -> None:
        """Release the state of the last sampled step, and publish notices about calls that were not measured."""
        step = self._step
        if self.options.log_only and step.thread:
            self._note_internal()
        self._log.report(self._notice)
        for name in step.works.missed():
            self._notes.add("is asynchronous and has no wait() within its step, so its outputs have no rows", name)
        for function in sorted(self._on_other_threads.copy()):
            self._notes.add("is called on another thread than the training and is not measured", function)
        was_measured, self._step = step.thread, _StepCalls()
        if was_measured and not self._has_noted_uncalled and not (self.options.log_only and self._log.has_reported):
            self._has_noted_uncalled = True
            self._note_uncalled()
        self._notes.report(self._notice)

    def _note_internal(self) -> None:
        try:
            self._log.note_internal(self._report)
        except Exception as error:  # noqa: BLE001 - torch may change the record, and hooks must be removed
            self._report("reading the collective calls of torch itself from its flight record", error)

    def _report(self, where: str, error: BaseException) -> None:
        self._hooking.tell_once(f"collectives: {where} failed: {error!r}")

    def _note_uncalled(self) -> None:
        notices = []
        if not (self._seen or self._on_other_threads):
            notices.append(_NOT_SEEN)
        elif self._seen:
            notices += target_notices(self.targets, {*self._seen, *self._seen.values()}, "collective")
            if not (self._is_any_chosen or notices):
                notices.append(f"call_sites matches the stack of no call; the calls are {some_of(self._seen)}")
        for sentence in notices:
            self._notice(sentence)

    def _notice(self, message: str) -> None:
        self._hooking.tell(f"collectives: {message}")
