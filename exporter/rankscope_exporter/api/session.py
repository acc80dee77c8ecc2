"""Builds and connects all objects that exist between attach and detach for one monitored model, and its notices."""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.phases import shares_text
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_exporter.adapters.hook_context import IntraOpThreads
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.adapters.process_group import default_group
from rankscope_exporter.adapters.tracing import others_may_capture
from rankscope_exporter.config.monitor_config import MonitorConfig, public_settings
from rankscope_exporter.control.anomaly_reactions import AnomalyCallback, CaptureController, Owner, SampleIds
from rankscope_exporter.control.change_sources import ChangeSources
from rankscope_exporter.control.changes import TIMES, ChangeQueue, change_log_of
from rankscope_exporter.control.overhead_controller import OverheadController
from rankscope_exporter.measure.kernels.compiled import KernelWarmUp, warm_up_seconds
from rankscope_exporter.monitors.flight_recorder.poller import FlightRecorderPoller
from rankscope_exporter.monitors.hangs.diagnosis import Diagnosis
from rankscope_exporter.monitors.hangs.watchdog import HangLimits, Watchdog
from rankscope_exporter.monitors.hardware import HardwarePoller, ResourceObserver
from rankscope_exporter.monitors.step_timing import StepTimingObserver, clock_of
from rankscope_exporter.monitors.throughput import Parallel, Throughput
from rankscope_exporter.process import lifecycle
from rankscope_exporter.process.errors import ErrorBoundary, encodable, fault_text
from rankscope_exporter.process.identity import resolve_identity
from rankscope_exporter.process.threads import BackgroundWorker
from rankscope_exporter.publish.anomaly_detector import AnomalyDetector, SilentKinds
from rankscope_exporter.publish.console import Console, records_note
from rankscope_exporter.publish.publisher import STALL_SECONDS, Publisher, StepQueue
from rankscope_exporter.publish.rank_server import RankServer
from rankscope_exporter.publish.routes import RankServerSources
from rankscope_exporter.publish.score_frames import StepScores
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_exporter.publish.sinks import Sinks, sink_class
from rankscope_exporter.publish.sinks.memory import Row, rows_of
from rankscope_exporter.publish.spool import SpoolWriter
from rankscope_exporter.records.plan import Finished, Ops, op_notices, rule_notices
from rankscope_exporter.records.record import StepEvents, StepRecord
from rankscope_exporter.training.gradient_hooks import GradientHooks
from rankscope_exporter.training.hooks import Hooks
from rankscope_exporter.training.model_changes import ModelChanges
from rankscope_exporter.training.recorder import Recorder
from rankscope_exporter.training.sampling import ActiveQuantities
from rankscope_exporter.training.sampling_config import Part, SamplingConfig, selected_parts
from rankscope_exporter.training.step_tracker import CurrentStep, StepTracker

CATCH_UP_SECONDS: Final = 1.0
"""Longest time in seconds that `Session.current` waits until the publisher thread has read the last step.

Reading a step normally takes milliseconds.
"""

PUBLISH_SECONDS: Final = 60.0
"""Time limit in seconds for publishing the last records at the end of a training.

Publishing them normally takes milliseconds, and longer only if the disk or the machine is slow. Records that are not
published by then are counted as lost.
"""

STOP_PUBLISH_SECONDS: Final = 2.5
"""The same limit if a signal has requested the end. The sender of a signal usually kills the process soon."""

REACTION_SECONDS: Final = 3.0
"""Smallest time limit in seconds for the last reading of collectives and for the last calls of `on_anomaly`."""

PATIENCE_SECONDS: Final = 1.0
"""Time in seconds of publishing the last records after which the console names the time limit."""

ONE_TIME_COSTS: Final = ("attach", "warm_up")
"""Parts of the CPU time of the monitor that are spent only once, at the beginning.

The overhead controller ignores them, because a longer sampling interval does not reduce them.
"""


class Notices:
    """Publishes notices for the user: on the console, and as events of type `note`."""

    def __init__(self, console: Console, identity: Identity, current: CurrentStep) -> None:
        self._console = console
        self._identity = identity
        self._current = current
        self._published: set[str] = set()

    def say(self, message: str) -> None:
        self._console.line(f"rank {self._identity.rank}: {message}")

    def tell(self, message: str) -> None:
        """Print a line on the console and publish it as an event of type `note`."""
        self.say(message)
        text = encodable(message)
        self._current.publish_event(Event(type=EventType.NOTE, severity=Severity.WARNING, message=text))

    def registered(self, config: MonitorConfig, attempt: int, first_step: int) -> None:
        """Print on rank 0 that the service has accepted the rank; of a restart, its first step and the new rules."""
        if self._identity.rank == 0:
            values = {rule.name: getattr(rule, "after_values", getattr(rule, "fewest", 0)) for rule in config.rules}
            first = ", ".join(f"{name} from value {number + 1}" for name, number in values.items() if number)
            rules = f"; rules begin again without earlier values: {first}" if first else ""
            again = f" as attempt {attempt}, with steps from {first_step} on (first_step){rules}" if attempt else ""
            self._console.line(f"registered with service {config.serve.ingest_url}{again}")

    def uncommitted(self, records: int, spool: SpoolWriter | None, config: ServeConfig) -> None:
        """Print the folder with the records that no service has committed. Only one rank of a host prints the folder.

        If some of them are in no file, print that they are lost with the process.
        """
        lost = records if spool is None else spool.unwritten
        if config.ingest_url:
            lost = min(lost, records)
        if lost and (config.ingest_url or config.spool_dir):
            self.say(f"{lost} records are lost with this process: they are in no file")
        if spool is not None and spool.files.records and self._identity.local_rank == 0:
            for line in records_note(spool.root, spool.files.records):
                self._console.line(line)

    def time_spent(self, seconds: Mapping[str, float]) -> None:
        """Print on rank 0 where the time of its steps went: the share of each phase in `seconds`."""
        shares = shares_text(seconds) if self._identity.rank == 0 else ""
        if shares:
            self._console.line(f"step time of rank 0: {shares}")

    def fault(self, where: str, error: BaseException) -> None:
        """Publish an error inside the monitor as an event; called once for each operation `where` and type of error."""
        text = encodable(fault_text(where, error))
        self._current.publish_event(Event(type=EventType.FAULT, severity=Severity.WARNING, message=text))

    def about(self, config: MonitorConfig, rules: Sequence[AnomalyRule], published: Mapping[str, Ops]) -> None:
        """Publish the notices about a configuration, each only once.

        A notice is about a setting without an effect, or about a rule that reads a statistic which is not published.
        """
        options = [
            (f"options.{name}.", table["ops"]) for name, table in config.options.items() if table.get("ops") is not None
        ]
        sentences = [*config.remarks]
        sentences += [f"{where}{text}" for where, names in [("", config.ops), *options] for text in op_notices(names)]
        left_out = {rule.name for rule in RANK_RULES} - {rule.name for rule in rules}
        if rules and left_out and self._identity.rank == 0:
            sentences.append(
                f'rules replaces the default rules {", ".join(sorted(left_out))}: add "default" to keep them'
            )
        for sentence in (*sentences, *rule_notices(rules, published)):
            if sentence not in self._published:
                self._published.add(sentence)
                self.tell(sentence)


@dataclass(eq=False, kw_only=True)
class Session:
    """Builds the parts of the monitor for one model, and connects them by constructor arguments.

    A part is built after the parts that it uses. If it must use a part that is built later, it receives a bound method
    of the session instead, and calls this method only after `start`. `Monitor` starts and stops the session and catches
    its errors.
    """

    monitored: MonitoredModel
    config: MonitorConfig
    boundary: ErrorBoundary
    first_step: int
    planned_steps: int | None
    owner: weakref.ref[Owner]
    parallel: Parallel

    def __post_init__(self) -> None:
        monitored, config, boundary = self.monitored, self.config, self.boundary
        self.attach_seconds = 0.0
        """CPU seconds of attach() on the thread that called it."""
        self.identity = identity = resolve_identity(os.environ, config.run, default_group())
        self.console = Console(identity.rank, enabled=config.console)
        self._device = monitored.device  # reads all parameters
        self._build_quantities()
        self.steps = StepQueue()
        self.current_step = CurrentStep(self.steps.put, self.steps.is_due.set)
        self.notices = Notices(self.console, identity, self.current_step)
        self._build_serving()
        self._build_observers()
        self._build_changes()
        self._build_training()
        classes = [sink_class(name) for name in config.sinks]
        self.sinks = Sinks([cls(config.options_of_sink(cls), identity) for cls in classes], boundary)
        self.publisher = Publisher(
            steps=self.steps,
            backlog=self.active_quantities.backlog,
            detector=AnomalyDetector(config.rules, tell=self.notices.tell),
            scores=StepScores(config.rules, tell=self.notices.tell),
            boundary=boundary,
            events=self.events,
            publish=self.channel.publish,
            sinks=self.sinks,
            flush_idle=self.recorder.flush_idle,
            silent_kinds=SilentKinds(self.notices.tell),
            pp_stage=monitored.framework.pp_stage,
            has_chunks=len(monitored.framework.chunks) > 1,
            queries=others_may_capture,
        )
        self._announce_kinds()
        boundary.on_first = self.notices.fault

    def _build_quantities(self) -> None:
        """Build the configured quantities; none if there is a switch file, which then selects the quantities."""
        monitored, config, rank = self.monitored, self.config, self.identity.rank
        captured: list[Part] = []
        if config.capture is not None:
            of_captures = replace(config, capture=None, **config.capture.settings(config.options))
            captured = selected_parts(monitored, of_captures, rank, ignore_start=True)
        self.active_quantities = ActiveQuantities(
            [] if config.switch_file is not None else selected_parts(monitored, config, rank),
            captured,
            device=self._device,
            boundary=self.boundary,
            zero_below=config.zero_below,
            compiled=config.statistics == "auto",
        )

    def _build_serving(self) -> None:
        """Build the server, and the watchdog, which detects hangs and reports them through the server."""
        config, boundary = self.config, self.boundary
        self.channel = RankServer(
            identity=self.identity,
            config=config.serve,
            rules=config.rules,
            settings={**public_settings(config), "device": str(self._device)},
            planned_steps=self.planned_steps,
            boundary=boundary,
            sources=RankServerSources(
                take_stacks=lambda: self.diagnosis.take("request").document(self.identity.rank),
                change_sampling=lambda document: self.change_sources.request(document),  # noqa: PLW0108 - built later
                sampling_state=self.sampling_state,
                queued=lambda: self.publisher.queued + self.recorder.holds_an_update,
                stretch=lambda: self.overhead_controller.stretch,
                collectives=lambda: self.collectives.totals(),  # noqa: PLW0108 - built later
                overhead=self.overhead_seconds,
                dropped=self._dropped,
                on_registered=lambda attempt: self.notices.registered(config, attempt, self.first_step),
            ),
        )
        self.diagnosis = Diagnosis(self.identity.rank, self.channel.publish, lambda: self.channel.step, boundary)
        self.watchdog = Watchdog(
            limits=HangLimits(training=config.hang_after_seconds, in_phase=config.hang_in_phase_after_seconds),
            stack_signal=config.stacks_signal,
            diagnosis=self.diagnosis,
            boundary=boundary,
            progress=lambda: (self.channel.step, self.channel.phase),
            planned_steps=self.planned_steps,
            print_line=self.console.line,
        )

    def _build_observers(self) -> None:
        """Build the observers that run at every step, sampled or not, and the hardware poller.

        They do little work on the training thread. Other threads do the rest of the work.
        """
        config, boundary, device, framework = self.config, self.boundary, self._device, self.monitored.framework
        is_first, tell = self.identity.rank == 0, self.notices.tell
        self.throughput = Throughput(
            framework, config.throughput, self.parallel, device=device, report=tell, is_first=is_first
        )
        self.phases = StepTimingObserver(
            clock_of(device),
            framework.traits,
            self.steps.put,
            has_optimizer=bool(self.monitored.optimizers),
            report=boundary.report,
            times_steps=config.phases,
        )
        self.collectives = FlightRecorderPoller(config.collectives_share, self.channel.publish, boundary)
        self.hardware = HardwarePoller(device, config.hardware.every_seconds, self.steps.put, boundary)

    def _build_changes(self) -> None:
        """Build the objects that change which quantities are measured, and how often, during training."""
        config, identity, boundary = self.config, self.identity, self.boundary
        self.change_queue = ChangeQueue(
            active_quantities=self.active_quantities,
            sampling=SamplingConfig(on=config.switch_file is None, config=config),
            first_step=self.first_step,
            boundary=boundary,
            changed=self._sampling_changed,
            record=self.current_step.add_event,
        )
        self.change_sources = ChangeSources(
            base=config,
            change_queue=self.change_queue,
            parts=lambda changed: selected_parts(self.monitored, changed, identity.rank, ignore_start=True),
            tell=self.notices.tell,
            change_log=change_log_of(identity, lambda: self.change_queue.pace, config.switch_poll_seconds),
        )
        owner = self.owner()
        has_callback = owner is not None and owner.on_anomaly is not None
        self.batches = SampleIds(are_read=config.capture is not None or has_callback)
        self.callbacks = AnomalyCallback(self.owner, identity, self.batches, boundary)
        self.overhead_controller = OverheadController(
            max_overhead=config.max_overhead,
            sources=self.change_sources,
            identity=identity,
            cost=lambda: sum(cost for part, cost in self.overhead().items() if part not in ONE_TIME_COSTS),
            say=self.notices.say,
        )
        self.captures = CaptureController(
            config=config.capture,
            sources=self.change_sources,
            batches=self.batches,
            worker=BackgroundWorker("capture", boundary),
            rank=identity.rank,
            record=self.current_step.publish_event,
            take_flight_record=self.diagnosis.take_flight,
            changed=self._capture_changed,
        )

    def _build_training(self) -> None:
        """Build the hooks on the model, the recorder of steps, and the observers that hooks and recorder notify."""
        monitored, config, boundary = self.monitored, self.config, self.boundary
        team = IntraOpThreads()
        if self._device.type == "cpu":
            boundary.call("threads of torch", team.find)
        gradients = GradientHooks(monitored)
        use_compiled = self.active_quantities.table.statistics.use_compiled
        is_compiled_later = config.statistics == "auto" and self._device.type == "cuda"
        observers = (
            *(self.throughput, self.phases, self.collectives, self.console),
            *([self.overhead_controller] if config.max_overhead is not None else []),
            *([self.captures] if config.capture is not None else []),
            *([self.batches] if self.batches.are_read else []),
            self.callbacks,
            self.change_queue,  # after the observers that request changes for the same step
            *([KernelWarmUp(self._device, use_compiled)] if is_compiled_later else []),
            ModelChanges(
                monitored, self.notices.tell
            ),  # finds parameters under new names before their hooks are registered
            gradients,
            ResourceObserver(self._device, self.overhead, lambda: self.overhead_controller.stretch),
        )
        self.events = StepEvents(boundary, observers)
        has_optimizer, is_explicit = bool(monitored.optimizers), config.steps == "explicit"
        tracker = StepTracker(self.first_step, has_optimizer=has_optimizer, explicit=is_explicit)
        self.recorder = Recorder(
            monitored=monitored,
            active_quantities=self.active_quantities,
            current=self.current_step,
            events=self.events,
            note=self.phases.note,
            team=team,
            tracker=tracker,
            gradients=gradients,
            boundary=boundary,
        )
        self.hooks = Hooks(self.recorder, tell=self.notices.tell, watchdog=self.watchdog)

    def start(self, owner: object = None) -> str:
        """Start the server and the publisher, install the hooks, and return the address of the server.

        The hooks of the model hold `owner`. Nothing else in the session does.

        These three parts are required: if one fails, the others are stopped and the error is raised. All other parts
        are optional: if an optional part cannot start, this is reported, and the session runs without it.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.boundary.call, "undoing attach()", self.channel.close)
            address = self.channel.start()
            undo.callback(self.boundary.call, "undoing attach()", self.publisher.stop, 1.0)
            self.publisher.start()
            undo.callback(self.boundary.call, "undoing attach()", self.hooks.remove)
            self.hooks.install(self.active_quantities, owner)
            undo.pop_all()
        self.boundary.call("starting the watchdog", self.watchdog.start)
        self.boundary.call("starting the hardware thread", self.hardware.start)
        self.boundary.call("publishing notices about the configuration", self._publish_notices)
        self.boundary.call("starting the thread that receives sampling changes", self.change_sources.start)
        return address

    def record_end(self, reason: ExitReason, error: str | None, stop_signal: str | None) -> None:
        """Finish the last step and record the exit event. `stop_signal` names the signal that requested the end."""
        is_cut = reason in {ExitReason.EXCEPTION, ExitReason.SIGNAL}
        last_step = self.boundary.call("end of training", lambda: self.recorder.finish(is_cut=is_cut))
        self.steps.items.put(self.publisher.skipped.finish)
        self.boundary.call("capture", self.captures.finish, self.publisher.catch_up)
        reason, error = lifecycle.weighed_reason(reason, error, last_step, self.planned_steps, stop_signal)
        if reason is ExitReason.EXCEPTION:
            self.notices.say(f"{error}; the last completed step is {'none' if last_step is None else last_step}")
        event = lifecycle.exit_event(reason, error, last_step)
        last = StepRecord.now(self.current_step.last_step, events=[event])
        self.steps.items.put(lambda: self.publisher.publish_exit(last))

    def drain(self, wait_seconds: float, *, is_hurried: bool) -> int:
        """Publish the remaining records, and wait at most `wait_seconds` until the service has committed them.

        Records that were not published, and records that the service has not committed, are reported. Return the number
        of the latter. If the end `is_hurried` by a signal, the time for publishing is part of `wait_seconds`.
        """
        began = time.monotonic()
        limit = STOP_PUBLISH_SECONDS if is_hurried else PUBLISH_SECONDS
        self.boundary.call("detach()", self.collectives.stop, max(REACTION_SECONDS, wait_seconds))
        self.boundary.call("end of training", self._publish_last, limit)
        left_seconds = max(0.0, wait_seconds + began - time.monotonic())
        self.boundary.call("end of training", self.callbacks.stop, max(REACTION_SECONDS, left_seconds))
        self.notices.time_spent(self.phases.step_seconds)
        left = self.channel.drain(left_seconds if is_hurried else wait_seconds)
        if left and self.channel.service_url:
            self.notices.say(f"{self.channel.service_url} did not commit {left} of the records in {wait_seconds:g} s")
        if left:
            if self.channel.spool is not None:
                self.channel.spool.flush(limit)
            self.notices.uncommitted(left, self.channel.spool, self.config.serve)
        return left

    def _publish_last(self, limit_seconds: float) -> None:
        if not self.publisher.stop(min(PATIENCE_SECONDS, limit_seconds)):
            waiting = f"{self.steps.items.qsize():,} records wait to be published"
            self.notices.say(f"{waiting}; the end of training waits for them for at most {limit_seconds:g} s")
            if not self.publisher.stop(limit_seconds - PATIENCE_SECONDS):
                self.publisher.drop_queue(min(limit_seconds, STALL_SECONDS))
        self.console.finish()
        if self.steps.dropped:
            self.notices.say(
                f"{self.steps.dropped:,} records of this rank are lost: the disk or this machine was too slow for them"
            )

    # Sampling.

    def switch(self, document: Mapping[str, Any]) -> None:
        """Change the sampling as `Monitor.switch` requests. Raises ConfigError if a setting is invalid."""
        self.change_sources.call(document)
        with self.current_step.lock:
            self.events.on_update_applied()  # registers the hooks of the change before the next forward pass

    def sampling_state(self) -> dict[str, Any]:
        """Return the present sampling configuration, its first step, and pending changes, for the HTTP path /config."""
        return {**self.change_queue.state(), **self.overhead_controller.state(), **self.captures.state()}

    def _sampling_changed(self, source: str, step: int) -> None:
        if source != TIMES:
            self._announce_kinds()
            self._publish_notices()
        self.overhead_controller.window.restart(1)  # the cost of the new configuration is unknown
        self.boundary.call("switching", self.captures.sampling_changed, step)

    def _capture_changed(self) -> None:
        self.overhead_controller.window.restart()  # the cost of a capture does not count against max_overhead
        self._announce_kinds()

    def _announce_kinds(self) -> None:
        self.channel.latest.announce(sorted(self.active_quantities.published()))

    def _publish_notices(self) -> None:
        self.notices.about(self.change_queue.sampling.config, self.config.rules, self.active_quantities.published())

    # Records and state.

    def current(self, kinds: tuple[str, ...]) -> tuple[Row, ...]:
        """Return the rows of statistics of the step in progress.

        If it has no rows yet, return those of the last published step. `kinds` are the kinds of tensors to return; all
        kinds if empty.

        This method waits for the device. No other method of the session does.
        """
        rows: tuple[Row, ...] = ()
        with self.current_step.lock:
            step = self.current_step.pending
            if step is not None and step.step is not None and step.sampled:
                rows = tuple(_open_rows(step.step, *self.active_quantities.peek(), kinds))
        if not rows:
            self.publisher.catch_up(CATCH_UP_SECONDS)
            records = reversed(self.channel.ring.after(-1, 1 << 62).records)
            rows = next((found for record in records if (found := tuple(rows_of(record, kinds)))), ())
        return rows

    def overhead_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of the monitor by part, without the threads of the server."""
        return {
            "attach": self.attach_seconds,
            "hooks": self.hooks.cpu_seconds,
            "intra_op": self.hooks.team.seconds,
            "warm_up": warm_up_seconds(self._device),
            "publisher": self.publisher.cpu_seconds,
            "watchdog": self.watchdog.thread.cpu_seconds,
            "switch": self.change_sources.thread.cpu_seconds,
            "hardware": self.hardware.thread.cpu_seconds,
            "collectives": self.collectives.thread.cpu_seconds,
        }

    def overhead(self) -> dict[str, float]:
        return {**self.overhead_seconds(), **self.channel.meter.totals()}

    def _dropped(self) -> dict[str, int]:
        return {
            "publisher_behind": self.active_quantities.unsampled + self.steps.dropped,
            "events_per_step": self.publisher.events_left_out,
            "plan_full": self.active_quantities.table.left_out,
            "collectives_overrun": self.collectives.overwritten,
            "phases_late": self.phases.left_out,
            "on_anomaly": self.callbacks.dropped,
            "capture_events": self.captures.worker.dropped,
            **self.sinks.missed,
        }


def _open_rows(step: int, entries: Sequence[PlanEntry], finished: Finished, kinds: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of statistics of a step that has not been published yet.

    `kinds` are the kinds of tensors to return; all kinds if empty.
    """
    values, counts = finished.values.tolist(), finished.counts.tolist()
    for position, is_present in enumerate(finished.present.tolist()):
        entry = entries[position]
        if is_present and (not kinds or entry.kind in kinds):
            row = {
                op: None if math.isnan(of[position]) else of[position] for op, of in zip(VALUE_OPS, values, strict=True)
            }
            yield Row(step, entry, row | {op: of[position] for op, of in zip(COUNT_OPS, counts, strict=True)})
