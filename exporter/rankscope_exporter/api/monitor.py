"""The interface of a training script: create a Monitor, attach it, and use it as a context manager.

Errors after construction are caught here, counted, and logged once: training never stops because of telemetry.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

import torch

from rankscope_contract.diagnostics.stacks import stacks_text
from rankscope_contract.model.events import Event, EventType, ExitReason
from rankscope_contract.model.phases import WITHIN_A_STEP
from rankscope_exporter.adapters import Framework, Stage
from rankscope_exporter.api.phase import OpenPhases, Phase, opaque
from rankscope_exporter.api.session import Ending, Session
from rankscope_exporter.api.session_factory import Optimizers, attached
from rankscope_exporter.base.copies import CopiesDoNothing, NotCopied
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import is_dynamo_compiling, on_compilation
from rankscope_exporter.base.validation import callable_or_none, steps_from
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.config.resolve import Given, config_of
from rankscope_exporter.model.parameter_names import encodable
from rankscope_exporter.monitors.hangs.diagnosis import CapturedStacks
from rankscope_exporter.process import lifecycle, stop_signals
from rankscope_exporter.quantities.structure import Structure
from rankscope_exporter.reactions.anomaly_callback import OnAnomaly
from rankscope_exporter.sampling.sampling_config import SWITCH, sampling_config_from
from rankscope_exporter.sinks import Sink
from rankscope_exporter.sinks.memory import Row

_COMPILED_CALL: Final = (
    "a method of the monitor was called in code that torch.compile compiles, where it does nothing: call it outside"
)


class Monitor(CopiesDoNothing):
    """Monitors one model: `with Monitor(total_steps=1000) as monitor: monitor.attach(model, optimizer); …`.

    Construction checks the configuration and raises ConfigError; no other method raises into training. Before `attach`,
    no socket is opened and no thread is started. All methods are cheap and have no effect on a monitor that is not
    attached, that is disabled, or that is in a forked child.

    A model may hold its monitor and be copied or saved with it. The copy of a monitor does nothing, and its `is_copy`
    is True: it has the configuration, without the token, and cannot be attached. The original continues.

    The class has more than 20 methods because it is the whole public interface. Each method only forwards to the
    session.
    """

    def __init__(
        self,
        config: Given = None,
        *,
        total_steps: int | None = None,
        first_step: int = 1,
        on_anomaly: OnAnomaly | None = None,
    ) -> None:
        """Check the configuration: a MonitorConfig, a mapping, or the path of a JSON or TOML file.

        `total_steps` is the planned number of steps (for progress and ETA), `first_step` the number of the next step.
        `on_anomaly` is called with an Anomaly once for each step of this rank at which rules fire. The calls run one at
        a time on a background thread. While 64 anomalies wait, further ones are dropped and counted.
        """
        self._config = config_of(config).with_environment(os.environ)
        self._total_steps = None if total_steps is None else steps_from("total_steps", total_steps, at_least=1)
        self._first_step = steps_from("first_step", first_step, at_least=0)
        self._on_anomaly = callable_or_none("on_anomaly", on_anomaly)
        self._boundary = ErrorBoundary()
        self._session: Session | None = None
        self._sinks: Mapping[str, Sink] = {}
        self._ending: Session | None = None  # while its last records are published
        self._stop_signal: str | None = None  # the signal that requested an end
        self._phases = OpenPhases(self._phase_begins, self._phase_ended)
        self._was_compiled = on_compilation(self._call_compiles)

    def _call_compiles(self) -> None:
        session = self._session
        if session is not None:
            session.hooks.tell_once(_COMPILED_CALL)

    def _unattached(self) -> dict[str, Any]:
        return {
            "_on_anomaly": None,
            "_boundary": ErrorBoundary(),
            "_session": None,
            "_ending": None,
            "_stop_signal": None,
            "_phases": OpenPhases(),
            "_was_compiled": on_compilation(lambda: None),
        }

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
        """Hook `model` (wrapped or not, or a `PipelineStage`) and its optimizers, start the server, and return self.

        Pass a list for the model chunks that Megatron-Core trains on this rank, or for all pipeline stages of torch on
        this rank. DeepSpeed's engine contains its optimizer. Call this method after the model is wrapped, before or
        after `torch.compile`. If the port is in use, the address requires a token, or the model cannot be hooked, an
        error is printed once on the console and training continues unmonitored.

        With `dp_group` or `tp_group` (a group of this rank), only the first rank of the group publishes the data that
        is equal on all its ranks by construction: parameters, reduced gradients, optimizer state. Replicas that diverge
        are then not detected. `pp_group`, the ranks of a pipeline from first to last stage, orders anomalies by stage
        if the model does not contain its stage.
        """
        if self._config.enabled and self._session is None and not self._refuses("attach()"):
            groups = {"dp_group": dp_group, "tp_group": tp_group, "pp_group": pp_group}
            self._boundary.call("attach()", self._attach, model, optimizer, groups)
        return self

    def _attach(
        self, model: torch.nn.Module | Stage | Framework, optimizer: Optimizers, groups: Mapping[str, Any]
    ) -> None:
        self._session = session = attached(
            model,
            optimizer,
            self._config,
            self._boundary,
            groups=groups,
            first_step=self._first_step,
            total_steps=self._total_steps,
            on_anomaly=self._on_anomaly,
        )
        self._sinks = session.sinks.by_name
        for name in self._phases.names:
            session.events.on_phase_begin(name)
        lifecycle.watch(self)
        self._stop_signal = None
        self._boundary.call("stop_signals", stop_signals.install, self, self._config.stop_signals)

    def detach(self) -> None:
        """Remove all hooks, publish the remaining records and the exit event, and stop the server."""
        self._end(ExitReason.COMPLETED, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(*lifecycle.exit_reason(error))

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and wait for the service's commit. Called at the exit of the interpreter."""
        self._end(reason, error)

    def abandon_after_fork(self) -> None:
        """Become inert: a forked data-loader worker must not serve records or send events for its parent."""
        sessions, self._session, self._ending = (self._session, self._ending), None, None
        for session in filter(None, sessions):
            session.hooks.active = False
            self._boundary.call("fork", session.watchdog.abandon_after_fork)
            self._boundary.call("fork", session.channel.abandon_after_fork)

    def stop_asked(self, name: str) -> None:
        """Note that the signal `name` requested an end, and that a handler of the script has received it."""
        self._stop_signal = name

    def last_records(self, name: str) -> Callable[[], None]:
        """Record that the signal `name` ends this process; return a function that waits for the record's commit."""
        wait_seconds = min(self._config.exit_wait_seconds, stop_signals.STOP_WAIT_SECONDS)
        return self._leave(ExitReason.SIGNAL, name, wait_seconds)

    def _end(self, reason: ExitReason, error: str | None) -> None:
        self._leave(reason, error, self._config.exit_wait_seconds)()

    def _leave(self, reason: ExitReason, error: str | None, wait_seconds: float) -> Callable[[], None]:
        """Remove the hooks and record the end; return a function that waits for the commit and stops the server."""
        session, self._session = self._session, None
        if session is None:
            return NotCopied(lambda: None)
        self._ending = session
        deadline = time.monotonic() + wait_seconds
        self._boundary.call("detach()", session.hooks.remove)
        self._boundary.call("detach()", session.watchdog.stop)
        self._boundary.call("detach()", session.step_observers.hardware.stop)
        ending = Ending(reason=reason, error=error, total_steps=self._total_steps, signal=self._stop_signal)
        self._boundary.call("end of training", session.record_end, ending)
        return NotCopied(lambda: self._finish_serving(session, deadline, wait_seconds))

    def _finish_serving(self, session: Session, deadline: float, wait_seconds: float) -> None:
        self._boundary.call("end of training", session.drain, deadline, wait_seconds)
        self._boundary.call("detach()", session.change_sources.stop)
        self._boundary.call("closing", session.channel.close)
        # Not earlier: a process that another thread forks meanwhile must release sockets and locks.
        self._ending = None
        self._boundary.call("detach()", stop_signals.uninstall, self)
        lifecycle.forget(self)
        self._boundary.on_first = None

    # Calls of the training script.

    @opaque
    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log numbers of the current step: `log(loss=loss, grad_norm=norm, tokens=n)`.

        Values are numbers, one-element tensors (read later, without waiting for the device), None (absent), or
        mappings of these: `loss={"lm": …, "aux": …}`, `learning_rate={"0": …}`. NaN and Inf are kept. `tokens` and
        `samples` are the amounts of this step on this rank. Their totals are derived; their rates as well, unless they
        are tensors. `step` sets the number of the current step, or of the next step if it is given before its forward
        pass. Later steps are numbered from there.
        """
        session = self._session
        if session is not None:
            session.watchdog.beat()
            session.hooks.call("log()", session.recorder.log, values, step)

    @opaque
    def batch(self, ids: Any) -> None:
        """Name the samples of the batch whose forward pass comes next: numbers, names, or a tensor of numbers.

        The ids of the last steps are kept. The ids of a step at which a rule fires are part of the event of its
        `capture`, and are passed to `on_anomaly`. A tensor is read later, without waiting for its device.
        """
        session = self._session
        if session is not None:
            session.hooks.call("batch()", session.reactions.batches.add, ids)

    @opaque
    def event(self, type: str, message: str = "", **details: Any) -> None:  # noqa: A002 - the name of the column
        """Record an event with `details` that JSON can represent. It is published immediately."""
        session = self._session
        if session is not None:
            session.watchdog.beat()
            session.hooks.call("event()", self._event, session, type, message, details)

    def _event(self, session: Session, kind: str, message: str, details: Mapping[str, Any]) -> None:
        text = encodable(json.dumps(details, default=str, ensure_ascii=False)) if details else None
        session.current_step.publish_event(Event(type=str(kind), message=encodable(str(message)), details=text))

    def phase(self, name: str) -> Phase | AbstractContextManager[None]:
        """Return a context manager for a phase of the training, such as an evaluation or a checkpoint.

        A long phase is then not reported as a hang. The result can also decorate a function. Phases can be nested: the
        service shows the innermost one, and its time counts for it only. `data_wait`, `forward`, `backward`,
        `collective`, `optimizer` and `other` replace the derived time of a part of a step, and create no event.
        """
        if is_dynamo_compiling():
            self._was_compiled()
            return contextlib.nullcontext()
        return Phase(name, self._phases)

    def _phase_begins(self, name: str) -> None:
        session = self._session
        if session is not None:
            session.hooks.call("phase()", self._begin_phase, session, name)

    def _begin_phase(self, session: Session, name: str) -> None:
        session.events.on_phase_begin(name)
        self._show_phase(session)

    def _phase_ended(self, name: str, seconds: float) -> None:
        session = self._session
        if session is not None:
            session.hooks.call("phase()", self._end_phase, session, name, seconds)

    def _end_phase(self, session: Session, name: str, seconds: float) -> None:
        session.events.on_phase_end(name)
        self._show_phase(session)
        if name not in WITHIN_A_STEP:
            session.current_step.add(session.step_observers.phases.total(name))
            self._event(session, EventType.PHASE, name, {"phase": name, "seconds": seconds})

    def _show_phase(self, session: Session) -> None:
        session.watchdog.beat()
        shown = [name for name in self._phases.names if name not in WITHIN_A_STEP]
        session.channel.set_phase(shown[-1] if shown else None)

    @opaque
    def end_step(self, *, skipped: bool | None = None) -> None:
        """End the current step explicitly, for loops in which hooks cannot detect the end.

        Required if gradients are zeroed in place (`set_to_none=False`) and the optimizer is skipped, and at every step
        with `steps="explicit"`.
        """
        session = self._session
        if session is not None:
            session.watchdog.beat()
            session.hooks.call("end_step()", lambda: session.recorder.end_step(skipped=skipped))

    @opaque
    def switch(self, config: Mapping[str, Any] | None = None, *, on: bool = True) -> None:
        """Change the sampling from the next step on; with several ranks, from a step on which they agree.

        `config` may contain `quantities`, `options`, `every`, `times` and `ops`. Settings that it does not contain have
        their value of attach. With `on=False`, nothing is measured until the next call. Call it on every rank. Raises
        ConfigError for an invalid document, as construction does: this is an error in the script, not in the run.
        """
        if self.is_copy:
            return
        document = {SWITCH: on, **(config or {})}
        sampling_config_from(document, self._config, on=on)
        session = self._session
        if session is not None:
            session.hooks.call("switch()", session.switch, document)

    def dump_stacks(self) -> str | None:
        """Record the stacks of all threads of this process, and return them as text; None if not attached.

        For error handlers of the script. The event also contains the collectives that are in progress.
        """
        session = self._session
        if session is None:
            return None
        taken: CapturedStacks | None = self._boundary.call("dump_stacks()", session.diagnosis.take, "call")
        return None if taken is None else stacks_text(taken.stacks)

    # State.

    @property
    def config(self) -> MonitorConfig:
        """The configuration, including settings of environment variables."""
        return self._config

    @property
    def run(self) -> str | None:
        """The name of the run; None if not attached."""
        return self._session.identity.run if self._session is not None else None

    @property
    def address(self) -> str | None:
        """The URL of the server of this rank; None if not attached."""
        return self._session.channel.url if self._session is not None else None

    def structure(self) -> str:
        """Return one line per module: class, inputs, outputs. Empty until the quantity "structure" was measured."""
        quantity = None if self._session is None else self._session.active_quantities.quantity(Structure.name)
        return quantity.text if isinstance(quantity, Structure) else ""

    def current(self, *kinds: str) -> tuple[Row, ...]:
        """Return the statistics of `kinds` (all kinds if empty) of the present step so far, else of the last step.

        The rows contain all statistics, independent of `ops`. This method waits for the device: use it for decisions
        that cannot wait for the next step, on the training thread.
        """
        session = self._session
        rows = None if session is None else session.hooks.call("current()", session.current, kinds)
        return rows or ()

    @property
    def measuring(self) -> dict[str, Any]:
        """The present sampling, its first step, and the changes `to_come`; empty if not attached."""
        session = self._session
        return {} if session is None else session.sampling_state()

    @opaque
    def remark(self, sentence: str) -> None:
        """Print a sentence on the console, and publish it as an event of type `note`."""
        session = self._session
        if session is not None:
            session.hooks.call("remark()", session.hooks.tell, sentence)

    def sink(self, name: str) -> Sink | None:
        """Return the sink `name`, also after detach; None if it is not configured."""
        return self._sinks.get(name)

    def overhead_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of this monitor so far, by thread; empty if not attached."""
        session = self._session
        return {} if session is None else session.overhead()

    @property
    def faults(self) -> int:
        """The number of errors of the monitor that were caught so far."""
        return self._boundary.count
