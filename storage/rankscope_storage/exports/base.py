"""What an exporter is: it writes one run of a store in the format of another tool.

An exporter is a module of this package that defines `EXPORTER`; `rankscope export --format` offers it under its name.
It reads through a steady connection, streams (a run may be larger than memory), and never leaves a half-written file
under the name that was asked for.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from rankscope_contract.msprobe.families import FAMILIES, FEATURE_FAMILIES, family_names
from rankscope_storage.connection import Connection
from rankscope_storage.errors import ExportError

MAX_STEPS_PER_RECORD: Final = 1_000_000

Progress = Callable[[int, int], None]
"""Called now and then with rows written and rows in all."""


def silent(_done: int, _total: int) -> None:
    """Take progress and say nothing."""


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that takes rows just written, and tells `progress` of all so far."""
    done = 0

    def written(rows: int) -> None:
        nonlocal done
        done += rows
        progress(done, total)

    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What to export, and how. The names are those of the tool whose formats these are; an exporter may ignore some."""

    time_start: dt.datetime | None = None  # closed interval over `ts`; a row without a time is in every one
    time_end: dt.datetime | None = None
    data_type_list: tuple[str, ...] = ()  # families (actv, grad_reduced, …) or kinds of ours; empty: all
    ranks: tuple[int, ...] = ()  # empty: all
    steps: tuple[int, int] | None = None  # closed, in our steps
    attempt: int | None = None  # None: all, where the format can tell them apart; else the latest of each step
    process_num: int = 1
    step_count_per_record: int = 1  # steps in one CSV file, aligned to 0
    seed_rounding: int | None = None  # decimals, as the tool rounds; None: every digit that the value has
    append_output: tuple[str, str] | None = None  # folders of this window (Dec03_21-34-40, …) are continued
    step_partition: int = 500  # steps in one SQLite table

    def __post_init__(self) -> None:
        """Raise ExportError naming what to change."""
        for name in ("time_start", "time_end"):
            moment: dt.datetime | None = getattr(self, name)
            if moment is not None and moment.tzinfo is None:
                raise ExportError(f"{name} {moment} has no time zone: give one, such as +00:00")
        if self.time_start and self.time_end and self.time_start > self.time_end:
            raise ExportError(f"time_start {self.time_start} is after time_end {self.time_end}: exchange them")
        if self.steps and self.steps[0] > self.steps[1]:
            raise ExportError(f"steps {self.steps[0]}:{self.steps[1]} end before they begin: exchange them")
        if not 1 <= self.step_count_per_record <= MAX_STEPS_PER_RECORD:
            raise ExportError(f"step_count_per_record must be 1 to {MAX_STEPS_PER_RECORD:,}")
        for name in ("process_num", "step_partition"):
            if getattr(self, name) < 1:
                raise ExportError(f"{name} must be 1 or more")
        if self.seed_rounding is not None and not 0 <= self.seed_rounding <= 17:
            raise ExportError("seed_rounding is a number of decimals, 0 to 17")
        if unknown := [name for name in self.data_type_list if name not in family_names()]:
            raise ExportError(f"no data type is called {unknown[0]!r}: known are {', '.join(sorted(family_names()))}")

    def kinds(self) -> frozenset[str] | None:
        """Return the kinds that `data_type_list` asks for; None when it asks for all."""
        if not self.data_type_list:
            return None
        kinds: set[str] = set()
        for name in self.data_type_list:
            kinds.update(FAMILIES.get(name, ()), FEATURE_FAMILIES.get(name, ()))
            if name not in FAMILIES and name not in FEATURE_FAMILIES:
                kinds.add(name)
        return frozenset(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written. `left_out` counts rows by the reason why the format cannot hold them."""

    files: tuple[Path, ...]
    rows: Mapping[str, int] = field(default_factory=dict)  # by dataset
    left_out: Mapping[str, int] = field(default_factory=dict)


class Exporter(Protocol):
    """Writes one format."""

    name: str
    """As in `rankscope export --format`."""

    help: str
    """One line: what is written, and who reads it."""

    folder: bool
    """Whether the target is a folder; else it is one file."""

    suffix: str
    """What the default target ends in, such as `.db`."""

    def export(
        self, connection: Connection, run: str, target: Path, options: ExportOptions, progress: Progress = silent
    ) -> ExportReport:
        """Write `run` to `target`. Raises ExportError when it cannot be done, and OSError never."""
        ...
