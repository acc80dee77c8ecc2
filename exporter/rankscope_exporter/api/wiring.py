"""Small parts of a session, and the functions that build its larger parts from the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.identity import Identity
from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_contract.model.phases import shares_text
from rankscope_contract.model.schema import PlanEntry
from rankscope_contract.rules import AnomalyRule
from rankscope_contract.rules.curve import RANK_RULES
from rankscope_exporter.adapters.monitored_model import MonitoredModel
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.measure.kernels.compiled import warm_up
from rankscope_exporter.measure.table import Measurement
from rankscope_exporter.process.errors import ErrorBoundary, encodable, fault_text
from rankscope_exporter.publish.console import Console, records_note
from rankscope_exporter.publish.serving_config import ServeConfig
from rankscope_exporter.publish.sinks.memory import Row
from rankscope_exporter.publish.spool import SpoolWriter
from rankscope_exporter.records.record import StepObserver
from rankscope_exporter.records.selection import Finished, Ops, op_notices, rule_notices
from rankscope_exporter.training.sampling import ActiveQuantities
from rankscope_exporter.training.sampling_config import Part, selected_parts
from rankscope_exporter.training.step_tracker import CurrentStep

WARM_UP_AT_STEP: Final = 3
"""The number of a training's steps after which the compiled kernel for statistics on a CUDA device is built.

A script that only inspects its model makes fewer steps, and does not wait for the build.
"""

COMPILED_FROM_STEP: Final = 10
"""The number of a training's steps after which the compiled kernel measures.

The first steps that take 0.1 s or longer leave enough time for a build that the cache of Triton contains.
"""

BUILD_SECONDS: Final = 5.0
"""Longest time in seconds that this step waits for the build.

If the build takes longer, as on a loaded machine, the steps with ten, a hundred times this number try again.
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
        if spool is not None and spool.records and self._identity.local_rank == 0:
            for line in records_note(spool.root, spool.records):
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


class KernelWarmUp(StepObserver):
    """Builds the compiled kernel for a CUDA device, and calls `use` at the step from which on it measures.

    The step depends on the sampling only, and not on the duration of the build unless it exceeds BUILD_SECONDS: the
    compiled kernel and torch operations round differently, and equal trainings must have equal statistics.
    """

    def __init__(self, device: torch.device, use: Callable[[], None]) -> None:
        self._device = device
        self._use = use
        self._steps = 0
        self._try_at = COMPILED_FROM_STEP
        self._is_started = self._is_decided = False

    def on_sampling_decided(self, sampled: bool) -> None:  # noqa: FBT001 - an event has positional arguments
        self._steps += 1
        if not sampled or self._is_decided:
            return
        if not self._is_started and self._steps >= WARM_UP_AT_STEP:
            self._is_started = True
            warm_up(self._device)
        elif self._is_started and self._steps >= self._try_at:
            self._try_at *= 10
            build = warm_up(self._device)
            if build is not None:
                build.join(BUILD_SECONDS)
            if build is None or not build.is_alive():
                self._is_decided = True
                self._use()


def build_active_quantities(
    monitored: MonitoredModel, config: MonitorConfig, rank: int, boundary: ErrorBoundary, device: torch.device
) -> ActiveQuantities:
    """Return the configured quantities; none if there is a switch file, which then selects the quantities.

    `device` is the device of the statistics table.
    """
    captured: list[Part] = []
    if config.capture is not None:
        of_captures = replace(config, capture=None, **config.capture.settings(config.options))
        captured = selected_parts(monitored, of_captures, rank, ignore_start=True)
    return ActiveQuantities(
        [] if config.switch_file is not None else selected_parts(monitored, config, rank),
        captured,
        device=device,
        boundary=boundary,
        measurement=Measurement(config.zero_below, compiled=config.statistics == "auto"),
    )


def open_rows(step: int, entries: Sequence[PlanEntry], finished: Finished, kinds: tuple[str, ...]) -> Iterator[Row]:
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
