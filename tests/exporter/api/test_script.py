"""Calls of a training script: log, phase, event, step numbers; and copies, compilation and unusual loops."""

from __future__ import annotations

import copy
import io
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.parts import session_of
from torch import nn

from rankscope_contract.rules.nan import AnomalyNan
from rankscope_exporter import Monitor, MonitorConfig, ServeConfig
from rankscope_exporter.sampling import active_quantities

Eventually = Callable[..., Any]
MakeReader = Callable[[Monitor], Any]


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def page(read: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(read.get("/metrics").decode())
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("run", "rank")))): sample.value
        for family in families
        for sample in family.samples
    }


def test_logged_tensor_has_its_value_at_the_time_of_the_call(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        loss = torch.tensor(3.0)
        step(net, optimizer)
        monitor.log(loss=loss)
        loss.mul_(0)
        monitor.end_step()

        assert [(1, 3.0)] == eventually(lambda: read.scalars("loss"))


@pytest.mark.parametrize(
    "bad", [torch.tensor(1 + 2j), torch.tensor(1.0, device="meta"), "high", torch.ones(2)], ids=repr
)
def test_value_that_cannot_be_logged_loses_only_itself(
    bad: Any, quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    """There are more invalid values than steps may wait for the publisher: sampling continues."""
    steps = active_quantities.MAX_BACKLOG + 6
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for number in range(steps):
            step(net, optimizer)
            monitor.log(good=1.0)
            monitor.log(bad=bad)
            if number % 16 == 15:  # a publisher without CPU time would correctly skip steps
                wanted = number - 8
                eventually(lambda wanted=wanted: len(read.scalars("good")) > wanted)
        monitor.end_step()
        eventually(lambda: len(read.scalars("good")) == steps)

        assert steps == monitor.faults
        assert steps == len({row.step for row in read.rows()})
        assert [] == read.scalars("bad")


def test_logged_nan_is_in_gauge_and_counter(quiet: MonitorConfig, reader: MakeReader, eventually: Eventually) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        labels = (("kind", ""), ("rule", "AnomalyNan"))
        before = page(read)
        step(net, optimizer)
        monitor.log(loss=math.nan)
        monitor.end_step()
        eventually(read.records)
        after = page(read)

    assert (0.0, 0.0) == (
        before["rankscope_rule_firing", labels],
        before["rankscope_anomaly_events_total", labels],
    )
    assert (1.0, 1.0) == (after["rankscope_rule_firing", labels], after["rankscope_anomaly_events_total", labels])


def test_first_cause_is_kept_when_all_rules_fire(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
    optimizer = torch.optim.Adam(net.parameters())
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        (net(torch.ones(2, 3)).sum() * math.nan).backward()
        optimizer.step()
        monitor.end_step()
        eventually(read.records)
        events = [event for event in read.events() if event["type"] == "anomaly"]

    assert "grad_unreduced" == events[0]["kind"]
    by_call = sorted((event for event in events if event["kind"] == "grad_unreduced"), key=lambda e: e["call_id"])
    assert "39.weight" in {by_call[0]["tensor"], by_call[1]["tensor"]}


def test_step_number_before_or_after_the_step_means_the_same_step(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    for before in (True, False):
        net, optimizer = make()
        with Monitor(quiet).attach(net, optimizer) as monitor:
            read = reader(monitor)
            for number in (100, 101, 102, 50, 51):
                if before:
                    monitor.log(step=number, mine=number)
                step(net, optimizer)
                if not before:
                    monitor.log(step=number, mine=number)
            monitor.end_step()
            eventually(lambda read=read: len(read.scalars("mine")) == 5)

            assert [(n, float(n)) for n in (100, 101, 102, 50, 51)] == read.scalars("mine"), before
            assert [100, 101, 102, 50, 51] == list(dict.fromkeys(row.step for row in read.rows())), before


def test_step_number_between_steps_is_that_of_the_next_step(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        step(net, optimizer)
        monitor.end_step()
        monitor.log(evaluation_loss=2.0)
        monitor.log(step=50)
        step(net, optimizer)
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == {1, 50})

        assert [(1, 2.0)] == read.scalars("eval_loss")


def test_rates_and_totals_follow_from_amounts(quiet: MonitorConfig, reader: MakeReader, eventually: Eventually) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for tokens in (10, math.nan, 30):
            step(net, optimizer)
            monitor.log(tokens=tokens)
        monitor.end_step()
        eventually(lambda: len(read.scalars("tokens")) == 3)
        seconds = dict(read.scalars("step_seconds"))
        rates = dict(read.scalars("tokens_per_second"))
        units = {row["name"]: row["unit"] for record in read.records() for row in record["scalars"]}

        assert [(1, 10.0), (3, 40.0)] == read.scalars("tokens_total")
        assert rates[3] == pytest.approx(30 / seconds[3])
        assert ("seconds", "tokens/s") == (units["step_seconds"], units["tokens_per_second"])


def test_rules_evaluate_logged_scalars_and_not_derived_ones(reader: MakeReader, eventually: Eventually) -> None:
    net, optimizer = make()
    rules = (AnomalyNan(threshold=1_000.0),)
    config = MonitorConfig(quantities=("parameters",), rules=rules, console=False, exit_wait_seconds=0)
    with Monitor(config).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for loss in (1.0, 2_000.0):
            step(net, optimizer)
            monitor.log(loss=loss)
        monitor.end_step()
        eventually(lambda: len(read.scalars("loss")) == 2)
        memory = read.scalars("resident_memory_bytes")
        fired = [(event["step"], event["op"]) for event in read.events() if event["type"] == "anomaly"]

    assert min(value for _, value in memory) > 1_000
    assert [(2, "loss")] == fired


def test_learning_rate_is_logged_once_by_monitor_or_script(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        step(net, optimizer)
        step(net, optimizer)
        monitor.log(learning_rate=0.5)
        monitor.end_step()
        eventually(lambda: len(read.records()) == 2)

        assert [(1, pytest.approx(0.1)), (2, 0.5)] == read.scalars("learning_rate")


def test_memory_is_part_of_every_sampled_step(quiet: MonitorConfig, reader: MakeReader, eventually: Eventually) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        step(net, optimizer)
        monitor.end_step()
        ((number, resident),) = eventually(lambda: read.scalars("resident_memory_bytes"))

    assert 1 == number
    assert 50e6 < resident < 100e9


def test_step_is_published_during_a_pause_and_its_time_follows(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope_exporter.publishing.publisher.IDLE_FLUSH_SECONDS", 0.2)
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        step(net, optimizer)
        began = time.monotonic()
        eventually(read.rows)
        assert [] == read.scalars("step_seconds")
        step(net, optimizer)
        monitor.end_step()
        eventually(lambda: len(read.scalars("step_seconds")) == 2)

        assert dict(read.scalars("step_seconds"))[1] >= time.monotonic() - began - 5
        assert {1, 2} == {row.step for row in read.rows()}


def test_a_pause_between_two_optimizers_does_not_split_the_step(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope_exporter.publishing.publisher.IDLE_FLUSH_SECONDS", 0.1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.Adam(part.parameters()) for part in net]
    with Monitor(quiet).attach(net, optimizers) as monitor:
        read = reader(monitor)
        net(torch.ones(1, 4)).sum().backward()
        optimizers[0].step()
        threading.Event().wait(0.6)
        optimizers[1].step()
        monitor.end_step()
        rows = eventually(read.rows)

    assert {1} == {row.step for row in rows}
    assert 4 == sum(row.kind == "exp_avg" for row in rows)


def test_nested_phases_have_totals_and_events(quiet: MonitorConfig, reader: MakeReader, eventually: Eventually) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        shown = []
        session = session_of(monitor)
        for _ in range(2):
            with monitor.phase("evaluation"):
                with monitor.phase("checkpoint"):
                    shown.append(session.channel.state.phase)
                shown.append(session.channel.state.phase)
            shown.append(session.channel.state.phase)
        seconds = eventually(lambda: (found := read.scalars("phase_seconds")) and len(found) == 4 and found)
        phases = [json.loads(event["details"])["phase"] for event in read.events() if event["type"] == "phase"]

    assert ["checkpoint", "evaluation", None] * 2 == shown
    assert ["checkpoint", "evaluation"] * 2 == phases
    assert seconds[2][1] >= seconds[0][1]
    assert seconds[3][1] >= seconds[1][1]


def test_an_event_carries_its_text_and_details(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        monitor.event("note", 123, path="a/b", when=object)  # type: ignore[arg-type]  # a script may pass anything
        (event,) = eventually(read.events)

    assert ("note", "123") == (event["type"], event["message"])
    assert "a/b" == json.loads(event["details"])["path"]
    assert 0 == monitor.faults


def test_monitored_model_can_be_copied_and_saved(quiet: MonitorConfig) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        step(net, optimizer)
        average = torch.optim.swa_utils.AveragedModel(net)
        twin = copy.deepcopy(net)
        saved = io.BytesIO()
        torch.save(net, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for other in (average, twin, loaded):
            other.train()
            other(torch.ones(3, 4)).sum().backward()

        assert 0 == monitor.faults
        assert b"rankscope" not in saved.getvalue()
        assert torch.equal(net(torch.ones(1, 4)), loaded(torch.ones(1, 4)))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.thorough
def test_compiling_after_attach_records_every_step(
    fullgraph: bool, quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    torch._dynamo.reset()
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
        for _ in range(4):
            compiled(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == {1, 2, 3, 4})

        assert 0 == monitor.faults
        assert {"grad_reduced", "param_after"} <= {row.kind for row in read.rows() if row.step == 4}


def test_lbfgs_makes_one_step_of_many_evaluations(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, _ = make()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for _ in range(3):
            optimizer.step(closure)
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == {1, 2, 3})

        assert [] == [event for event in read.events() if event["type"] == "step_skipped"]


def test_fused_optimizer_that_skips_on_the_device_is_a_skipped_step(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for factor in (1.0, math.inf, 1.0):
            scaler.scale((net(torch.ones(3, 4)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == {1, 2, 3})

        assert [2] == [event["step"] for event in read.events() if event["type"] == "step_skipped"]


def test_failed_backward_pass_does_not_hide_the_next_one(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    """In evaluation mode no forward hook begins a step, and the second backward pass fails in the middle."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fail = False

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        if fail:
            raise MemoryError("out of memory")
        return gradient

    net[0].weight.register_hook(explode)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for number in range(1, 6):
            fail = number == 2
            try:
                net(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            except MemoryError:
                pass
            optimizer.zero_grad()
        monitor.end_step()
        eventually(lambda: len(read.records()) == 6)  # the event of the skipped step has a record of its own
        skipped = [event["step"] for event in read.events() if event["type"] == "step_skipped"]
        complete = {row.step for row in read.rows() if row.kind == "grad_reduced"}

    assert {1, 3, 4, 5} == complete
    assert [2] == skipped


def test_replaced_parameter_is_absent_and_reported_once(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    net, _ = make()
    net.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        step(net, optimizer)
        net.weight.requires_grad_(True)
        net.bias = nn.Parameter(torch.zeros(2))
        step(net, optimizer)
        step(net, optimizer)
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == {1, 2, 3})
        last = {(row.kind, row.tensor) for row in read.rows() if row.step == 3}

    assert ("grad_reduced", "weight") in last
    assert ("grad_reduced", "bias") not in last
    assert 1 == monitor.faults
    assert ["bias" in record.getMessage() for record in caplog.records] == [True]


def test_steps_beyond_the_backlog_limit_are_counted_as_dropped(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_quantities, "MAX_BACKLOG", 3)
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        session = session_of(monitor)
        hold, publish = threading.Event(), session.publisher.publish

        def slow(record: Any) -> int:
            hold.wait(20)
            return publish(record)

        session.publisher.publish = slow
        for _ in range(10):
            step(net, optimizer)
            monitor.log(loss=1.0)
        hold.set()
        step(net, optimizer)
        monitor.end_step()
        eventually(
            lambda: any(record["step"] == 11 for record in read.records())
        )  # the last record: all others are present
        measured = {row.step for row in read.rows()}

        assert 10 == len(read.scalars("loss"))
        assert 5 >= len(measured) >= 3
        dropped = page(read)["rankscope_dropped_total", (("reason", "publisher_behind"),)]
        assert 11 - len(measured) == dropped


def test_secrets_are_not_shown(quiet: MonitorConfig, reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["train.py", "--wandb-key=HIDE1", "--api_token", "HIDE2", "--lr", "3", "s3://user:HIDE3@host/x", "--auth"],
    )
    net, optimizer = make()
    config = replace(quiet, serve=ServeConfig(token="HIDE4"))
    with Monitor(config).attach(net, optimizer) as monitor:
        shown = reader(monitor).get("/config", Authorization="Bearer HIDE4").decode()

    assert "HIDE" not in shown
    assert [
        "train.py",
        "--wandb-key=***",
        "--api_token",
        "***",
        "--lr",
        "3",
        "s3://***@host/x",
        "--auth",
    ] == json.loads(shown)["argv"]


def test_logging_from_other_threads_loses_nothing(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        threads = [
            threading.Thread(target=lambda n=n: [monitor.log(**{f"thread_{n}": i}) for i in range(200)])
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for _ in range(50):
            step(net, optimizer)
        for thread in threads:
            thread.join()
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == set(range(1, 51)))

        for n in range(3):
            assert list(range(200)) == [int(value) for _, value in read.scalars(f"thread_{n}")]
        assert 0 == monitor.faults


def test_gradients_computed_in_a_closure_are_read_after_clipping(
    quiet: MonitorConfig, reader: MakeReader, eventually: Eventually
) -> None:
    """As in Lightning: forward, backward and clipping run inside `optimizer.step(closure)`."""
    net, optimizer = make()
    clipped: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 4)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        clipped.append(float(net.weight.grad.norm()))  # type: ignore[union-attr]
        return loss

    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        optimizer.step(closure)
        optimizer.step(closure=closure)
        monitor.end_step()
        eventually(lambda: {row.step for row in read.rows()} == {1, 2})
        rows = {(row.step, row.kind): float(row.numbers["norm"] or 0) for row in read.rows() if row.tensor == "weight"}

        assert 0 == monitor.faults
        assert clipped == pytest.approx([rows[1, "grad_clipped"], rows[2, "grad_clipped"]])
        assert all(rows[step, "grad_reduced"] > 10 * rows[step, "grad_clipped"] for step in (1, 2))
