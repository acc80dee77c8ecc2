"""Absent kinds of rows, skipped steps, and the lines that a rank prints."""

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.parts import Training, Watched
from torch import nn

from rankscope_contract.model.events import Event, EventType, ExitReason, Severity
from rankscope_exporter.process.lifecycle import encodable, exit_reason, weighed_reason
from rankscope_exporter.publish.anomaly_detector import in_causal_order
from rankscope_exporter.publish.console import FREE_LINES, MIN_SECONDS_BETWEEN_LINES, Console, records_note
from rankscope_exporter.publish.publisher import MOST_PASSES, SkippedSteps
from rankscope_exporter.records.record import StepRecord

PLAIN = ("parameters", "gradients", "optimizer_state")
ALL = (*PLAIN, "micro_gradients", "activations", "structure", "linear", "adam_updates", "direction")


class Moments(torch.optim.Optimizer):
    """An optimizer with the options of Adam, whose state has the tensors that `state` returns for a parameter."""

    def __init__(self, parameters: Any, state: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})
        self._make = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the returned loss is not needed
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is not None:
                    item.data.add_(item.grad, alpha=-0.01)
                    self.state[item] = self._make(item)


def coded(item: torch.Tensor) -> dict[str, Any]:
    code = torch.full_like(item, 7, dtype=torch.uint8)
    return {"step": torch.tensor(1.0), "state1": code, "state2": code.clone(), "absmax1": torch.ones(1)}


def coded_under_usual_names(item: torch.Tensor) -> dict[str, Any]:
    code = torch.full_like(item, 7, dtype=torch.int8)
    return {"step": 1, "exp_avg": code, "exp_avg_sq": code.clone(), "packed": torch.ones(4, dtype=torch.int32)}


def schedule_free(item: torch.Tensor) -> dict[str, Any]:
    return {"z": torch.ones_like(item), "exp_avg_sq": torch.ones_like(item)}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(torch.randn(3, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def watched(net: nn.Module, *optimizers: torch.optim.Optimizer, quantities: Any = ALL, **settings: Any) -> Watched:
    return Watched(net, optimizers, quantities=list(quantities), **settings)


def notes(seen: Watched) -> list[str]:
    seen.publish()
    return seen.messages("note")


def kinds(seen: Watched, step: int) -> set[str]:
    rows = [row for one in seen.records if one.step == step for row in (*one.features, *one.histograms)]
    return {row["kind"] for row in rows} | {str(row.entry.kind) for row in seen.rows() if row.step == step}


@pytest.mark.parametrize(
    ("state", "quantities", "words"),
    [
        (coded, PLAIN, ("optimizer_state: exp_avg, exp_avg_sq had no rows", "state1 (uint8), state2 (uint8)")),
        (coded, ("adam_updates",), ("adam_updates: adam_ratio, adam_update had no rows",)),
        (coded, ("direction",), ("direction: direction_agreement had no rows",)),
        (coded_under_usual_names, PLAIN, ("optimizer_state: exp_avg, exp_avg_sq had no rows", "exp_avg (int8)")),
        (schedule_free, PLAIN, ("optimizer_state: exp_avg had no rows", "z (float32), exp_avg_sq (float32)")),
    ],
)
def test_state_under_other_names_is_named_once_after_the_third_update(state, quantities, words):
    net = small()
    optimizer = Moments(net.parameters(), state)
    with watched(net, optimizer, quantities=quantities) as seen:
        for _ in range(2):
            step(net, optimizer)
        early = notes(seen)
        for _ in range(6):
            step(net, optimizer)
    late = [text for text in seen.messages("note") if "is not judged" not in text]

    assert 0 == seen.faults
    assert [] == early
    assert 1 == len(late)
    assert all(word in late[0] for word in words)


@pytest.mark.parametrize("state", [coded, coded_under_usual_names])
def test_codes_of_a_quantised_state_are_never_published(state):
    options = {"optimizer_state": {"names": ["*", "step"]}, "hashes": {"of": "all", "every": 1, "state": True}}
    names = (*PLAIN, "adam_updates", "direction", "hashes")
    net = small()
    optimizer = Moments(net.parameters(), state)
    with watched(net, optimizer, quantities=names, options=options) as seen:
        for _ in range(3):
            step(net, optimizer)
    published = kinds(seen, 2)
    hashes = [row for record in seen.records for row in record.hashes if row["dtype"] != "float32"]

    usual = {"param_before", "param_after", "grad_unreduced", "grad_reduced"}
    assert published - usual <= {"step", "absmax1"}
    assert hashes
    assert {None} == {row["norm"] for row in hashes}
    assert 0 == seen.faults


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "RAdam": lambda net: torch.optim.RAdam(net.parameters(), lr=0.01),
    "ASGD": lambda net: torch.optim.ASGD(net.parameters(), lr=0.01),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01),
    "frozen part": lambda net: torch.optim.AdamW(net[0].requires_grad_(False) and net[2].parameters(), lr=0.01),
    "other tensors": lambda net: torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.01),
}


@pytest.mark.usual(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kinds_that_are_absent_by_definition_are_not_named(name):
    net = small()
    optimizer = OPTIMIZERS[name](net)
    with watched(net, optimizer) as seen:
        for _ in range(6):
            step(net, optimizer)

    assert (0, []) == (seen.faults, seen.messages("note"))


def test_alternating_and_skipped_parts_are_not_named():
    net = small()
    first, second = (torch.optim.AdamW(part.parameters(), lr=0.01) for part in (net[0], net[2]))
    with watched(net, first, second) as seen:
        for number in range(8):
            net[0].requires_grad_(number % 2 == 0)
            net[2].requires_grad_(number % 2 == 1)
            step(net, *((first,) if number % 2 == 0 else (second,)))
        for _ in range(4):  # the updates are skipped
            step(net)

    assert (0, []) == (seen.faults, seen.messages("note"))


def test_kinds_that_stop_are_named_once():
    net, updates = small(), []

    def usual_then_coded(item: torch.Tensor) -> dict[str, Any]:
        updates.append(item)
        is_usual = len(updates) <= 3 * len(list(net.parameters()))
        return {"exp_avg": torch.ones_like(item), "exp_avg_sq": torch.ones_like(item)} if is_usual else coded(item)

    optimizer = Moments(net.parameters(), usual_then_coded)
    with watched(net, optimizer, quantities=PLAIN) as seen:
        for _ in range(10):
            step(net, optimizer)
    (unjudged, note) = seen.messages("note")

    assert unjudged.startswith("AdamBooks is not judged for 4 tensors: the optimizer is not Adam")
    assert "optimizer_state: exp_avg, exp_avg_sq had rows, and none in 3 measured updates" in note
    assert 0 == seen.faults


def cleared(net: nn.Sequential) -> None:
    for module in net.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def replaced(net: nn.Sequential) -> None:
    for module in net.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()


def cleared_of_one_module(net: nn.Sequential) -> None:
    net[2]._forward_hooks.clear()
    net[2]._forward_pre_hooks.clear()


@pytest.mark.usual(6)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("quantities", [PLAIN, (*PLAIN, "activations")], ids=len)
@pytest.mark.parametrize("take_off", [cleared, replaced, cleared_of_one_module])
def test_hooks_that_other_code_takes_off_are_named_once(take_off, quantities, every):
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with watched(net, optimizer, quantities=quantities, every=every) as seen:
        for number in range(1, 10):
            if number == 3:
                take_off(net)
            step(net, optimizer)
    found = seen.messages("note")

    assert 0 == seen.faults
    assert {"grad_reduced", "param_after"} <= kinds(seen, 9)
    if take_off is cleared_of_one_module and (every == 2 or "activations" not in quantities):
        assert [] == found  # this module has no hook between sampled steps
    else:
        assert 1 <= len(found) <= 2
        assert all("other code has removed the" in note for note in found)
    assert len(set(found)) == len(found)


def reported(steps: str, *, is_over: bool = True) -> tuple[list[int | None], list[str]]:
    """Return the reported steps and the notices after `steps`: "s" is a skipped step, "u" one with an update."""
    found: list[int | None] = []
    notices: list[str] = []
    skipped = SkippedSteps(lambda record: found.append(record.step), notices.append)
    for step, kind in enumerate(steps, 1):
        if kind == "s":
            skipped.skipped(StepRecord(step=step, ts=step))
        else:
            skipped.updated()
    if is_over:
        skipped.finish()
    return found, notices


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        *(("uuu", []), ("s", [1]), ("su", [1]), ("suuusuu", [1, 5]), ("usssu", [2, 3, 4]), ("ssusuu", [1, 2, 4])),
        *(("s" * (MOST_PASSES + 1) + "u", list(range(1, MOST_PASSES + 2))), ("susususu", []), ("ssussussu", [])),
        *(("uuusususuuuu", []), ("susus", []), ("susususssu", [7, 8, 9]), ("sususuuusuu", [9])),
    ],
)
def test_skipped_steps_are_reported_unless_their_number_is_repeated(steps, expected):
    assert expected == reported(steps)[0]


@pytest.mark.parametrize(("steps", "expected"), [("us", []), ("usu", []), ("usuu", [2]), ("susuus", [])])
def test_skipped_step_is_reported_at_the_second_update_after_it(steps, expected):
    assert expected == reported(steps, is_over=False)[0]


@pytest.mark.parametrize(("steps", "count"), [("suuu", 0), ("ssusu", 0), ("susu", 1), ("sususuususu", 1)])
def test_repeated_number_of_skipped_steps_is_named_once(steps, count):
    assert count == len(reported(steps)[1])


def test_skipped_step_without_measured_tensors_is_published():
    net = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(net.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    with Watched(net, optimizer, quantities=["hashes"], options={"hashes": {"every": 1, "of": "all"}}) as seen:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(factor * net(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert {1, 2, 3} <= {record.step for record in seen.records}
    assert 0 == seen.faults


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


def test_firing_prints_one_line_with_the_first_cause() -> None:
    stream = io.StringIO()
    console = Console(3, enabled=True, stream=stream)
    console.on_anomalies(7, in_causal_order([anomaly("grad_reduced", "effect"), anomaly("grad_unreduced", "cause")]))

    assert "rankscope: step 7, rank 3: cause (and 1 more at this step)\n" == stream.getvalue()


def test_many_firings_do_not_flood_the_console() -> None:
    stream, now = io.StringIO(), [0.0]
    console = Console(0, enabled=True, stream=stream, clock=lambda: now[0])
    for step in range(100):
        console.on_anomalies(step, [anomaly("grad_reduced", "again")])
    now[0] = MIN_SECONDS_BETWEEN_LINES
    console.on_anomalies(100, [anomaly("grad_reduced", "again")])
    lines = stream.getvalue().splitlines()

    assert FREE_LINES + 1 == len(lines)
    assert f"[{100 - FREE_LINES} steps with firings not shown]" in lines[-1]


def test_first_firing_of_each_rule_and_severity_is_printed_immediately() -> None:
    """A NaN after several warnings of another rule must not wait."""
    stream, now = io.StringIO(), [0.0]
    console = Console(0, enabled=True, stream=stream, clock=lambda: now[0])
    for step in range(20):
        console.on_anomalies(step, [SPIKE])
    console.on_anomalies(20, [SPIKE, NAN])
    console.on_anomalies(21, [WORSE])
    for step in range(22, 30):
        console.on_anomalies(step, [NAN])
    console.finish()
    console.finish()
    once = Console(1, enabled=True, stream=stream, clock=lambda: now[0])
    for step in range(4):
        once.on_anomalies(step, [NAN])
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
def test_banner_names_tensors_cost_and_reader(service, spool_dir, reader, tmp_path, monkeypatch, capfd) -> None:
    folder = f"{tmp_path}{spool_dir}" if spool_dir else "off"
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", folder)
    serve = {"ingest_url": service}
    training = Training(console=True, run="my run", quantities=["gradients"], every=5, serve=serve)
    address = training.monitor.address
    training.finish()
    first, second, *_ = capfd.readouterr().err.splitlines()

    assert first.startswith("rankscope: run 'my run' on 1 rank; gradients of 4 tensors (26 elements) every 5 steps, ")
    expected = f"{address}/metrics; {reader.replace('/records', folder)}"
    assert f"rankscope: 24 series, about 1 kB per step; {expected}" == second


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
        *((None, 100, 100, ExitReason.COMPLETED, None), (None, 40, 100, ExitReason.COMPLETED, None)),
        *((None, None, None, ExitReason.COMPLETED, None), (SystemExit(0), 100, 100, ExitReason.COMPLETED, None)),
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
