"""The composition root: all objects that exist between attach and detach for one monitored model.

`current_rows` returns statistics of the step under way. It waits for the device, which nothing else here does.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.schema import WIRE_VALUE_OPS, PlanEntry
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.api.step_observers import StepObservers
from rankscope_exporter.base.errors import ErrorBoundary, fault_text
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.config.resolve import public_settings
from rankscope_exporter.model.parameter_names import element_count, encodable
from rankscope_exporter.monitors.hangs.diagnosis import Diagnosis
from rankscope_exporter.monitors.hangs.watchdog import HangLimits, Watchdog
from rankscope_exporter.observers.resources import OverheadReporter
from rankscope_exporter.observers.throughput.parameter_counts import ALONE, Parallel
from rankscope_exporter.process.identity import resolve_identity
from rankscope_exporter.publishing.anomaly_detector import AnomalyDetector
from rankscope_exporter.publishing.console import Console, banner
from rankscope_exporter.publishing.publisher import Publisher
from rankscope_exporter.quantities.structure import Structure
from rankscope_exporter.reactions.anomaly_callback import OnAnomaly
from rankscope_exporter.reactions.anomaly_reactions import AnomalyReactions, ReactionDependencies
from rankscope_exporter.reconfiguration.agreement import agreement_of
from rankscope_exporter.reconfiguration.change_queue import ChangeQueue
from rankscope_exporter.reconfiguration.change_sources import ChangeSources
from rankscope_exporter.records.pending_step import PendingStep
from rankscope_exporter.records.step_record import StepRecord
from rankscope_exporter.sampling.active_quantities import ActiveQuantities
from rankscope_exporter.sampling.plan import Measurement
from rankscope_exporter.sampling.sampling_config import SamplingConfig, chosen
from rankscope_exporter.serving.rank_server import RankServer
from rankscope_exporter.serving.ring import Ring
from rankscope_exporter.sinks import sink_class
from rankscope_exporter.sinks.base import Sinks
from rankscope_exporter.sinks.memory import Row, rows_of
from rankscope_exporter.statistics import Finished, backend_name, warm_up, warm_up_seconds
from rankscope_exporter.statistics.selection import op_notices, rule_notices
from rankscope_exporter.training.hooks import Hooks
from rankscope_exporter.training.recorder import Recorder
from rankscope_exporter.training.step_tracker import StepTracker

CATCH_UP_SECONDS: Final = 1.0
"""How long is waited for the publisher to have read the last step: milliseconds, unless the machine is overloaded."""


def current_rows(recorder: Recorder, publisher: Publisher, ring: Ring, kinds: tuple[str, ...]) -> tuple[Row, ...]:
    """Return the rows of `kinds` (all without any) that the step under way has so far, else those of the last one."""
    under_way = recorder.look()
    rows = () if under_way is None else tuple(_rows(*under_way, kinds))
    if not rows:
        publisher.catch_up(CATCH_UP_SECONDS)
    return rows or _published(ring, kinds)


def _rows(step: int, entries: Sequence[PlanEntry], finished: Finished, kinds: tuple[str, ...]) -> Iterator[Row]:
    values, counts = finished.values.tolist(), finished.counts.tolist()
    for position, present in enumerate(finished.present.tolist()):
        entry = entries[position]
        if present and (not kinds or entry.kind in kinds):
            told = {op: _known(row[position]) for op, row in zip(VALUE_OPS, values, strict=True)}
            yield Row(step, entry, told | {op: row[position] for op, row in zip(COUNT_OPS, counts, strict=True)})


def _published(ring: Ring, kinds: tuple[str, ...]) -> tuple[Row, ...]:
    for record in reversed(ring.after(-1, 1 << 62).records):
        rows = tuple(rows_of(record, kinds))
        if rows:
            return rows
    return ()


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


log = logging.getLogger("rankscope")

BYTES_PER_ENTRY = 4 * len(WIRE_VALUE_OPS) + 8 * len(COUNT_OPS)
"""What one tensor costs in a record before compression."""

WARM_UP_AT_STEP = 3
"""The compiled kernel is made once training really runs: a script that only looks at its model need not wait for it."""

ONCE = ("attach", "warm_up")
"""What costs CPU time at the beginning alone: no fewer samples would make it less."""


class Session:
    """Builds the parts and connects them; starting, stopping and guarding them is the Monitor's."""

    def __init__(
        self,
        monitored: MonitoredModel,
        config: MonitorConfig,
        boundary: ErrorBoundary,
        *,
        first_step: int,
        total_steps: int | None,
        on_anomaly: OnAnomaly | None = None,
        parallel: Parallel = ALONE,
    ) -> None:
        self.monitored = monitored
        self.config = config
        self._boundary = boundary
        self.identity = resolve_identity(os.environ, config.run)
        device = monitored.device
        self.console = Console(self.identity.rank, enabled=config.console)
        explicit = config.steps == "explicit"
        self._active_quantities = ActiveQuantities(
            [] if config.switch_file is not None else chosen(monitored, config, self.identity.rank),
            device=device,
            boundary=boundary,
            measurement=Measurement(config.zero_below, compiled=config.statistics == "auto"),
        )
        self._book = self._active_quantities.book
        self.recorder = Recorder(
            monitored,
            self._active_quantities,
            self._hand_over,
            boundary=boundary,
            tracker=StepTracker(first_step, has_optimizer=bool(monitored.optimizers), explicit=explicit),
        )
        self.step_observers = StepObservers(
            monitored,
            config,
            boundary,
            device=device,
            parallel=parallel,
            rank=self.identity.rank,
            hand_over=self._hand_over,
            publish=self._send,
            tell=self._tell,
            mention=self._say,
        )
        self.step_observers.follow(self.recorder.step_events)
        self.attach_seconds = 0.0
        """CPU time of what attach() did on the thread that called it."""
        self._is_warm = False
        self._remarked: set[str] = set()
        self.hooks = Hooks(monitored, self.recorder, boundary)
        self.channel = RankServer(
            self.identity,
            config.serve,
            rules=config.rules,
            settings={**public_settings(config), "device": str(device)},
            planned_steps=total_steps,
            on_fault=boundary.report,
            overhead=self.overhead_seconds,
            dropped=self._dropped,
            faults=lambda: boundary.count,
        )
        classes = [sink_class(name) for name in config.sinks]
        self.sinks = Sinks([cls(config.options_of_sink(cls), self.identity) for cls in classes], boundary)
        self.publisher = Publisher(
            self._book,
            AnomalyDetector(config.rules),
            self._publish,
            boundary=boundary,
            on_firing=self._fired,
        )
        self.channel.announce(sorted(self._active_quantities.kinds()))
        self.diagnosis = Diagnosis(self.identity.rank, self.channel.publish, lambda: self.channel.progress()[0], boundary)
        self.watchdog = Watchdog(
            HangLimits(training=config.hang_after_seconds, in_phase=config.hang_in_phase_after_seconds),
            config.stacks_signal,
            self.diagnosis,
            boundary,
            standing=self.channel.progress,
            planned_steps=total_steps,
            say=self.console.line,
        )
        self.change_queue = ChangeQueue(
            self._active_quantities,
            SamplingConfig(on=config.switch_file is None, config=config),
            boundary=boundary,
            first_step=first_step,
        )
        self.change_sources = ChangeSources(
            config,
            self.change_queue,
            lambda changed: chosen(monitored, changed, self.identity.rank, switched=True),
            boundary=boundary,
            tell=self._tell,
            agreement=agreement_of(self.identity, self.change_queue.pace, config.switch_poll_seconds),
            first_step=first_step,
        )
        wired = ReactionDependencies(
            monitored=monitored,
            active_quantities=self._active_quantities,
            recorder=self.recorder,
            change_queue=self.change_queue,
            change_sources=self.change_sources,
            diagnosis=self.diagnosis,
            cost=self._lasting_overhead,
            changed=lambda: self.channel.announce(sorted(self._active_quantities.kinds())),
            say=self._say,
        )
        self.reactions = AnomalyReactions(config, self.identity, boundary, wired, on_anomaly)
        self.recorder.step_events.follow(
            OverheadReporter(self.overhead, lambda: self.reactions.overhead_controller.stretch)
        )
        self._connect()
        boundary.on_first = self._tell_fault

    def _connect(self) -> None:
        """Tell the parts whom they call; nothing runs yet."""
        self.change_queue.on_change = self._measuring_changed
        self.change_queue.resolve_pending = self.change_sources.resolve
        self.recorder.before_step, self.recorder.after_update = self.change_queue.before_step, self.change_queue.ready
        self.channel.take_switch, self.channel.measuring = self.change_sources.request, self.change_queue.state
        self.channel.stretch = lambda: self.reactions.overhead_controller.stretch
        self.hooks.beat = self.watchdog.beat
        self.hooks.tell = self._tell
        self.channel.collectives = self.step_observers.collectives.counts
        self.channel.take_stacks = lambda: self.diagnosis.take("request").document(self.identity.rank)
        self.publisher.published = self.recorder.published
        self.publisher.flush_idle = self.recorder.flush_idle
        self.publisher.finished = self.sinks.close
        self.publisher.pp_stage = self.monitored.framework.pp_stage
        self.publisher.has_chunks = len(self.monitored.framework.chunks) > 1
        self.recorder.on_open, self.recorder.on_rest = self._step_opens, self.hooks.rest

    def start(self) -> str:
        """Listen, publish, hook; return the address.

        These three are needed: where one fails, the others are stopped again and the error is raised. All other parts
        are optional: one that does not start is reported, and the session runs without it.
        """
        undo: list[Callable[[], Any]] = [self.channel.close]
        try:
            address = self.channel.start()
            undo.append(lambda: self.publisher.stop(1.0))
            self.publisher.start()
            undo.append(self.hooks.remove)
            self.hooks.install()
        except BaseException:
            for step in reversed(undo):
                self._boundary.call("undoing attach()", step)
            raise
        self._boundary.call("starting the watchdog", self.watchdog.start)
        self.step_observers.start(self.hooks)
        self._boundary.call("remarks on the configuration", self._publish_notices, self.config)
        self._boundary.call("starting the switch thread", self.change_sources.start)
        return address

    def switch(self, document: Mapping[str, Any]) -> None:
        """Change what is measured because the script says so. Raises ConfigError."""
        self.change_sources.call(document)
        self.recorder.between(self.change_queue.ready)

    def print_banner(self, address: str) -> None:
        """Tell on rank 0 what is monitored, what it costs, and who reads it."""
        if self.identity.rank != 0:
            return
        entries = len(self._book)
        parameters = self.monitored.parameters
        lines = banner(
            run=self.identity.run,
            world_size=self.identity.world_size,
            what=self._what(),
            tensors=len(parameters),
            elements=element_count(parameters),
            series=entries * 2,
            bytes_per_step=entries * BYTES_PER_ENTRY,
            every=self.config.every,
            backend=backend_name(coming=self.config.statistics == "auto"),
            address=address,
            service=self.channel.service_url,
        )
        for line in (*lines, *filter(None, [self.watchdog.signal_note()])):
            self.console.line(line)

    def overhead_seconds(self) -> dict[str, float]:
        """Return CPU seconds by who spent them; the serving threads count for themselves."""
        return {
            "attach": self.attach_seconds,
            "hooks": self.hooks.clock.cpu_seconds,
            "intra_op": self.hooks.clock.team.seconds,
            "warm_up": warm_up_seconds(),
            "publisher": self.publisher.cpu_seconds,
            "watchdog": self.watchdog.cpu_seconds,
            "switch": self.change_sources.cpu_seconds,
            **self.step_observers.overhead_seconds(),
        }

    def _what(self) -> str:
        if self.config.switch_file is not None:
            return f"measuring as {self.config.switch_file} says; nothing yet"
        return ", ".join(name.replace("_", " ") for name in self.config.quantities)

    def _dropped(self) -> dict[str, int]:
        return {
            "publisher_behind": self._active_quantities.unsampled + self.publisher.dropped,
            "events_per_step": self.publisher.events_left_out,
            "plan_full": self._book.left_out,
            **self.step_observers.left_out(),
            **self.reactions.dropped(),
            **self.sinks.missed,
        }

    def overhead(self) -> dict[str, float]:
        """Return CPU seconds by who spent them, the serving threads included."""
        return {**self.overhead_seconds(), **self.channel.overhead_seconds()}

    def _lasting_overhead(self) -> float:
        """Return the CPU seconds of all that goes on, and not only once."""
        return sum(seconds for who, seconds in self.overhead().items() if who not in ONCE)

    def _fired(self, step: int | None, anomalies: Sequence[Event]) -> None:
        self._boundary.call("the console", self.console.firing, step, anomalies)
        self.reactions.fired(step, anomalies)

    def _hand_over(self, pending_step: PendingStep) -> None:
        self.publisher.put(pending_step)

    def _send(self, record: StepRecord) -> None:
        self.channel.publish(record)

    def _publish(self, record: StepRecord) -> None:
        self._boundary.call("publishing a record", self._send, record)
        self.sinks.put(record)

    def _step_opens(self, attempt: int) -> None:
        if attempt >= WARM_UP_AT_STEP and not self._is_warm and self.config.statistics == "auto":
            self._is_warm = True
            warm_up()
        self.hooks.look_again()

    def _measuring_changed(self) -> None:
        self.channel.announce(sorted(self._active_quantities.kinds()))
        self._publish_notices(self.change_queue.measuring.config)

    def _publish_notices(self, config: MonitorConfig) -> None:
        """Say once what is asked for and not done, chosen without an effect, and which rules miss what is left out."""
        own = [
            (f"options.{name}.", table["ops"]) for name, table in config.options.items() if table.get("ops") is not None
        ]
        told = [*config.remarks]
        told += [f"{where}{text}" for where, names in [("", config.ops), *own] for text in op_notices(names)]
        for sentence in (*told, *rule_notices(self.config.rules, self._active_quantities.published())):
            if sentence not in self._remarked:
                self._remarked.add(sentence)
                self._tell(sentence)

    def current(self, kinds: tuple[str, ...]) -> tuple[Row, ...]:
        """Return the rows of `kinds` of the step under way, else of the last one; waits for the device."""
        return current_rows(self.recorder, self.publisher, self.channel.ring, kinds)

    def structure(self) -> str:
        """Return the structure of the model in words, empty until it was seen."""
        quantity = self._active_quantities.quantity(Structure.name)
        return quantity.text if isinstance(quantity, Structure) else ""

    def _say(self, message: str) -> None:
        self.console.line(f"rank {self.identity.rank}: {message}")

    def _tell(self, message: str) -> None:
        self._say(message)
        note = Event(type=EventType.NOTE, severity=Severity.WARNING, message=encodable(message))
        self.recorder.event(note)

    def _tell_fault(self, where: str, error: BaseException) -> None:
        text = encodable(fault_text(where, error))
        self.recorder.event(Event(type=EventType.FAULT, severity=Severity.WARNING, message=text))
