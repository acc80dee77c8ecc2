"""Convert the lines of a log to records, and decide over the first records which counter is the step.

Each importer parses its own lines and returns the objects on them. The module `object_reader` converts these objects to
records. Lines that report a failure become events.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope_ingest.importers.common.decisions import MAX_BYTES, MAX_RECORDS, Dates, decide_dates
from rankscope_ingest.importers.common.failures import FailureLine, FailureLines
from rankscope_ingest.importers.common.forms import Form, Forms, Match
from rankscope_ingest.importers.common.importer import (
    FROM_LOG,
    SETTLED_SECONDS,
    BlockBuilder,
    Checkpoint,
    Faults,
    Imported,
)
from rankscope_ingest.importers.common.lines import (
    MAX_LINE_BYTES,
    LogLines,
    is_settled,
    prefix_fields,
    sample_lines,
    without_colours,
)
from rankscope_ingest.importers.common.object_reader import ObjectReader
from rankscope_ingest.importers.common.records import Record
from rankscope_ingest.importers.common.values import FORM, micros

MAX_WAITING: Final = 10_000
"""Maximum number of failures that wait for the decision. Twice this number is the maximum of objects and failures."""


class LineParser:
    """Parses the lines of one log in order. Its attributes are all of its state between two lines.

    Only the learned forms of lines are no state: without them, a log is read in the same way, but slower.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.forms: Forms[Form] = Forms()
        self.counts: dict[str, int] = {}
        """Numbers of lines by kind, which are stored with the run."""

    def documents(self, number: int, line: bytes) -> Sequence[Mapping[str, Any]]:
        """Return the objects on a line with its number, from 1. Unreadable lines are added to the faults of the log."""
        raise NotImplementedError

    def match(self, line: bytes) -> Match | None:
        """Return the form of a line that has one object and no other effects than those of its form, or None."""

    @property
    def given(self) -> Mapping[str, Any]:
        """The values in objects of learned forms that the lines do not contain."""
        return {}

    def after(self, match: Match, line: bytes, count: int) -> None:
        """Take over the effects of `count` lines of a learned form. `line` is the last one, with the form `match`."""


def read_log(path: Path, faults: Faults, parser: LineParser, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Imported]:
    """Yield blocks of the records in a text log, then the facts about the run.

    A line of more than `max_bytes` bytes is skipped. The step and the loss are decided over the first records;
    `faults.choices` contains the decision of an earlier import, if there is one, and later the decision about this log.
    """
    records = faults.reader or _LogRecords(faults, parser)
    records.begin(path)
    objects, failures, builder = records.objects, records.failures, records.builder
    torn: Checkpoint | None = None
    lines = LogLines(path, faults, max_bytes=max_bytes, begin=(faults.read_bytes, faults.lines))
    for number, line in lines:
        if faults.is_torn and records.is_final:
            if block := builder.take():
                yield block
            yield (torn := records.checkpoint(faults.line_start, number - 1))
        match = records.parser.match(line)
        if match is None or not records.add_run(match, line, lines):
            records.line(number, line, match)
        if builder.is_full and (block := builder.take()):
            yield block
    records.decide()
    if torn is None or torn.lines < faults.lines - 1:
        if block := builder.take():
            yield block
        if not faults.is_torn:
            yield records.checkpoint(faults.read_bytes, faults.lines)
        elif records.is_final:
            yield records.checkpoint(faults.line_start, faults.lines - 1)
    if time.time() - path.stat().st_mtime > SETTLED_SECONDS:  # otherwise, the row that they wait for may follow
        objects.add_starts(builder)
    if block := builder.take():
        yield block
    faults.notes += objects.choices.notes()
    faults.notes += (
        f"{contradiction} ({count:,} records): --reimport decides again"
        for contradiction, count in objects.contradictions.items()
    )
    faults.revised = objects.revised()
    if objects.are_writers_interleaved:
        faults.notes.append(
            "records of several writers alternate: each writer is an attempt; the last is shown by default"
        )
    if objects.nulls:
        run = objects.run({"lines": faults.lines, **records.parser.counts})
        state, reason = (run.state, run.reason) if run.state or not failures.ending else failures.ending
        yield dataclasses.replace(run, state=state, reason=reason)


class _LogRecords:
    """Adds the records and the failures of a log to blocks, in the order of their lines.

    The first ones wait until the step and the loss are decided over 2,000 rows or the first megabyte from the first row
    on. A row is an object with a number. Text and events before the first row have no influence on the decision.
    """

    def __init__(self, faults: Faults, parser: LineParser) -> None:
        self.objects = ObjectReader(faults)
        self.failures = FailureLines()
        self.builder = BlockBuilder()
        self.parser = parser
        self.is_final = False
        """True if the step and the loss are decided over enough records, or cannot be decided again."""
        self._faults = faults
        self._waiting: list[tuple[int, Record | FailureLine, Match | None]] = []
        self._waiting_failures: set[tuple[str, int | None]] = set()  # keys, since the last object
        self._rows = 0  # number of rows that wait
        self._first_byte = 0  # position behind the line of the first row, or of an object before it
        self._is_decided = False
        self._held: list[tuple[int, FailureLine]] = []  # of the last line, which may be incomplete

    def begin(self, path: Path) -> None:
        """Read the next lines from the file at `path`."""
        self._path = path
        self._is_settled = is_settled(path)
        self.is_final = self._is_decided

    def __getstate__(self) -> dict[str, Any]:
        """Return the state between two lines, without facts about the file."""
        state = {name: value for name, value in vars(self).items() if name not in {"_path", "_is_settled"}}
        return state | {"_waiting": [(number, item, None) for number, item, _ in self._waiting]}

    def checkpoint(self, offset: int, lines: int) -> Checkpoint:
        """Return the present state as that behind the first `lines` lines of the file, of `offset` bytes."""
        return Checkpoint(reader=self, offset=offset, lines=lines, is_final=self.is_final)

    def add_run(self, match: Match, line: bytes, lines: LogLines) -> bool:
        """Add `line` and the next lines of the same form, if they are rows of a known layout. Return whether they are.

        `match` is the form of `line`, behind which `lines` continues.
        """
        form, texts = match
        layout = self.objects.layouts.get(form)
        is_bar = b"it/s" in line or b"s/it" in line  # the text of a failure may follow a progress bar on its line
        if (
            layout is None
            or not self._is_decided
            or self._held
            or self.failures.ending
            or (is_bar and self.failures.is_possible(line))
        ):
            return False
        more, text = lines.matching(form.expression)
        cells, given = (*texts, *more), self.parser.given
        columns, rows = [cells[slot :: len(texts)] for slot in range(len(texts))], range(0, len(cells), len(texts))
        if not self.objects.add_rows(layout, columns, self.builder, given=given):
            for place in rows:
                row = cells[place : place + len(texts)]
                self.objects.add(form.values(row, given), self.builder, match=(form, row))
        last = text[text.rfind(b"\n", 0, -1) + 1 :].rstrip(b"\r\n") if text else line
        self.parser.after((form, cells[-len(texts) :]), last, len(rows))
        return True

    def line(self, number: int, line: bytes, match: Match | None) -> None:
        """Add the objects and the failures on the line `number`; its form is known if `match` is not None."""
        if self._held:
            self._add_failures(self._held)  # another line follows, so the line before is complete
            self._held = []
        if match is None:
            documents = self.parser.documents(number, line)
        else:
            documents = (match[0].values(match[1], self.parser.given),)
            self.parser.after(match, line, 1)
        has_objects = False
        for document in documents:
            has_objects = True
            if not self._is_decided:
                self._wait(number, document, match)
                continue
            self.objects.line = number
            self.objects.add(document, self.builder, match=match)
            self._continue()
        # The text of a failure may follow a progress bar on its line.
        if (not has_objects or b"it/s" in line or b"s/it" in line) and self.failures.is_possible(line):
            found = [(number, failure) for failure in self._failures_on(line)]
            if self._faults.is_torn and not self._is_settled:
                self._held = found
            else:
                self._add_failures(found)
        if self._waiting and self._first_byte and self._faults.read_bytes - self._first_byte >= MAX_BYTES:
            self._end_waiting()

    def _wait(self, number: int, document: Mapping[str, Any], match: Match | None) -> None:
        record = self.objects.record(document)
        is_first_row = record.is_row() and not self._rows
        self._first_byte = self._faults.read_bytes if is_first_row or not self._first_byte else self._first_byte
        self._rows += record.is_row()
        self._waiting.append((number, record, match))
        self._waiting_failures.clear()
        if self._rows >= MAX_RECORDS or len(self._waiting) >= 2 * MAX_WAITING:
            self._end_waiting()

    def _end_waiting(self) -> None:
        """Decide if a row waits. Otherwise, add the objects that wait, and wait for the first row."""
        if self._rows:
            self.decide()
            self.is_final = True
        else:
            self._first_byte = 0
            self._add_waiting()

    def decide(self) -> None:
        """Decide the step and the loss if they are not decided yet, and add all records that wait."""
        if not self._is_decided:
            rows = [record for _, record, _ in self._waiting if isinstance(record, Record)]
            loss, dates = self._faults.options.loss, self._dates()
            self.objects.choose(rows, loss=loss, dates=dates)
            self._faults.choices = self.objects.choices
            self._is_decided = True
            self._add_waiting()

    def _dates(self) -> Dates | None:
        """Return the decision about times without a complete date, or None if the waiting lines have none."""
        times = [item.undated if isinstance(item, Record) else item.timestamp for _, item, _ in self._waiting]
        undated = [text for text in times if text and FORM.search(text)]
        if not undated:
            return None
        lines = (line.decode(errors="replace") for line in sample_lines(self._path))
        return decide_dates(undated, lines, changed=self._path.stat().st_mtime, year=self._faults.options.year)

    def _add_waiting(self) -> None:
        for number, item, match in self._waiting:
            if isinstance(item, FailureLine):
                self._add_failure(item)
            else:
                self.objects.line = number
                self.objects.add(item.document, self.builder, record=item, match=match)
                self._continue()
        self._waiting.clear()
        self._waiting_failures.clear()

    def _continue(self) -> None:
        if self.failures.ending and self.objects.progress.has_advanced:
            self.failures.record_seen()

    def _failures_on(self, line: bytes) -> Iterator[FailureLine]:
        """Yield the failures on `line`, without those that wait already: they may be many before the first object."""
        for part in filter(self.failures.is_possible, line.split(b"\r")):
            text = without_colours(part.decode(errors="replace")).strip()
            failure = self.failures.found_in(text, prefix_fields(text))
            if failure and failure.key not in self._waiting_failures:
                yield failure

    def _add_failures(self, found: Iterable[tuple[int, FailureLine]]) -> None:
        for number, failure in found:
            if self._is_decided:
                self._add_failure(failure)
            elif len(self._waiting_failures) < MAX_WAITING:
                self._waiting_failures.add(failure.key)
                self._waiting.append((number, failure, None))

    def _add_failure(self, failure: FailureLine) -> None:
        """Add an event for `failure`, at the step of the last record, unless it has one."""
        if event := self.failures.event(failure):
            self.objects.add_starts(self.builder)
            ts = micros(failure.timestamp)
            if ts is None and failure.timestamp:
                ts, _ = self.objects.clock.moment(failure.timestamp)
            self.builder.record_of_event(rank=failure.rank, ts=ts, origin=FROM_LOG)
            self.builder.event(**event)
