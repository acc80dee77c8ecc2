"""Start the session of a model and its optimizers when a monitor is attached, and end it.

A session ends by a call, at the end of the process, by a signal, or when its monitor and model are dropped. A monitor
is dropped when the script holds neither the monitor nor its model. Until then, the hooks of the model keep the session
in use, also without any reference to the monitor.

If another rank publishes equal statistics of a parameter, the session does not publish them again. This module finds
such parameters. Equality is never assumed: the adapter, or an attribute of the parameter, states that the ranks of a
group have equal values.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_contract.model.kinds import COUNT_OPS
from rankscope_contract.model.schema import WIRE_VALUE_OPS
from rankscope_exporter.adapters import Framework, Stage, framework_of
from rankscope_exporter.adapters.monitored_model import Borrowed, MonitoredModel, UpdateScope
from rankscope_exporter.adapters.parameter_names import NamedParameter, Targets, named_parameters, target_notices
from rankscope_exporter.adapters.process_group import place_in
from rankscope_exporter.adapters.torch_private import without_tensor_functions
from rankscope_exporter.api.session import PUBLISH_SECONDS, Session
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.control.anomaly_reactions import OnAnomaly, Owner
from rankscope_exporter.measure.kernels.compiled import backend_name
from rankscope_exporter.monitors.throughput import ALONE, parallel_of
from rankscope_exporter.process import lifecycle
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.process.inert import NotCopied
from rankscope_exporter.process.threads import OwnThread

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Run no garbage collection and no code of tensor classes of the script inside the `with` block.

    Then move all objects to the oldest generation. The objects of a large plan would cause many full collections, which
    would take most of the time of attach(). They remain until detach(), so that collections of younger generations need
    not visit them either.
    """
    was_enabled = gc.isenabled()
    if was_enabled:
        gc.collect(1)  # otherwise recent garbage of the training would be moved, and freed by a full collection only
    gc.disable()
    try:
        with without_tensor_functions():
            yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # gc.unfreeze() would undo gc.freeze() of the script
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@_undisturbed()
def attached(
    model: torch.nn.Module | Stage | Framework,
    optimizer: Optimizers,
    config: MonitorConfig,
    boundary: ErrorBoundary,
    *,
    groups: Mapping[str, Any],
    first_step: int,
    total_steps: int | None,
    owner: Owner,
) -> Session:
    """Return the session of `model`, with hooks installed and the server started, and publish notices for the user.

    `groups` has the process groups of `Monitor.attach` by name; the value is None for a group that was not given. The
    hooks of the model hold `owner`.
    """
    began = time.thread_time()
    framework = framework_of(model)
    place = boundary.call("pp_group", place_in, groups["pp_group"])
    framework.pp_stage = place[0] if place else framework.pp_stage
    parameters, targets = named_parameters(framework.module), Targets(config.tensors)
    chosen = tuple(item for item in parameters if not item.is_lazy and targets.chooses(item))
    found = boundary.call("reading dp_group and tp_group", find_replica_dedup, framework, chosen, groups)
    replica_dedup = found or ReplicaDedup()
    several = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    given = tuple(several) if isinstance(several, Iterable) else () if several is None else (several,)
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    optimizers = Borrowed(framework.optimizers(given))
    monitored = MonitoredModel(
        framework, chosen, optimizers, world_size, elsewhere=replica_dedup.positions, update=UpdateScope(chosen)
    )
    notices = [*_notices(framework, parameters, targets), *replica_dedup.notices]
    session = Session(
        monitored=monitored,
        config=config,
        boundary=boundary,
        first_step=first_step,
        planned_steps=total_steps,
        owner=weakref.ref(owner),
        parallel=boundary.call("finding how the model is divided", parallel_of, framework, world_size, groups) or ALONE,
    )
    address = session.start(owner)
    session.attach_seconds = time.thread_time() - began
    for sentence in notices:
        boundary.call("publishing a notice of attach()", session.notices.tell, sentence)
    for event in replica_dedup.events:
        boundary.call("publishing an event of attach()", session.current_step.publish_event, event)
    boundary.call("printing the banner", _print_banner, session, address)
    return session


def _notices(framework: Framework, parameters: Sequence[NamedParameter], targets: Targets) -> list[str]:
    """Return sentences about settings, optimizers and parameters of which nothing is measured."""
    names = [name for item in parameters for name in (item.name, *item.aliases)]
    notices = [f"tensors: {sentence}" for sentence in target_notices(targets, names, "parameter")]
    if framework.announced is None and not framework.hookable_chunks:
        notices.append(
            "torch registers no hook on a model that torch.jit.script has compiled: a step begins with its first "
            "gradient, and values of forward passes are absent"
        )
    if unknown := framework.unknown_optimizers:
        notices.append(
            f"no torch optimizer was found in {', '.join(unknown)}: learning rates and optimizer state are absent "
            "until a torch optimizer of the model's parameters steps"
        )
    lazy = [item.name for item in parameters if item.is_lazy and targets.chooses(item)]
    if lazy:
        notices.append(
            f"{len(lazy)} parameters have no shape yet and are not measured ({', '.join(lazy[:3])}): "
            "run a forward pass before attach()"
        )
    return notices


BYTES_PER_ENTRY: Final = 4 * len(WIRE_VALUE_OPS) + 8 * len(COUNT_OPS)
"""Size in bytes of the statistics of one tensor in a record, before compression."""


def _print_banner(session: Session, address: str) -> None:
    """Print on rank 0 the measured quantities, the data per step, the metrics page and the reader of the records."""
    identity, config, channel = session.identity, session.config, session.channel
    if identity.rank != 0:
        return
    measured = ", ".join(name.replace("_", " ") for name in config.quantities)
    if config.switch_file is not None:
        measured = f"nothing until {config.switch_file} switches it on"
    if channel.service_url:
        reader = f"registering with service {channel.service_url}"
    elif channel.spool is not None:
        reader = f"no service (RANKSCOPE_INGEST_URL): records are written to {channel.spool.root}"
    else:
        reader = "no service, and no file has the records: set RANKSCOPE_INGEST_URL, or scrape it with Prometheus"
    parameters, entries = session.monitored.parameters, len(session.active_quantities.table)
    ranks = f"{identity.world_size} rank{'s' if identity.world_size != 1 else ''}"
    elements = sum(math.prod(named.shape) for named in parameters)
    tensors = f"{len(parameters)} tensors ({elements:,} elements)"
    cadence = "every step" if config.every == 1 else f"every {config.every} steps"
    kernel = backend_name(session.monitored.device, coming=config.statistics == "auto")
    size = f"{entries * 2:,} series, about {entries * BYTES_PER_ENTRY / 1000:,.0f} kB per step"
    session.console.line(f"run {identity.run!r} on {ranks}; {measured} of {tensors} {cadence}, {kernel} kernel")
    for line in filter(None, (f"{size}; {address}/metrics; {reader}", session.watchdog.signal_note())):
        session.console.line(line)


DP, TP = "dp_group", "tp_group"


@dataclass(frozen=True, slots=True)
class ReplicaDedup:
    """The parameters that another rank publishes for this rank, and events and notices about them.

    `positions` are the positions of these parameters in the list of all monitored parameters.
    """

    positions: frozenset[int] = frozenset()
    events: tuple[Event, ...] = ()
    notices: tuple[str, ...] = ()


def find_replica_dedup(
    framework: Framework, parameters: Sequence[NamedParameter], groups: Mapping[str, Any]
) -> ReplicaDedup:
    """Return the parameters whose data the first rank of a group publishes for this rank.

    `groups` has the process groups, also others, by the names DP and TP; None for a group that was not given.
    """
    positions: set[int] = set()
    events, notices = [], []
    for name in (DP, TP):
        if (group := groups.get(name)) is None:
            continue
        try:
            ranks = dist.get_process_group_ranks(group)
            here = ranks.index(dist.get_rank())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            notices.append(f"{name} is not a process group of this rank; this rank publishes all parameters: {error}")
            continue
        same = [i for i, named in enumerate(parameters) if _is_same(framework, named, name, ranks)]
        if len(ranks) > 1 and not same:
            notices.append(
                f"{name}: no parameter is known to be equal on all ranks of the group; "
                "each rank publishes all its parameters"
            )
        if here > 0 and same:
            positions.update(same)
            events.append(_event(name, ranks, len(same), len(parameters)))
    return ReplicaDedup(frozenset(positions), tuple(events), tuple(notices))


def _is_same(framework: Framework, named: NamedParameter, name: str, ranks: Sequence[int]) -> bool:
    parameter = framework.parameter(named)
    if parameter is None or framework.is_same_on(parameter, ranks):
        return parameter is not None
    # Megatron sets the attribute on every parameter. Parameters of experts are reduced over another group.
    of_tp = name == TP and getattr(parameter, "tensor_model_parallel", None) is False
    return of_tp and getattr(parameter, "allreduce", True) is not False


def _event(name: str, ranks: Sequence[int], same: int, all_: int) -> Event:
    text = f"{name}: rank {ranks[0]} publishes the equal data of {same} of {all_} parameters for all ranks of the group"
    details = {"group": name, "published_by": ranks[0], "ranks": list(ranks), "parameters": same}
    return Event(type=EventType.NOTE, severity=Severity.INFO, message=text, details=details)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """The place of the records of a run after the end of its monitor."""

    run: str
    rank: int
    source: str | None
    """The URL of the service, or the folder with the records of ranks; None if no file has the records."""
    is_stored: bool
    """True if the service has committed all records of this rank, or if the folder contains them."""


class SessionEnd:
    """Ends the session of one attached monitor exactly once.

    The process-wide lists of monitors hold this object. It holds neither the monitor nor the model.
    """

    def __init__(self, session: Session, owner: Owner, *, completes_at_exit: bool) -> None:
        """If `completes_at_exit`, an end of the process without a known error completes the run."""
        self.session: Session | None = session
        """The session; None after its end has begun, and in a forked child."""
        self.ended: EndedRun | None = None
        self._exit_wait_seconds = session.config.exit_wait_seconds
        self._boundary = session.boundary
        self._completes_at_exit = completes_at_exit
        self._ending: Session | None = None  # while its last records are published
        self._may_end = threading.Lock()  # taken, without waiting, by the first caller that ends the session
        self._stop_signal: str | None = None  # the signal that requested an end
        self._thread: OwnThread | None = None  # ends a session that was dropped
        owner.dropped = self._dropped

    def watch(self, signals: Iterable[str]) -> None:
        """End the session when the process ends, or when one of `signals` ends the process."""
        lifecycle.watch(self)
        if self._completes_at_exit:
            lifecycle.note_calls_of_exit()
        self._boundary.call("stop_signals", lifecycle.handle_signals, self, signals)

    def end_of_process(self, reason: ExitReason, error: str | None) -> None:
        """Publish the exit record and wait until the service has committed it. Called when the interpreter exits."""
        if self._completes_at_exit and reason is ExitReason.UNKNOWN:
            reason, error = lifecycle.exit_reason(lifecycle.called_exit())
        self._leave(reason, error, self._exit_wait_seconds)()

    def abandon_after_fork(self) -> None:
        """Make the session inert in a forked process.

        A data-loader worker, for example, must not serve records or send events for its parent process.
        """
        sessions, self.session, self._ending = (self.session, self._ending), None, None
        for session in filter(None, sessions):
            session.hooks.active = False
            self._boundary.call("fork", session.watchdog.abandon_after_fork)
            self._boundary.call("fork", session.channel.abandon_after_fork)

    def stop_asked(self, name: str) -> None:
        self._stop_signal = name

    def last_records(self, name: str, *, is_stuck: bool = False) -> Callable[[], None]:
        """Record that the signal `name` ends this process.

        Return a function that waits until the service has committed the record.
        """
        wait_seconds = min(self._exit_wait_seconds, lifecycle.STOP_WAIT_SECONDS)
        session = self.session
        if is_stuck and session is not None:
            session.diagnosis.publish_exit(name)
            return NotCopied(lambda: session.channel.drain(wait_seconds))
        return self._leave(ExitReason.SIGNAL, name, wait_seconds)

    def _leave(self, reason: ExitReason, error: str | None, wait_seconds: float) -> Callable[[], None]:
        """Remove the hooks and record the end of training.

        Return a function that waits until the service has committed the records, and then stops the server. If another
        thread ends the session because it was dropped, the function waits for this thread.
        """
        session = self.session
        if session is None or not self._may_end.acquire(blocking=False):
            return NotCopied(lambda: self._await_end(wait_seconds))
        self.session, self._ending = None, session
        is_hurried = reason is ExitReason.SIGNAL or self._stop_signal is not None
        self._boundary.call("detach()", session.hooks.remove)
        self._boundary.call("detach()", session.watchdog.stop)
        self._boundary.call("detach()", session.hardware.stop)
        self._boundary.call("end of training", session.record_end, reason, error, self._stop_signal)
        return NotCopied(lambda: self._finish_serving(session, wait_seconds, is_hurried=is_hurried))

    def _finish_serving(self, session: Session, wait_seconds: float, *, is_hurried: bool) -> None:
        drain = functools.partial(session.drain, wait_seconds, is_hurried=is_hurried)
        left = self._boundary.call("end of training", drain)
        spool = session.channel.spool
        folder = None if spool is None else spool.folder
        session.callbacks.last = None
        self._boundary.call("detach()", session.change_sources.stop)
        self._boundary.call("closing", session.channel.close)
        self.ended = _ended_run(session, left, folder)
        # Not earlier: a process that another thread forks meanwhile must release sockets and locks.
        self._ending = None
        self._boundary.call("detach()", lifecycle.forget, self)
        self._boundary.on_first = None

    def _await_end(self, wait_seconds: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_seconds + PUBLISH_SECONDS)

    # The end of a session after its monitor and model were freed.

    def _dropped(self, on_anomaly: OnAnomaly | None) -> None:
        """Queue the end of the session without a lock: the garbage collector calls this on any thread at any point."""
        session = self.session
        if session is not None:
            session.callbacks.last = on_anomaly
            session.steps.items.put(self._end_dropped)

    def _end_dropped(self) -> None:
        """End the session on a new thread. Called on the publisher thread, which cannot wait for its own end."""
        session = self.session
        if session is None or self._thread is not None:
            return
        chunks = {id(chunk): chunk for chunk in _chunks_of(session)}
        if chunks:  # they live without the hooks that held the owner: other code has removed these hooks
            session.callbacks.last = None  # it may refer to the model
            for chunk in chunks.values():
                weakref.finalize(chunk, self._dropped, None).atexit = False
        else:
            self._thread = OwnThread(target=self.end_of_process, args=(ExitReason.UNKNOWN, None), name="rankscope-end")
            self._thread.start()


def _ended_run(session: Session, left: int | None, folder: str | None) -> EndedRun:
    """Return the place of the records, of which the service has not committed `left`. None is an unknown number."""
    url = session.channel.service_url
    root = None if folder is None else str(Path(folder).parent.absolute())
    is_stored = left == 0 if url else root is not None
    return EndedRun(run=session.identity.run, rank=session.identity.rank, source=url or root, is_stored=is_stored)


def note_other_monitors(session: Session) -> None:
    """Publish a notice if another monitor of this process is attached to the model of `session`."""
    own = {id(chunk) for chunk in _chunks_of(session)}
    attached = (item.session for item in lifecycle.watched() if isinstance(item, SessionEnd))
    others = (other for other in attached if other is not None and other is not session)
    if any(id(chunk) in own for other in others for chunk in _chunks_of(other)):
        session.notices.tell(
            "another Monitor is attached to the same model: both measure each step, and each writes a run of its own; "
            "call detach() of the one that is not needed"
        )


def _chunks_of(session: Session) -> list[nn.Module]:
    """Return the user's modules that the session measures and the wrappers that training calls; none if freed."""
    try:
        return [session.monitored.framework.module, *session.monitored.framework.chunks]
    except ReferenceError:
        return []
