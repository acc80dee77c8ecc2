"""The three lines a training script adds: make a Monitor, attach it, and use it as a context manager.

Whatever goes wrong after construction is caught here, counted and named once: training never stops for telemetry.
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
from rankscope_exporter.api.session import Session
from rankscope_exporter.api.session_factory import Optimizers, attached
from rankscope_exporter.api.shutdown import Ending, drain, record_end
from rankscope_exporter.base.copies import CopiesDoNothing, NotCopied
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.base.tracing import is_dynamo_compiling, on_compilation
from rankscope_exporter.base.validation import callable_or_none, steps_from
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.config.resolve import Given, config_of
from rankscope_exporter.model.parameter_names import encodable
from rankscope_exporter.monitors.hangs.diagnosis import CapturedStacks
from rankscope_exporter.process import lifecycle, stop_signals
from rankscope_exporter.reactions.anomaly_callback import OnAnomaly
from rankscope_exporter.sampling.sampling_config import SWITCH, sampling_config_from
from rankscope_exporter.sinks import Sink
from rankscope_exporter.sinks.memory import Row

_COMPILED_CALL: Final = (
    "a method of the monitor was called in code that torch.compile compiles, where it does nothing: call it outside"
)


class Monitor(CopiesDoNothing):
    """Watches one model: `with Monitor(total_steps=1000) as monitor: monitor.attach(model, optimizer); …`.

    Construction checks the configuration and raises ConfigError; nothing after it raises into training. No socket is
    opened and no thread started before `attach`. All methods are cheap no-ops on a monitor that is not attached,
    disabled, or in a forked child.

    A model may hold its monitor and be copied or saved with it. The copy of a monitor does nothing, and `is_copy` is
    True: it has the configuration, without the token, and is never attached. The original goes on.
    """

    def __init__(
        self,
        config: Given = None,
        *,
        total_steps: int | None = None,
        first_step: int = 1,
        on_anomaly: OnAnomaly | None = None,
    ) -> None:
        """Take a MonitorConfig, a mapping, or the path of a JSON or TOML file.

        `total_steps` is what the training intends (for progress and ETA), `first_step` the number of its next step.
        `on_anomaly` is called with an Anomaly once for each step of this rank at which rules fire, on a thread of its
        own and one at a time; while 64 wait for it, further ones are dropped and counted.
        """
        self._config = config_of(config).with_environment(os.environ)
        self._total_steps = None if total_steps is None else steps_from("total_steps", total_steps, at_least=1)
        self._first_step = steps_from("first_step", first_step, at_least=0)
        self._on_anomaly = callable_or_none("on_anomaly", on_anomaly)
        self._boundary = ErrorBoundary()
        self._session: Session | None = None
        self._sinks: Mapping[str, Sink] = {}
        self._ending: Session | None = None  # while it says goodbye
        self._stop_asked: str | None = None  # the signal that asked for an end
        self._phases = OpenPhases(self._phase_begins, self._phase_ended)
        self._was_compiled = on_compilation(self._call_compiles)

    def _call_compiles(self) -> None:
        session = self._session
        if session is not None:
            session.hooks.tell_once(_COMPILED_CALL)

    def _unattached(self) -> dict[str, Any]:
        return {
            "_on_anomaly": None,
            "_guard": ErrorBoundary(),
            "_session": None,
            "_ending": None,
            "_stop_asked": None,
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
        """Hook `model`, wrapped or not, or a `PipelineStage`, and its optimizer or optimizers, and start serving.

        A list has the chunks of a model that Megatron-Core trains on this rank, or all stages of torch's that it has;
        DeepSpeed's engine has its optimizer.
        Call it once the model is wrapped, before or after `torch.compile`. A port that is taken, an address that
        needs a token, a model that cannot be hooked: said once on the console, and training goes on unmonitored.

        With `dp_group` or `tp_group` (this rank's own) only the first rank of the group publishes what is the same on
        all of them by construction: parameters, reduced gradients, optimizer state. Ranks that drift apart go unseen.
        `pp_group`, the ranks of a pipeline from first stage to last, puts anomalies in order where no stage is given.
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
            session.recorder.step_events.tell("phase_begins", name)
        lifecycle.watch(self)
        self._stop_asked = None
        self._boundary.call("stop_signals", stop_signals.install, self, self._config.stop_signals)

    def detach(self) -> None:
        """Take every hook away, publish what is left, say that this rank is done, and stop serving."""
        self._end(ExitReason.COMPLETED, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(*lifecycle.exit_reason(error))

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and wait for the service to commit; the interpreter calls this by itself."""
        self._end(reason, error)

    def abandon_after_fork(self) -> None:
        """Become inert: a forked data-loader worker must neither serve nor answer for its parent."""
        sessions, self._session, self._ending = (self._session, self._ending), None, None
        for session in filter(None, sessions):
            session.hooks.active = False
            self._boundary.call("fork", session.watchdog.abandon_after_fork)
            self._boundary.call("fork", session.channel.abandon_after_fork)

    def stop_asked(self, name: str) -> None:
        """Note that a signal asked for an end and a handler of the script has it: what comes next is its own."""
        self._stop_asked = name

    def last_records(self, name: str) -> Callable[[], None]:
        """Record that the signal `name` ends this process, and return what waits until the service has it."""
        wait_seconds = min(self._config.exit_wait_seconds, stop_signals.STOP_WAIT_SECONDS)
        return self._leave(ExitReason.SIGNAL, name, wait_seconds)

    def _end(self, reason: ExitReason, error: str | None) -> None:
        self._leave(reason, error, self._config.exit_wait_seconds)()

    def _leave(self, reason: ExitReason, error: str | None, wait_seconds: float) -> Callable[[], None]:
        """Let go of training and record the end; return what waits for the service and stops serving."""
        session, self._session = self._session, None
        if session is None:
            return NotCopied(lambda: None)
        self._ending = session
        deadline = time.monotonic() + wait_seconds
        self._boundary.call("detach()", session.hooks.remove)
        self._boundary.call("detach()", session.watchdog.stop)
        self._boundary.call("detach()", session.step_observers.hardware.stop)
        ending = Ending(reason=reason, error=error, total_steps=self._total_steps, signal=self._stop_asked)
        self._boundary.call("end of training", record_end, session, self._boundary, ending)
        return NotCopied(lambda: self._finish_serving(session, deadline, wait_seconds))

    def _finish_serving(self, session: Session, deadline: float, wait_seconds: float) -> None:
        self._boundary.call("end of training", drain, session, self._boundary, deadline, wait_seconds)
        self._boundary.call("detach()", session.change_sources.stop)
        self._boundary.call("closing", session.channel.close)
        # Only now: a process that another thread forks meanwhile must let go of sockets and locks.
        self._ending = None
        self._boundary.call("detach()", stop_signals.uninstall, self)
        lifecycle.forget(self)
        self._boundary.on_first = None

    # What the training script says.

    @opaque
    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log numbers of the current step: `log(loss=loss, grad_norm=norm, tokens=n)`.

        Values are numbers, one-element tensors (read later, without waiting for the device), None (absent), or
        mappings of these: `loss={"lm": …, "aux": …}`, `learning_rate={"0": …}`. NaN and Inf are kept. `tokens` and
        `samples` are amounts of this step on this rank: their totals are derived, and their rates too unless they
        are tensors. `step` numbers the current step, or the coming one when said before its forward pass; the steps
        after it go on from there.
        """
        session = self._session
        if session is not None:
            session.watchdog.beat()
            session.hooks.call("log()", session.recorder.log, values, step)

    @opaque
    def batch(self, ids: Any) -> None:
        """Name the samples of the batch whose forward pass comes next: numbers, names, or a tensor of numbers.

        Kept for the last steps, so that those of a step at which a rule fires stand in the event of its `capture` and
        are given to `on_anomaly`. A tensor is read later, without waiting for its device.
        """
        session = self._session
        if session is not None:
            session.hooks.call("batch()", session.reactions.batches.say, ids)

    @opaque
    def event(self, type: str, message: str = "", **details: Any) -> None:  # noqa: A002 - the field's own word
        """Record that something happened, with JSON-able details; it is handed over at once."""
        session = self._session
        if session is not None:
            session.watchdog.beat()
            session.hooks.call("event()", self._event, session, type, message, details)

    def _event(self, session: Session, kind: str, message: str, details: Mapping[str, Any]) -> None:
        text = encodable(json.dumps(details, default=str, ensure_ascii=False)) if details else None
        session.recorder.event(Event(type=str(kind), message=encodable(str(message)), details=text))

    def phase(self, name: str) -> Phase | AbstractContextManager[None]:
        """Say what training is doing, so that a long evaluation or checkpoint is not taken for a hang.

        Use the result in a `with` statement, or as a decorator of a function. Phases may be nested; the innermost one
        is shown, and the time is its own. `data_wait`, `forward`, `backward`, `collective`, `optimizer` and `other` say
        of a part of a step what was only concluded, and are no events.
        """
        if is_dynamo_compiling():
            self._was_compiled()
            return contextlib.nullcontext()
        return Phase(name, self._phases)

    def _phase_begins(self, name: str) -> None:
        session = self._session
        if session is not None:
            session.hooks.call("phase()", self._tell_phase, session, name)

    def _tell_phase(self, session: Session, name: str) -> None:
        session.recorder.step_events.tell("phase_begins", name)
        self._show_phase(session)

    def _phase_ended(self, name: str, seconds: float) -> None:
        session = self._session
        if session is not None:
            session.hooks.call("phase()", self._end_phase, session, name, seconds)

    def _end_phase(self, session: Session, name: str, seconds: float) -> None:
        session.recorder.step_events.tell("phase_ended", name)
        self._show_phase(session)
        if name not in WITHIN_A_STEP:
            session.recorder.add(session.step_observers.phases.total(name))
            self._event(session, EventType.PHASE, name, {"phase": name, "seconds": seconds})

    def _show_phase(self, session: Session) -> None:
        session.watchdog.beat()
        shown = [name for name in self._phases.names if name not in WITHIN_A_STEP]
        session.channel.set_phase(shown[-1] if shown else None)

    @opaque
    def end_step(self, *, skipped: bool | None = None) -> None:
        """End the current step explicitly, for loops whose end cannot be seen from outside.

        Needed where gradients are zeroed in place (`set_to_none=False`) and the optimizer is skipped, and at every
        step with `steps="explicit"`.
        """
        session = self._session
        if session is not None:
            session.watchdog.beat()
            session.hooks.call("end_step()", lambda: session.recorder.end_step(skipped=skipped))

    @opaque
    def switch(self, config: Mapping[str, Any] | None = None, *, on: bool = True) -> None:
        """Change what is measured, from the next step on; where there are ranks, from a step they agree on.

        `config` holds `quantities`, `options`, `every`, `times` and `ops`; what it does not name is as it was at
        attach. `on=False` measures nothing until the next call. Call it on every rank. What cannot be meant is refused
        with a ConfigError, as at construction: it is a mistake of the script, not of the run.
        """
        if self.is_copy:
            return
        document = {SWITCH: on, **(config or {})}
        sampling_config_from(document, self._config, on=on)
        session = self._session
        if session is not None:
            session.hooks.call("switch()", session.switch, document)

    def dump_stacks(self) -> str | None:
        """Record where all threads of this process stand, and return it as text; None while not attached.

        For a handler of your own that suspects something. The event has the collectives under way beside it.
        """
        session = self._session
        if session is None:
            return None
        taken: CapturedStacks | None = self._boundary.call("dump_stacks()", session.diagnosis.take, "call")
        return None if taken is None else stacks_text(taken.stacks)

    # What one may ask.

    @property
    def config(self) -> MonitorConfig:
        """Return the configuration, with what the environment says."""
        return self._config

    @property
    def run(self) -> str | None:
        """Return the name of the run, None while not attached."""
        return self._session.identity.run if self._session is not None else None

    @property
    def address(self) -> str | None:
        """Return the URL under which this rank serves, None while not attached."""
        return self._session.channel.url if self._session is not None else None

    def structure(self) -> str:
        """Return a line for each module: class, inputs, outputs. Empty until a step with "structure" was measured."""
        session = self._session
        return "" if session is None else session.structure()

    def current(self, *kinds: str) -> tuple[Row, ...]:
        """Return the statistics of `kinds` (all without any) that the step under way has so far, else the last ones.

        Waits for the device: for a decision that cannot wait for the next step. All statistics, whatever `ops` says.
        For the training thread.
        """
        session = self._session
        rows = None if session is None else session.hooks.call("current()", session.current, kinds)
        return rows or ()

    @property
    def measuring(self) -> dict[str, Any]:
        """Return what is measured, since which step, and what is `to_come`; empty while not attached."""
        session = self._session
        return {} if session is None else session.change_queue.state()

    @opaque
    def remark(self, sentence: str) -> None:
        """Say something on the console, and as an event `note`."""
        session = self._session
        if session is not None:
            session.hooks.call("remark()", session.hooks.tell, sentence)

    def sink(self, name: str) -> Sink | None:
        """Return the live sink called `name`, also after detaching; None where there is none."""
        return self._sinks.get(name)

    def overhead_seconds(self) -> dict[str, float]:
        """Return the CPU seconds this monitor has cost so far, by thread; empty while not attached."""
        session = self._session
        return {} if session is None else session.overhead()

    @property
    def faults(self) -> int:
        """Return how many errors were swallowed so far."""
        return self._boundary.count
