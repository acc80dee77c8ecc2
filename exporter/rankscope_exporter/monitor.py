"""The three lines a training script adds: make a Monitor, attach it, and use it as a context manager.

Whatever goes wrong after construction is caught here, counted and named once: training never stops for telemetry.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch

from rankscope_contract.events import Event, EventType, ExitReason, Severity
from rankscope_contract.kinds import COUNT_OPS
from rankscope_contract.records import WIRE_VALUE_OPS
from rankscope_exporter import lifecycle
from rankscope_exporter.config import MonitorConfig
from rankscope_exporter.console import Console, banner
from rankscope_exporter.errors import ConfigError
from rankscope_exporter.frameworks import framework_of
from rankscope_exporter.guard import Guard
from rankscope_exporter.hooks import Hooks
from rankscope_exporter.identity import resolve_identity
from rankscope_exporter.judge import Judge
from rankscope_exporter.naming import element_count, named_parameters
from rankscope_exporter.publisher import Publisher
from rankscope_exporter.quantities import select_quantities
from rankscope_exporter.quantities.base import Subject
from rankscope_exporter.recorder import Draft, Measurement, Recorder
from rankscope_exporter.serving.channel import Channel
from rankscope_exporter.statistics import backend_name, warm_up

BYTES_PER_ENTRY = 4 * len(WIRE_VALUE_OPS) + 8 * len(COUNT_OPS)
"""What one tensor costs in a record before compression."""


class _Session:
    """Everything that exists between attach and detach."""

    def __init__(
        self, subject: Subject, config: MonitorConfig, guard: Guard, first_step: int, total: int | None
    ) -> None:
        self.identity = resolve_identity(os.environ, config.run)
        device = subject.parameters[0].parameter.device if subject.parameters else torch.device("cpu")
        self.console = Console(self.identity.rank, enabled=config.console)
        self.recorder = Recorder(
            subject,
            select_quantities(config.quantities),
            self._hand_over,
            device=device,
            every=config.every,
            first_step=first_step,
            measurement=Measurement(config.zero_below, compiled=config.statistics == "auto"),
        )
        plan = self.recorder.plan
        self.hooks = Hooks(subject, self.recorder, guard)
        self.channel = Channel(
            self.identity,
            config.serve,
            rules=config.rules,
            settings={**_public_settings(config), "device": str(device)},
            planned_steps=total,
            on_fault=guard.report,
            overhead=self.overhead_seconds,
            dropped=lambda: {
                "publisher_behind": self.recorder.unsampled,
                "events_per_step": self.publisher.events_left_out,
            },
            faults=lambda: guard.count,
        )
        self.publisher = Publisher(
            plan,
            Judge(config.rules, plan.entries),
            self.channel.publish,
            device=device,
            guard=guard,
            on_firing=self.console.firing,
        )
        self.channel.announce(sorted({entry.kind for entry in plan.entries}))
        self.publisher.published = self.recorder.published
        self.publisher.flush_idle = self.recorder.flush_idle

    def overhead_seconds(self) -> dict[str, float]:
        """Return CPU seconds by who spent them; the serving threads count for themselves."""
        return {"hooks": self.hooks.cpu_seconds, "publisher": self.publisher.cpu_seconds}

    def _hand_over(self, draft: Draft) -> None:
        self.publisher.put(draft)


class Monitor:
    """Watches one model: `with Monitor(total_steps=1000) as monitor: monitor.attach(model, optimizer); …`.

    Construction checks the configuration and raises ConfigError; nothing after it raises into training. No socket is
    opened and no thread started before `attach`. All methods are cheap no-ops on a monitor that is not attached,
    disabled, or in a forked child.
    """

    def __init__(
        self,
        config: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        total_steps: int | None = None,
        first_step: int = 1,
    ) -> None:
        """Take a MonitorConfig, a mapping, or the path of a JSON or TOML file.

        `total_steps` is what the training intends (for progress and ETA), `first_step` the number of its next step.
        """
        self._config = _as_config(config).with_environment(os.environ)
        if total_steps is not None and total_steps < 1:
            raise ConfigError(f"total_steps is a number of steps from 1 on, not {total_steps}")
        self._total_steps = total_steps
        self._first_step = first_step
        self._guard = Guard()
        self._session: _Session | None = None
        self._phase_seconds: dict[str, float] = {}

    # Attaching and detaching.

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    ) -> Self:
        """Hook `model` (wrapped by DDP or not) and its optimizer or optimizers, and start serving.

        Call it after wrapping the model and before `torch.compile`. A port that is taken, an address that needs a
        token, a model that cannot be hooked: said once on the console, and training goes on unmonitored.
        """
        if self._config.enabled and self._session is None:
            self._guard.call("attach()", self._attach, model, optimizer)
        return self

    def _attach(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        config = self._config
        framework = framework_of(model)
        optimizers = (optimizer,) if not isinstance(optimizer, Sequence) else tuple(optimizer)
        world_size = torch.distributed.get_world_size() if _in_process_group() else 1
        parameters = named_parameters(framework.module, config.tensors)
        subject = Subject(framework, parameters, tuple(_unwrapped(item) for item in optimizers), world_size)
        session = _Session(subject, config, self._guard, self._first_step, self._total_steps)
        address = session.channel.start()
        try:
            warming = warm_up() if config.statistics == "auto" else None
            session.publisher.start()
            session.hooks.install()
        except BaseException:
            session.hooks.remove()
            session.channel.close()
            raise
        self._session = session
        lifecycle.watch(self)
        self._print_banner(session, subject, address, "numba" if warming is not None else backend_name())

    def _print_banner(self, session: _Session, subject: Subject, address: str, backend: str) -> None:
        if session.identity.rank != 0:
            return
        entries = len(session.recorder.plan.entries)
        lines = banner(
            run=session.identity.run,
            world_size=session.identity.world_size,
            what=", ".join(name.replace("_", " ") for name in self._config.quantities),
            tensors=len(subject.parameters),
            elements=element_count(subject.parameters),
            series=entries * 2,
            bytes_per_step=entries * BYTES_PER_ENTRY,
            every=self._config.every,
            backend=backend,
            address=address,
            service=session.channel.service_url,
        )
        for line in lines:
            session.console.line(line)

    def detach(self) -> None:
        """Take every hook away, publish what is left, and stop serving. Training may go on."""
        self._end(ExitReason.COMPLETED, None, say_exit=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason, text = lifecycle.exit_reason(error)
        self._end(reason, text, say_exit=True)

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and wait for the service to commit; the interpreter calls this by itself."""
        self._end(reason, error, say_exit=True)

    def abandon_after_fork(self) -> None:
        """Become inert: a forked data-loader worker must neither serve nor answer for its parent."""
        session, self._session = self._session, None
        if session is not None:
            session.hooks.active = False
            self._guard.call("fork", session.channel.abandon_after_fork)

    def _end(self, reason: ExitReason, error: str | None, *, say_exit: bool) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        lifecycle.forget(self)
        self._guard.call("detach()", session.hooks.remove)
        self._guard.call("end of training", self._say_goodbye, session, reason, error, say_exit)
        self._guard.call("closing", session.channel.close)

    def _say_goodbye(self, session: _Session, reason: ExitReason, error: str | None, say_exit: bool) -> None:  # noqa: FBT001 - private, called once
        deadline = time.monotonic() + self._config.exit_wait_seconds
        last_step = session.recorder.finish()
        if say_exit:
            details = json.dumps({"reason": reason, "last_step": last_step, "error": error}, ensure_ascii=False)
            severity = Severity.INFO if reason is ExitReason.COMPLETED else Severity.CRITICAL
            message = f"{reason}: {error}" if error else str(reason)
            session.recorder.event(Event(type=EventType.EXIT, severity=severity, message=message, details=details))
        # The statistics of the last steps are worth their milliseconds even with exit_wait_seconds = 0.
        session.publisher.stop(max(1.0, deadline - time.monotonic()))
        left = session.channel.drain(max(0.0, deadline - time.monotonic()))
        if left and session.channel.service_url:
            session.console.line(
                f"rank {session.identity.rank}: {left} records were not committed by {session.channel.service_url} "
                f"within {self._config.exit_wait_seconds:g} s and are lost with this process"
            )

    # What the training script says.

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Log numbers of the current step: `log(loss=loss, grad_norm=norm, tokens=n)`.

        Values are numbers, one-element tensors (read later, without waiting for the device), None (absent), or
        mappings of these: `loss={"lm": …, "aux": …}`, `learning_rate={"0": …}`. NaN and Inf are kept. `tokens` and
        `samples` are amounts of this step on this rank: their totals and rates are derived. `step` renumbers the
        current step, and with it the following ones.
        """
        session = self._session
        if session is not None:
            self._guard.call("log()", session.recorder.log, values, step)

    def event(self, type: str, message: str = "", **details: Any) -> None:  # noqa: A002 - the field's own word
        """Record that something happened, with JSON-able details; it is handed over at once."""
        session = self._session
        if session is not None:
            self._guard.call("event()", self._event, session, type, message, details)

    def _event(self, session: _Session, kind: str, message: str, details: Mapping[str, Any]) -> None:
        text = json.dumps(details, default=str, ensure_ascii=False) if details else None
        session.recorder.event(Event(type=str(kind), message=message, details=text))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what training is doing, so that a long evaluation or checkpoint is not taken for a hang."""
        session = self._session
        if session is None:
            yield
            return
        began = time.monotonic()
        self._guard.call("phase()", session.channel.set_phase, name)
        try:
            yield
        finally:
            self._guard.call("phase()", self._phase_ended, session, name, time.monotonic() - began)

    def _phase_ended(self, session: _Session, name: str, seconds: float) -> None:
        self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + seconds
        session.channel.set_phase(None)
        session.recorder.log({"phase_seconds": {name: self._phase_seconds[name]}})

    def end_step(self, *, skipped: bool | None = None) -> None:
        """End the current step explicitly, for loops whose end cannot be seen from outside.

        Needed only where gradients are zeroed in place (`set_to_none=False`) and the optimizer is skipped.
        """
        session = self._session
        if session is not None:
            self._guard.call("end_step()", lambda: session.recorder.end_step(skipped=skipped))

    # What one may ask.

    @property
    def run(self) -> str | None:
        """Return the name of the run, None while not attached."""
        return self._session.identity.run if self._session is not None else None

    @property
    def address(self) -> str | None:
        """Return the URL under which this rank serves, None while not attached."""
        return self._session.channel.url if self._session is not None else None

    def overhead_seconds(self) -> dict[str, float]:
        """Return the CPU seconds this monitor has cost so far, by thread; empty while not attached."""
        session = self._session
        return {} if session is None else {**session.overhead_seconds(), **session.channel.overhead_seconds()}

    @property
    def faults(self) -> int:
        """Return how many errors were swallowed so far."""
        return self._guard.count


def _as_config(config: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> MonitorConfig:
    if config is None:
        return MonitorConfig()
    if isinstance(config, MonitorConfig):
        return config
    if isinstance(config, Mapping):
        return MonitorConfig.from_mapping(config)
    return MonitorConfig.from_file(os.fspath(config))


def _public_settings(config: MonitorConfig) -> dict[str, Any]:
    """Return the configuration as /config and the store show it: without secrets."""
    settings = asdict(config)
    settings["serve"]["token"] = "***" if config.serve.token else None
    settings["rules"] = [{"rule_name": type(rule).__name__, "args": asdict(rule)} for rule in config.rules]
    return {**settings, "argv": sys.argv}


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside wrappers such as Accelerate's, which have no hooks of their own."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        if not hasattr(inner, "optimizer"):
            raise ConfigError(f"{type(optimizer).__name__} is no torch optimizer and wraps none in `.optimizer`")
        inner = inner.optimizer
    return inner
