"""The lines that a rank prints, and their rate limit; the reason for the end of a process."""

from __future__ import annotations

import io

import pytest

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_exporter.process.lifecycle import encodable, exit_reason, weighed_reason
from rankscope_exporter.publishing.console import FREE_LINES, MIN_SECONDS_BETWEEN_LINES, Console, banner, records_note
from rankscope_exporter.records.step_record import StepRecord


def anomaly(kind: str, message: str) -> Event:
    return Event(type=EventType.ANOMALY, kind=kind, message=message)


SPIKE, WORSE, NAN = (
    Event(type=EventType.ANOMALY, rule=rule, severity=severity, kind="grad_reduced", message=message)
    for rule, severity, message in (
        ("AnomalyTurbulence", Severity.WARNING, "spike"),
        ("AnomalyTurbulence", Severity.CRITICAL, "worse"),
        ("AnomalyNan", Severity.CRITICAL, "nan"),
    )
)


def record(step: int, *events: Event) -> StepRecord:
    return StepRecord(ts=0, step=step, events=events)


def test_firing_prints_one_line_with_the_first_cause() -> None:
    stream = io.StringIO()
    console = Console(3, enabled=True, stream=stream)
    console.on_record(record(7, anomaly("grad_reduced", "effect"), anomaly("grad_unreduced", "cause")))

    assert "rankscope: step 7, rank 3: cause (and 1 more at this step)\n" == stream.getvalue()


def test_many_firings_do_not_flood_the_console() -> None:
    stream, now = io.StringIO(), [0.0]
    console = Console(0, enabled=True, stream=stream, clock=lambda: now[0])
    for step in range(100):
        console.on_record(record(step, anomaly("grad_reduced", "again")))
    now[0] = MIN_SECONDS_BETWEEN_LINES
    console.on_record(record(100, anomaly("grad_reduced", "again")))
    lines = stream.getvalue().splitlines()

    assert FREE_LINES + 1 == len(lines)
    assert f"[{100 - FREE_LINES} steps with firings not shown]" in lines[-1]


def test_first_firing_of_each_rule_and_severity_is_printed_immediately() -> None:
    """A NaN after several warnings of another rule must not wait."""
    stream, now = io.StringIO(), [0.0]
    console = Console(0, enabled=True, stream=stream, clock=lambda: now[0])
    for step in range(20):
        console.on_record(record(step, SPIKE))
    console.on_record(record(20, SPIKE, NAN))
    console.on_record(record(21, WORSE))
    for step in range(22, 30):
        console.on_record(record(step, NAN))
    console.finish()
    console.finish()
    once = Console(1, enabled=True, stream=stream, clock=lambda: now[0])
    for step in range(4):
        once.on_record(record(step, NAN))
    once.finish()
    lines = stream.getvalue().splitlines()

    assert [
        "rankscope: step 0, rank 0: spike",
        "rankscope: step 1, rank 0: spike",
        "rankscope: step 2, rank 0: spike",
        "rankscope: step 20, rank 0: nan (and 1 more at this step) [17 steps with firings not shown]",
        "rankscope: step 21, rank 0: worse",
        "rankscope: rank 0: firings at 8 more steps, the last is step 29: 8 of AnomalyNan",
        *(f"rankscope: step {step}, rank 1: nan" for step in range(3)),
        "rankscope: rank 1: firings at 1 more step, the last is step 3: 1 of AnomalyNan",
    ] == lines


def test_closed_stream_and_disabled_console_print_nothing(monkeypatch) -> None:
    stream = io.StringIO()
    Console(0, enabled=False, stream=stream).line("nothing")
    assert "" == stream.getvalue()
    stream.close()
    Console(0, enabled=True, stream=stream).line("nothing")
    monkeypatch.setattr("sys.stderr", None)
    Console(0, enabled=True).line("nothing")


NO_FILE = "no service, and no file has the records: set RANKSCOPE_INGEST_URL, or scrape it with Prometheus"
READERS = [
    (None, "/records", "no service (RANKSCOPE_INGEST_URL): records are written to /records"),
    (None, None, NO_FILE),
    ("http://127.0.0.1:1", "/records", "registering with service http://127.0.0.1:1"),
]


@pytest.mark.parametrize(("service", "spool_dir", "reader"), READERS)
def test_banner_names_tensors_cost_and_reader(service, spool_dir, reader) -> None:
    own = {"run": "my run", "world_size": 2, "address": "http://127.0.0.1:9", "backend": "numba", "every": 5}
    cost = {"tensors": 3, "elements": 1_234_567, "series": 12, "bytes_per_step": 336}
    first, second = banner(measured="gradients", service=service, spool_dir=spool_dir, **own, **cost)

    text = "gradients of 3 tensors (1,234,567 elements) every 5 steps, numba kernel"
    assert f"run 'my run' on 2 ranks; {text}" == first
    assert f"12 series, about 0 kB per step; http://127.0.0.1:9/metrics; {reader}" == second


def test_note_about_records_has_commands_and_the_missing_installation(monkeypatch) -> None:
    """With only the part for ranks installed, `rankscope summary` lacks its libraries."""
    first, second = records_note("/data/my runs/records", 1234)
    assert "no service has stored the last 1,234 records of this rank; they are in /data/my runs/records" == first
    assert "rankscope import '/data/my runs/records' --store history" in second

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, second = records_note("/data", 3)
    assert "to read them: first " in second
    assert "[cli,store,service]', then " in second
    assert "rankscope summary --store /data; to store them: " in second


@pytest.mark.parametrize(
    ("ended_by", "last_step", "planned", "reason", "text"),
    [
        (None, 100, 100, ExitReason.COMPLETED, None),
        (None, 40, 100, ExitReason.COMPLETED, None),
        (None, None, None, ExitReason.COMPLETED, None),
        (SystemExit(0), 100, 100, ExitReason.COMPLETED, None),
        (SystemExit(None), 40, None, ExitReason.COMPLETED, None),
        (SystemExit(0), 40, 100, ExitReason.UNKNOWN, "sys.exit(0) at step 40 of 100 planned"),
        (SystemExit(128 + 15), 100, 100, ExitReason.SIGNAL, "SIGTERM, SystemExit: 143"),
        (SystemExit(128 + 2), None, None, ExitReason.SIGNAL, "SIGINT, SystemExit: 130"),
        (SystemExit(128 + 9), None, None, ExitReason.EXCEPTION, "SystemExit: 137"),
        (SystemExit(3), 100, 100, ExitReason.EXCEPTION, "SystemExit: 3"),
        (SystemExit("no data"), None, None, ExitReason.EXCEPTION, "SystemExit: no data"),
        (KeyboardInterrupt(), 40, 100, ExitReason.SIGNAL, "KeyboardInterrupt"),
        (ValueError("no"), None, None, ExitReason.EXCEPTION, "ValueError: no"),
    ],
)
def test_exit_reason_depends_on_the_error_and_the_planned_steps(ended_by, last_step, planned, reason, text) -> None:
    assert (reason, text) == weighed_reason(*exit_reason(ended_by), last_step, planned)


@pytest.mark.parametrize(("last_step", "reason"), [(100, ExitReason.COMPLETED), (40, ExitReason.UNKNOWN)])
def test_end_without_an_error_is_completed_or_unknown(last_step: int, reason: ExitReason) -> None:
    assert (reason, None) == weighed_reason(ExitReason.UNKNOWN, None, last_step, 100)


def test_text_without_utf8_form_is_escaped() -> None:
    assert "a\\ud800 é" == encodable("a\ud800 é")
