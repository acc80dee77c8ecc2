"""The interface of a training script: create a Monitor, attach it, and use it as a context manager.

An error in a method of the monitor is caught, counted, and logged once: training never stops because of telemetry. Only
the constructor raises an error, for a wrong argument.

Phases that the script declares by `with monitor.phase("evaluation"): …`, and methods that Dynamo does not trace.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Final, Never, Self, TypeVar, cast

import torch

from rankscope_contract.model.events import Event, EventType, ExitReason
from rankscope_contract.model.phases import WITHIN_A_STEP
from rankscope_contract.model.redaction import redacted_name
from rankscope_contract.model.stacks import stacks_text
from rankscope_exporter.adapters import Framework, Stage
from rankscope_exporter.adapters.tracing import is_dynamo_compiling, on_compilation, uncompiled
from rankscope_exporter.api.attachment import EndedRun, Optimizers, SessionEnd, attached, note_other_monitors
from rankscope_exporter.api.session import Session
from rankscope_exporter.config.monitor_config import Given, MonitorConfig, config_of, steps_from, warn
from rankscope_exporter.control.anomaly_reactions import OnAnomaly, Owner
from rankscope_exporter.measure.quantities.structure import Structure
from rankscope_exporter.monitors.hangs.diagnosis import CapturedStacks
from rankscope_exporter.process import lifecycle
from rankscope_exporter.process.errors import ConfigError, ErrorBoundary, encodable, missing_name
from rankscope_exporter.process.inert import CopiesDoNothing
from rankscope_exporter.publish.sinks import Sink
from rankscope_exporter.publish.sinks.memory import Row
from rankscope_exporter.training.sampling_config import SWITCH, sampling_config_from

M = TypeVar("M", bound=Callable[..., None])


class OpenPhases(CopiesDoNothing):
    """The phases of a training that are open now, from the outermost to the innermost.

    Changes are recorded in the session of `session_end`, which a monitor sets when it is attached.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.session_end: SessionEnd | None = None

    def _unattached(self) -> dict[str, Any]:
        return {"names": [], "session_end": None}

    def begin(self, name: str) -> None:
        self.names.append(name)
        self._record(name)

    def end(self, name: str, seconds: float) -> None:
        """Close the innermost open phase `name` after `seconds`. Other threads may have opened the others."""
        if name in self.names:
            del self.names[len(self.names) - 1 - self.names[::-1].index(name)]
            self._record(name, seconds)

    def _record(self, name: str, seconds: float | None = None) -> None:
        session = None if self.session_end is None else self.session_end.session
        if session is not None:
            session.hooks.call("phase()", self._changed, session, name, seconds)

    def _changed(self, session: Session, name: str, seconds: float | None) -> None:
        """Record in `session` that the phase `name` has begun, or has ended after `seconds`."""
        (session.phases.phase_begins if seconds is None else session.phases.phase_ended)(name)
        session.watchdog.active_at = time.monotonic()
        shown = [name for name in self.names if name not in WITHIN_A_STEP]
        session.channel.set_phase(shown[-1] if shown else None)
        if seconds is not None and name not in WITHIN_A_STEP:
            session.current_step.add(session.phases.total(name))
            _publish_event(session, EventType.PHASE, name, {"phase": name, "seconds": seconds})


def _publish_event(session: Session, kind: str, message: str, details: Mapping[str, Any]) -> None:
    event = Event(type=str(kind), message=encodable(str(message)), details=details or None)
    session.current_step.publish_event(event)


class PhaseContext(CopiesDoNothing, contextlib.ContextDecorator):
    """A phase of the training, which lasts from `__enter__` to `__exit__`.

    The object can be entered several times. As a decorator, it opens one phase for each call of the function.
    """

    def __init__(self, name: str, phases: OpenPhases) -> None:
        self.name = name
        self._phases = phases
        self._began: list[float] = []

    def _unattached(self) -> dict[str, Any]:
        return {"_began": []}

    def _recreate_cm(self) -> PhaseContext:
        return PhaseContext(self.name, self._phases)

    def __enter__(self) -> Self:
        self._began.append(time.monotonic())
        self._phases.begin(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        if self._began:
            self._phases.end(self.name, time.monotonic() - self._began.pop())


def opaque(method: M) -> M:
    """Return `method` in a form that Dynamo does not trace: a call inside compiled code has no effect."""

    @uncompiled
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_dynamo_compiling():
            self._was_compiled()
        else:
            method(self, *args, **kwargs)

    return cast("M", entry)


_COMPILED_CALL: Final = (
    "a method of the monitor was called in code that torch.compile compiles, where it does nothing: call it outside"
)


class MonitorState(CopiesDoNothing):
    """The state of a monitor that a script can read, without an effect on the training."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._boundary = ErrorBoundary()
        self._session_end: SessionEnd | None = None
        self._sinks: Mapping[str, Sink] = {}

    @property
    def _session(self) -> Session | None:
        return None if self._session_end is None else self._session_end.session

    @property
    def config(self) -> MonitorConfig:
        """The configuration, including the settings from environment variables."""
        return self._config

    @property
    def run(self) -> str | None:
        return self._session.identity.run if self._session is not None else None

    @property
    def ended(self) -> EndedRun | None:
        """The place of the records after the end of the run; None before."""
        return None if self._session_end is None else self._session_end.ended

    @property
    def address(self) -> str | None:
        """The URL of the server of this rank; None if not attached."""
        return self._session.channel.url if self._session is not None else None

    def structure(self) -> str:
        """Return one line of text per module (class, inputs, outputs); empty until `structure` was measured."""
        quantity = None if self._session is None else self._session.active_quantities.quantity(Structure.name)
        return quantity.text if isinstance(quantity, Structure) else ""

    def current(self, *kinds: str) -> tuple[Row, ...]:
        """Return the rows of statistics of the current step so far, or of the last step.

        The rows of the last step are returned if the current step is not sampled or has no rows yet. `kinds` selects
        rows by the kind of tensor, such as `grad_reduced`; without an argument, all rows are returned. The rows contain
        all statistics, not only those that `ops` selects. This method waits for the device. Call it on the training
        thread, for decisions that cannot wait for the next step.
        """
        session = self._session
        rows = None if session is None else session.hooks.call("current()", session.current, kinds)
        return rows or ()

    @property
    def measuring(self) -> dict[str, Any]:
        """The sampling configuration, its first step and pending changes (`to_come`); empty if not attached."""
        session = self._session
        return {} if session is None else session.sampling_state()

    def sink(self, name: str) -> Sink | None:
        """Return the Sink object with this `name`, also after detach; None if none is configured."""
        return self._sinks.get(name)

    def overhead_seconds(self) -> dict[str, float]:
        """Return the CPU seconds that each part of this monitor has used so far, by part; empty if not attached."""
        session = self._session
        return {} if session is None else session.overhead()

    @property
    def faults(self) -> int:
        """The number of errors inside the monitor that were caught so far."""
        return self._boundary.count


class Monitor(MonitorState):
    """Monitors one model: `with Monitor(total_steps=1000) as monitor: monitor.attach(model, optimizer); …`.

    Construction checks its arguments and raises ConfigError; no other method raises into training. A wrong value in a
    configuration file or in the environment is logged, and its setting has the default. Before `attach`, no socket is
    opened and no thread is started. All methods are cheap and have no effect on a monitor that is not attached, that is
    disabled, or that runs in a forked child process.

    If neither the script nor the model of the monitor exists any more, the run ends as at the end of the process. A
    monitor without references continues while its model exists.

    A model may have its monitor as an attribute, and may be copied or saved with it. The copy of a monitor does
    nothing, cannot be attached, and its `is_copy` is True. The copy has the configuration, without the token of the
    server. The original monitor continues.
    """

    _completes_at_exit: ClassVar[bool] = False

    def __init__(
        self,
        config: Given = None,
        *,
        total_steps: int | None = None,
        first_step: int = 1,
        on_anomaly: OnAnomaly | None = None,
        **unknown: Never,
    ) -> None:
        """Check the configuration `config`: a MonitorConfig, a mapping, or the path of a JSON or TOML file.

        `total_steps` is the planned number of steps, with those before a resumed step, used for the progress and the
        remaining time. `first_step` is the number of the first step. `on_anomaly` is called with an Anomaly, once for
        each step of this rank at which rules fire. The calls run one at a time on a background thread. While 64
        anomalies wait for their call, further anomalies are dropped and counted. Raises ConfigError if the
        configuration is invalid.
        """
        if unknown:
            known = "config (with all settings, as in Monitor({'run': 'a'})), total_steps, first_step and on_anomaly"
            raise ConfigError(f"Monitor has no argument {', '.join(unknown)}; its arguments are {known}")
        super().__init__(config_of(config).with_environment(os.environ))
        self._total_steps = None if total_steps is None else steps_from("total_steps", total_steps, at_least=1)
        self._first_step = steps_from("first_step", first_step, at_least=0)
        if self._total_steps is not None and self._first_step == 0:
            self._total_steps = max(1, self._total_steps - 1)  # the number of the last planned step
        if on_anomaly is not None and not callable(on_anomaly):
            raise ConfigError(f"on_anomaly must be a function of one argument, not {on_anomaly!r}")
        self._on_anomaly = on_anomaly
        self._owner: Owner | None = None
        self._phases = OpenPhases()
        self._was_compiled = on_compilation(functools.partial(Monitor._call_compiles, weakref.proxy(self)))

    def _call_compiles(self) -> None:
        if self._session is not None:
            self._session.hooks.tell_once(_COMPILED_CALL)

    def _unattached(self) -> dict[str, Any]:
        absent = dict.fromkeys(("_on_anomaly", "_session_end", "_owner"))
        inert = on_compilation(lambda: None)
        return absent | {"_boundary": ErrorBoundary(), "_phases": OpenPhases(), "_was_compiled": inert}

    def __getstate__(self) -> dict[str, Any]:
        sinks = {name: copy.copy(sink) for name, sink in self._sinks.items()}
        return {**super().__getstate__(), "_config": self._config.without_secrets(), "_sinks": sinks}

    # Attaching and detaching.

    def attach(
        self,
        model: torch.nn.Module | Stage | Sequence[torch.nn.Module | Stage] | Framework,
        optimizer: Optimizers = (),
        *,
        dp_group: torch.distributed.ProcessGroup | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        pp_group: torch.distributed.ProcessGroup | None = None,
    ) -> Self:
        """Hook `model` (wrapped or not, or a `PipelineStage`) and its optimizers, start the server, and return `self`.

        Pass a list for the model chunks that Megatron-Core trains on this rank, or for all pipeline stages of torch on
        this rank. A DeepSpeed engine contains its optimizer, so none is passed. Call this method after the model is
        wrapped, before or after `torch.compile`. An error is printed once, and training continues without a monitor, if
        the port is in use, if the address requires a token, or if the model cannot be hooked.

        `dp_group` and `tp_group` are the data-parallel and the tensor-parallel process group of this rank. If one of
        them is given, only the first rank of the group publishes the data that is equal on all ranks of the group by
        construction: parameters, reduced gradients, optimizer state. Replica divergence is then detected only by the
        quantity `hashes`. `pp_group` has the ranks of a pipeline, from the first to the last stage. It is needed to
        order anomalies by stage if `model` does not contain the number of its stage.
        """
        if self._config.enabled and self._session is None and not self._refuses("attach()"):
            groups = {"dp_group": dp_group, "tp_group": tp_group, "pp_group": pp_group}
            self._boundary.call("attach()", self._attach, model, optimizer, groups)
        return self

    def _attach(
        self, model: torch.nn.Module | Stage | Framework, optimizer: Optimizers, groups: Mapping[str, Any]
    ) -> None:
        lifecycle.occupy_standard_descriptors()
        self._owner = owner = Owner(self._on_anomaly)
        start = functools.partial(
            attached, groups=groups, first_step=self._first_step, total_steps=self._total_steps, owner=owner
        )
        try:
            session = start(model, optimizer, self._config, self._boundary)
        except (AttributeError, ImportError) as error:
            if missing_name(error) is None or not isinstance(model, torch.nn.Module):
                raise
            self._boundary.report("measuring the tensors of the model", error)
            config = replace(self._config, quantities=())
            session = start(Framework(model), optimizer, config, self._boundary)
        self._session_end = self._phases.session_end = SessionEnd(
            session, owner, completes_at_exit=self._completes_at_exit
        )
        self._sinks = session.sinks.by_name
        for name in self._phases.names:
            session.phases.phase_begins(name)
        self._session_end.watch(self._config.stop_signals)
        self._boundary.call("looking for other monitors", note_other_monitors, session)

    def detach(self) -> None:
        """Remove all hooks, publish the remaining records and the exit event, and stop the server."""
        self.end_of_process(ExitReason.COMPLETED, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owner is None and error is None and self._config.enabled and not self.is_copy:
            warn("rankscope: nothing was measured, because monitor.attach(model, optimizer) was not called")
        self.end_of_process(*lifecycle.exit_reason(error))

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and wait until the service has committed it."""
        if self._session_end is not None:
            self._session_end.end_of_process(reason, error)

    # Calls of the training script.

    @opaque
    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log numbers of the current step: `log(loss=loss, grad_norm=norm, tokens=n)`.

        Each name has a chart on the page of the run. docs/pages.md lists names with another effect, such as `val/loss`.
        Values are numbers, one-element tensors (read later, without waiting for the device), None (absent), or mappings
        of these: `loss={"lm": …, "aux": …}`, `learning_rate={"0": …}`. NaN and Inf are kept. `tokens` and `samples` are
        the numbers of tokens and samples of this step on this rank. The monitor derives their totals, and their rates
        unless the values are tensors. After an update, numbers belong to the finished step; docs/steps.md has two
        exceptions, such as a rate that is logged before each forward pass. `step` sets the number of the current step;
        in a call before a forward pass, it sets the number of the step that begins with this pass. The following steps
        count on from this number.
        """
        session = self._session
        if session is not None:
            session.watchdog.active_at = time.monotonic()
            session.hooks.log(values, step)

    @opaque
    def batch(self, ids: Any) -> None:
        """Store the ids of the samples in the batch whose forward pass comes next.

        The ids are numbers, names, or a tensor of numbers. The monitor keeps the ids of the last steps. If a rule fires
        at a step, the ids of the step are passed to `on_anomaly`. If the rule also starts a capture, the event of the
        capture contains the ids. A tensor of ids is read later, without waiting for its device.
        """
        session = self._session
        if session is not None:
            session.hooks.call("batch()", session.batches.add, ids)

    @opaque
    def event(self, type: str, message: str = "", **details: Any) -> None:  # noqa: A002 - the name of the column
        """Record an event with `details`, which must be representable as JSON. The event is published immediately."""
        session = self._session
        if session is not None:
            session.watchdog.active_at = time.monotonic()
            session.hooks.call("event()", _publish_event, session, type, message, details)

    def phase(self, name: str) -> PhaseContext | AbstractContextManager[None]:
        """Return a context manager for a phase of the training, such as an evaluation or a checkpoint.

        While a phase is open, a hang is reported only after the longer limit `hang_in_phase_after_seconds`. The
        returned object can also decorate a function. Phases can be nested: the service shows the innermost phase, and
        time in it does not count for the outer phases.

        The names `data_wait`, `forward`, `backward`, `collective`, `optimizer` and `other` denote parts of a step. The
        duration of a phase with such a name replaces the time that the monitor derives for this part of the step. Such
        a phase creates no event and does not change the limit for hangs.
        """
        if is_dynamo_compiling():
            self._was_compiled()
            return contextlib.nullcontext()
        return PhaseContext(redacted_name(str(name)), self._phases)

    @opaque
    def end_step(self, *, skipped: bool | None = None) -> None:
        """End the current step explicitly, for training loops in which hooks cannot detect the end of a step.

        It is required at each step of a monitor with `steps="explicit"`. With `steps="auto"`, it is required only at a
        step with a skipped optimizer step, if the loop zeroes gradients in place (`set_to_none=False`). `skipped` is
        True if the optimizer step was skipped. If it is None, a step with gradients and without an optimizer step
        counts as skipped.
        """
        session = self._session
        if session is not None:
            session.watchdog.active_at = time.monotonic()
            session.hooks.end_step(skipped)

    @opaque
    def switch(self, config: Mapping[str, Any] | None = None, *, on: bool = True) -> None:
        """Change the sampling, beginning with the next step; with several ranks, at the same later step on all ranks.

        `config` may contain `quantities`, `options`, `every`, `times` and `ops`. Settings that `config` does not
        contain get the values that they had at `attach`. With `on=False`, nothing is measured until the next call of
        this method. Call it on every rank. An invalid `config` is logged and changes nothing.
        """
        if self.is_copy:
            return
        document = {SWITCH: on, **(config or {})}
        try:
            sampling_config_from(document, self._config, on=on)
        except ConfigError as error:
            warn(f"switch() changes nothing: {error}")
            return
        session = self._session
        if session is not None:
            session.hooks.call("switch()", session.switch, document)

    @opaque
    def remark(self, sentence: str) -> None:
        """Print a sentence on the console, and publish it as an event of type `note`."""
        session = self._session
        if session is not None:
            session.hooks.call("remark()", session.hooks.tell, sentence)

    def dump_stacks(self) -> str | None:
        """Record the stacks of all threads and the pending collectives; call it in error handlers. Return the text."""
        session = self._session
        if session is None:
            return None
        taken: CapturedStacks | None = self._boundary.call("dump_stacks()", session.diagnosis.take, "call")
        return None if taken is None else stacks_text(taken.stacks)
