"""The table of imported logs: `cases/FORMAT.txt` has texts of logs, each with everything that its import stores.

A case of the format FORMAT begins with a line `%% NAME`. The next blocks are its files, and the last one the result:
    %> log loss.jsonl                 a file to import; without a name it is train.log
    {"step": <1..3>, "loss": NaN}
    %> rows
    <1..3>: loss nan
    event <1..3> anomaly AnomalyNan critical loss: AnomalyNan: loss is nan
To add a case, write its log and `%> rows`; the failing test prints the result, of which each line has to be checked
against the log. These are the other blocks:
    %> file NAME                      a file that is only written; it replaces an earlier one of the same name
    %> move NAME NEW
    %> import NAME                    imports a file or folder
    %> events NAME                    an event file of TensorBoard: lines `STEP TAG = VALUE` or `STEP restart`
The program of an event file has ended unless `--changed ''` follows. A name may be followed by `--forced` (the format
is given, not detected), `--changed TIME` (of the file), and `--loss`, `--year` and `--pattern` as in the command. The
block `rows` shows more with the words `labels` (units and labels), `details` (of events), `config` and `attempts`.
A line with `<1..9>`, or `<10..90/10>` in steps of 10, means nine lines, and `<x9>` nine equal lines. ␀ ␉ ␍ ␛ are
control characters, and a log that ends with ␄ has no last line end. The result has a line per record: step, rank,
attempt and time, and the scalars by name; `-` is no step. Events, facts of the run that are not the usual ones, lines
that are no records, unreadable lines, messages, and the number of new rows of each of several imports follow.
"""

import datetime as dt
import itertools
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS
from rankscope_ingest.base.errors import IngestError
from rankscope_ingest.importers import NO_END, ImportReport, LogGroup, Options, find_importer, import_records, importers
from rankscope_storage.api.store import Store
from rankscope_storage.connection import Connection, connect

FOLDER = Path(__file__).parent / "cases"
CONTROLS = str.maketrans({"␀": "\0", "␉": "\t", "␍": "\r", "␛": "\x1b"})
PICTURES = {ord(control): chr(picture) for picture, control in CONTROLS.items()}
RANGE = re.compile(r"<(\d+)\.\.(\d+)(?:/(\d+))?>|<x(\d+)>")
TABLES = ("scalars", "tensor_stats", "samples", "events", "runs", "attempts")
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass
class Case:
    kind: str
    name: str
    blocks: list[tuple[list[str], list[str]]] = field(default_factory=list)
    """The words of each heading and the lines below it."""

    @property
    def expected(self) -> str:
        return "\n".join(expanded(line for line in self.blocks[-1][1] if line))

    @property
    def shown(self) -> list[str]:
        return self.blocks[-1][0]


def expanded(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    """Yield the lines that each line with ranges means."""
    for line in lines:
        ranges = [
            range(int(first), int(last) + 1, int(step or 1)) if not times else ("",) * int(times)
            for first, last, step, times in RANGE.findall(line)
        ]
        for numbers in zip(*ranges, strict=True) if ranges else [()]:
            rest = iter(numbers)
            yield RANGE.sub(lambda _, rest=rest: str(next(rest)), line)


def cases() -> list[Case]:
    found: list[Case] = []
    for path in sorted(FOLDER.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.startswith("%% "):
                found.append(Case(path.stem, line[3:]))
            elif line.startswith("%> "):
                found[-1].blocks.append((shlex.split(line[3:]), []))
            else:
                found[-1].blocks[-1][1].append(line)
    return found


def results(found: Sequence[Case], folder: Path) -> dict[str, str]:
    """Import the logs of all cases into one store, each as a run with the name of its case; return the results."""
    texts = {}
    with Store.open(folder, create=True).claim(owner="test") as writer, connect(folder) as connection:
        group = LogGroup(writer, lambda: connection)
        group.begin({case.name for case in found})
        reports = {case.name: list(_imports(case, group, folder / f"logs/{n}/run")) for n, case in enumerate(found)}
        group.flush()
        tables = {name: _rows(connection, name) for name in TABLES}
    for number, case in enumerate(found):
        rows = {name: by_run.get(case.name, ()) for name, by_run in tables.items()}
        text = "\n".join(_result(rows, reports[case.name], case.shown))
        texts[case.name] = text.replace(f"{folder}/logs/{number}/run/", "").translate(PICTURES)
    return texts


def _rows(connection: Connection, table: str) -> Mapping[str, list[dict[str, Any]]]:
    by_run = defaultdict(list)
    for row in connection.query(f"FROM {table} ORDER BY run, attempt").to_pylist():
        by_run[row["run"]].append(row)
    return by_run


def _imports(case: Case, group: LogGroup, folder: Path) -> Iterator[ImportReport | str]:
    for (what, *words), lines in case.blocks[:-1]:
        name, *flags = words if words and not words[0].startswith("--") else ["train.log", *words]
        options = {flag: value for flag, value in itertools.pairwise([*flags, ""]) if flag.startswith("--")}
        path = folder / name
        if what == "move":
            path.rename(folder / flags[0])
            continue
        if what == "events":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(event_file(expanded(lines)))
            options = {"--changed": "2020-01-01 00:00"} | options
        elif what != "import":
            path.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{line}\n" for line in expanded(lines)).replace("␄\n", "")
            path.write_bytes(text.translate(CONTROLS).encode())
        if options.get("--changed"):
            changed = dt.datetime.fromisoformat(options["--changed"] + "+00:00").timestamp()
            os.utime(path, (changed, changed))
        if what in {"file", "events"}:
            continue
        year = options.get("--year")
        given = Options(
            loss=options.get("--loss"),
            year=None if year is None else int(year),
            pattern=(options["--pattern"],) if "--pattern" in options else (),
        )
        try:
            importer = importers()[case.kind] if "--forced" in options else find_importer(path)
            if importer.name != case.kind:
                yield f"the format is {importer.name}"
            run = case.name
            yield import_records(
                path, group, importer, run=run, known=group.known(run), stored=group.stored(run), options=given
            )
        except IngestError as error:
            yield f"error: {error}"


def event_file(lines: Iterator[str]) -> bytes:
    """Return an event file of TensorBoard with the events of lines `STEP TAG = VALUE`, or `STEP restart`."""
    events = [Event(file_version="brain.Event:2", wall_time=1_700_000_000.0)]
    for line in lines:
        step, _, text = line.partition(" ")
        tag, _, value = text.partition(" = ")
        event = Event(step=int(step), wall_time=1_700_000_000.5)
        if value:
            event.summary.value.add(tag=tag, simple_value=float(value))
        else:
            event.session_log.status = 1
        events.append(event)
    return b"".join(framed(event.SerializeToString()) for event in events)


def framed(data: bytes) -> bytes:
    """Return the bytes of a record in an event file, with TensorFlow's checksums."""
    length = len(data).to_bytes(8, "little")
    checksums = [masked_crc32c(part).to_bytes(4, "little") for part in (length, data)]
    return length + checksums[0] + data + checksums[1]


def _result(rows: Rows, reports: Sequence[ImportReport | str], shown: Sequence[str]) -> Iterator[str]:
    yield from _records(rows, shown)
    for row in sorted(rows["events"], key=_place):
        if row["type"] != "import" or row["severity"] == "warning":
            words = [_about(row), row["type"], row["rule"] or "", row["severity"], row["op"] or ""]
            details = f" {row['details']}" if "details" in shown and row["details"] else ""
            yield f"event {' '.join(filter(None, words))}: {row['message']}{details}"
    if not rows["runs"] and not any(isinstance(report, str) for report in reports):
        yield "no run"
    for row in rows["runs"][-1:]:
        facts = {"state": row["state"], "reason": row["reason"]}
        facts = {name: value for name, value in facts.items() if value not in {"stopped", NO_END}}
        facts |= {name: row[name] for name in ("planned_steps", "world_size") if row[name] is not None}
        facts |= {"config": row["config"]} if "config" in shown else {}
        if facts:
            yield f"run {', '.join(f'{name} {value}' for name, value in facts.items())}"
    for row in rows["attempts"] if "attempts" in shown else ():
        yield f"attempt {row['attempt']} {row['state']}, last step {row['last_step']}"
    for report in reports:
        if isinstance(report, str):
            yield report
            continue
        if report.passed_over:
            yield f"no records: {report.passed_over}"
        yield from (f"fault {fault.line}: {fault.text}" for fault in report.faults)
        yield from (f"note {note}" for note in report.notes)
        if report.malformed > len(report.faults):
            yield f"faults {report.malformed}"
    added = [report for report in reports if isinstance(report, ImportReport)]
    if len(added) > 1:
        yield f"added {', '.join(map(_added, added))}"


def _added(report: ImportReport) -> str:
    """Return the number of new rows, and whether the log is known, unchanged or a replacement of another log."""
    words = ("replacement" * report.is_replacement, "unchanged" if report.is_unchanged else "known" * report.is_known)
    return " ".join(filter(None, [str(report.rows_stored), *words]))


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["rule"] or "", row["op"] or "" if row["rule"] else "", row["seq"] or 0, row["ordinal"]


def _about(row: Mapping[str, Any]) -> str:
    words = [str("-" if row["step"] is None else row["step"])]
    words += [f"rank {row['rank']}"] * (row["rank"] is not None)
    words += [f"attempt {row['attempt']}"] * bool(row["attempt"])
    words += [f"micro step {row['micro_step']}"] * (row["micro_step"] is not None)
    words += [f"at {_moment(row['ts'])}"] if row["ts"] is not None and row["ts_origin"] in {"log", "file"} else []
    return " ".join(words)


def _moment(ts: dt.datetime) -> str:
    return ts.isoformat(" ").removesuffix("+00:00")


def _records(rows: Rows, shown: Sequence[str]) -> Iterator[str]:
    """Yield a line for each record, in the order of a log, or by attempt and step if there are several logs."""
    parts: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    several = len({row["incarnation"] for name in ("scalars", "tensor_stats") for row in rows[name]}) > 1
    for table in ("scalars", "tensor_stats"):
        for row in rows[table]:
            place = (row["attempt"], -1 if row["step"] is None else row["step"]) if several else ()
            text = _scalar(row, shown) if table == "scalars" else _tensor(row)
            parts[*place, row["seq"], row["rank"] or 0, _about(row)].append(text)
    for key in sorted(parts):
        yield f"{key[-1]}: {', '.join(sorted(parts[key]))}"
    for row in sorted(rows["samples"], key=lambda row: row["seq"]):
        at = "" if row["ts"] is None else f" at {_moment(row['ts'])}"
        yield f"{row['metric']} {row['labels'] or '{}'} {row['target']}: {row['value']!r}{at}"


def _scalar(row: Mapping[str, Any], shown: Sequence[str]) -> str:
    text = f"{row['name']} {row['value']!r}"
    if "labels" not in shown:
        return text
    labels = "".join(f" {name}={value}" for name, value in json.loads(row["labels"] or "{}").items())
    return f"{text} [{row['unit'] or ''}{labels}]"


def _tensor(row: Mapping[str, Any]) -> str:
    place = "" if row["index"] is None else f"[{row['index']}]"
    values = (f"{op} {row[op]}" for op in (*VALUE_OPS, *COUNT_OPS) if row.get(op) is not None)
    stage = "" if not row["vpp_stage"] else f" vpp {row['vpp_stage']}"
    return f"{row['kind']} {row['tensor']}{place}{stage} {' '.join(values)}"
