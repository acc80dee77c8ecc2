"""Calls of a training script: log, phase, event, step numbers, secrets in their texts; and unusual loops."""

import json
import math
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.exporter.conftest import Reader, wait_until
from tests.exporter.parts import Training, Watched, small
from torch import nn

from rankscope_contract.model.redaction import MAX_NAME, MAX_TEXT
from rankscope_contract.model.schema import Plan
from rankscope_contract.rules.anomaly import AnomalyNan
from rankscope_exporter import Monitor
from rankscope_exporter.publish import publisher
from rankscope_exporter.training import sampling


def page(watched: Watched) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(Reader(str(watched.monitor.address)).get("/metrics").decode())
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("run", "rank")))): sample.value
        for family in families
        for sample in family.samples
    }


def test_logged_tensor_has_its_value_at_the_time_of_the_call():
    """The learning rate is logged once, by the monitor or by the script. An event has its text and details."""
    with Training() as training:
        loss = torch.tensor(3.0)
        training.train(loss=loss)
        loss.mul_(0)
        training.train(learning_rate=0.5)
        training.monitor.event("note", 123, path="a/b", when=object)  # type: ignore[arg-type]  # a script may pass anything
    ((_, event),) = training.events("note")

    assert [(1, 3.0)] == training.scalars("loss")
    assert [(1, pytest.approx(0.1)), (2, 0.5)] == training.scalars("learning_rate")
    assert ("note", "123", "a/b") == (event.type, event.message, json.loads(event.details)["path"])
    assert 0 == training.faults


def test_value_that_cannot_be_logged_loses_only_itself():
    """There are more invalid values than steps may wait for the publisher: sampling continues."""
    invalid = (torch.tensor(1 + 2j), torch.tensor(1.0, device="meta"), "high", torch.ones(2))
    steps = sampling.MAX_BACKLOG + 6
    with Training() as training:
        for number in range(steps):
            training.train(good=1.0)
            training.monitor.log(bad=invalid[number % len(invalid)])
            if number % 16 == 15:  # a publisher without CPU time would correctly skip steps
                wait_until(lambda wanted=number - 8: len(training.scalars("good")) > wanted)

    assert steps == training.faults == len(training.scalars("good")) == len(training.measured())
    assert [] == training.scalars("bad")


def test_first_cause_is_kept_when_all_rules_fire():
    """The second micro-batch does not change the order of the gradients of the first one."""
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
    optimizer = torch.optim.Adam(net.parameters())
    with Watched(net, optimizer) as watched:
        for _ in range(2):
            (net(torch.ones(2, 3)).sum() * math.nan).backward()
        optimizer.step()
    events = [event for _, event in watched.events("anomaly")]
    by_call = sorted((event for event in events if event.kind == "grad_unreduced"), key=lambda event: event.call_id)

    assert "grad_unreduced" == events[0].kind
    assert {(0, "39"), (1, "39")} == {(event.call_id, event.tensor.partition(".")[0]) for event in by_call[:2]}


@pytest.mark.parametrize("before", [True, False])
def test_step_number_before_or_after_the_step_means_the_same_step(before):
    numbers = [100, 101, 102, 50, 51]
    with Training() as training:
        for number in numbers:
            if before:
                training.monitor.log(step=number, mine=number)
            training.train()
            if not before:
                training.monitor.log(step=number, mine=number)

    assert [(number, float(number)) for number in numbers] == training.scalars("mine")
    assert numbers == training.measured()


def test_step_number_between_steps_is_that_of_the_next_step():
    with Training() as training:
        training.train()
        training.monitor.end_step()
        training.monitor.log(evaluation_loss=2.0)
        training.monitor.log(step=50)
        training.train()

    assert [1, 50] == training.measured()
    assert [(1, 2.0)] == training.scalars("eval_loss")


def test_rates_and_totals_follow_from_amounts():
    """The amounts of a step are added up. Memory is measured too."""
    with Training() as training:
        for tokens in (4, math.nan, 30):
            training.train(tokens=tokens)
            if tokens == 4:
                training.monitor.log(tokens=6, step=1)
    seconds, rates = dict(training.scalars("step_seconds")), dict(training.scalars("tokens_per_second"))
    units = {scalar.name: scalar.unit for record in training.records for scalar in record.scalars}
    memory = dict(training.scalars("resident_memory_bytes"))

    assert {1: 10.0, 3: 40.0} == dict(training.scalars("tokens_total"))
    assert rates[3] == pytest.approx(30 / seconds[3])
    assert ("seconds", "tokens/s") == (units["step_seconds"], units["tokens_per_second"])
    assert {1, 2, 3} == memory.keys()
    assert all(50e6 < resident < 100e9 for resident in memory.values())


def test_rules_evaluate_logged_scalars_and_not_derived_ones():
    with Training(quantities=["parameters"], rules=[AnomalyNan(threshold=1_000.0)]) as training:
        for loss in (1.0, 2_000.0):
            training.train(loss=loss)

    assert min(value for _, value in training.scalars("resident_memory_bytes")) > 1_000
    assert [(2, "loss")] == [(step, event.op) for step, event in training.events("anomaly")]


def test_step_is_published_during_a_pause_and_its_time_follows(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.publish.publisher.IDLE_FLUSH_SECONDS", 0.2)
    with Training() as training:
        training.train()
        began = time.monotonic()
        wait_until(training.rows)
        before = training.scalars("step_seconds")
        training.train()
        paused = time.monotonic() - began

    assert [] == before
    assert dict(training.scalars("step_seconds"))[1] >= paused - 5
    assert [1, 2] == training.measured()


def test_a_pause_between_two_optimizers_does_not_split_the_step(monkeypatch):
    monkeypatch.setattr("rankscope_exporter.publish.publisher.IDLE_FLUSH_SECONDS", 0.1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.Adam(part.parameters()) for part in net]
    with Watched(net, optimizers) as watched:
        net(torch.ones(1, 4)).sum().backward()
        optimizers[0].step()
        threading.Event().wait(0.6)
        optimizers[1].step()

    assert [1] == watched.measured()
    assert 4 == len(watched.rows("exp_avg"))


def test_nested_phases_have_totals_and_events():
    """A phase of another thread remains when a training phase ends: a checkpoint that ends after an evaluation."""
    shown: list[str | None] = []
    with Training() as training:
        state = training.session.channel

        @training.monitor.phase("evaluation")
        def evaluate(again: bool) -> None:
            with training.monitor.phase("checkpoint"):
                shown.append(state.phase)
            shown.append(state.phase)
            if again:
                evaluate(False)

        evaluate(True)
        shown.append(state.phase)
        evaluation, checkpoint = training.monitor.phase("evaluation"), training.monitor.phase("checkpoint")
        for change in (evaluation.__enter__, checkpoint.__enter__, evaluation.__exit__, checkpoint.__exit__):
            change(*(None,) * 3 if change.__name__ == "__exit__" else ())
            shown.append(state.phase)
    phases = [json.loads(event.details)["phase"] for _, event in training.events("phase")]
    scalars = [item for record in training.records for item in record.scalars if item.name == "phase_seconds"]
    totals = [
        [item.value for item in scalars if item.labels["phase"] == phase] for phase in ("evaluation", "checkpoint")
    ]

    assert [*["checkpoint", "evaluation"] * 2, None, "evaluation", "checkpoint", "checkpoint", None] == shown
    assert ["checkpoint", "checkpoint", "evaluation", "evaluation", "evaluation", "checkpoint"] == phases
    assert [sorted(found) for found in totals] == totals
    assert all(len(found) >= 3 for found in totals)


def test_lbfgs_makes_one_step_of_many_evaluations():
    net, _ = small()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 3)).square().sum()
        loss.backward()
        return loss

    with Watched(net, optimizer) as watched:
        for _ in range(3):
            optimizer.step(closure)

    assert ([1, 2, 3], []) == (watched.measured(), watched.skipped())


def test_fused_optimizer_that_skips_on_the_device_is_a_skipped_step():
    net, _ = small()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Watched(net, optimizer) as watched:
        for factor in (1.0, math.inf, 1.0):
            scaler.scale((net(torch.ones(3, 3)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert ([1, 2, 3], [2]) == (watched.measured(), watched.skipped())


def test_failed_backward_pass_does_not_hide_the_next_one():
    """In evaluation mode no forward hook begins a step, and the second backward pass fails in the middle."""
    training = Training()
    training.net.eval()
    fail = False

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        if fail:
            raise MemoryError("out of memory")
        return gradient

    training.net[0].weight.register_hook(explode)
    with training:
        for number in range(1, 6):
            fail = number == 2
            with suppress(MemoryError):
                training.train()

    assert [1, 3, 4, 5] == training.steps("grad_reduced", "0.weight")
    assert [2] == training.skipped()


def test_records_beyond_the_limit_of_the_queue_are_named_once(monkeypatch, caplog):
    monkeypatch.setattr(publisher, "MAX_QUEUE", 3)
    monkeypatch.setattr(publisher, "IDLE_FLUSH_SECONDS", 0.1)
    hold = threading.Event()
    with Training() as training:
        publish = training.session.publisher.publish
        training.session.publisher.publish = lambda record: hold.wait(20) and publish(record)
        for step in range(50):
            training.monitor.log(step=step, mine=step)
        hold.set()
        wait_until(lambda: training.events("gap"))

    assert training.events("gap")[0][1].value == 50 - len(training.scalars("mine"))
    assert 1 == caplog.text.count("records of this rank are lost")


def test_steps_beyond_the_backlog_limit_are_counted_as_dropped(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_BACKLOG", 3)
    hold = threading.Event()
    with Training() as training:
        publish = training.session.publisher.publish

        def slow(record: Any) -> int:
            hold.wait(20)
            return publish(record)

        training.session.publisher.publish = slow
        training.train(10, loss=1.0)
        hold.set()
        training.train()
        training.publish()
        dropped = page(training)["rankscope_dropped_total", (("reason", "publisher_behind"),)]
    measured = training.measured()

    assert 10 == len(training.scalars("loss"))
    assert 5 >= len(measured) >= 3
    assert 11 - len(measured) == dropped


def test_logging_from_other_threads_loses_nothing():
    with Training() as training:
        log = training.monitor.log
        threads = [threading.Thread(target=lambda n=n: [log(**{f"of_{n}": i}) for i in range(200)]) for n in range(3)]
        for thread in threads:
            thread.start()
        training.train(50)
        for thread in threads:
            thread.join()

    for number in range(3):
        assert list(range(200)) == [int(value) for _, value in training.scalars(f"of_{number}")]
    assert (list(range(1, 51)), 0) == (training.measured(), training.faults)


def test_gradients_computed_in_a_closure_are_read_after_clipping():
    """As in Lightning: forward, backward and clipping run inside `optimizer.step(closure)`."""
    net, optimizer = small()
    clipped: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 3)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        clipped.append(float(net[0].weight.grad.norm()))
        return loss

    with Watched(net, optimizer) as watched:
        optimizer.step(closure)
        optimizer.step(closure=closure)
    rows = {(row.step, row.entry.kind): row.numbers["norm"] for row in watched.rows() if row.entry.tensor == "0.weight"}

    assert 0 == watched.faults
    assert clipped == pytest.approx([rows[1, "grad_clipped"], rows[2, "grad_clipped"]])
    assert all(rows[step, "grad_reduced"] > 10 * rows[step, "grad_clipped"] for step in (1, 2))


LONG = "x" * 100_000
ENTRANCES = (
    *("run", "scalar", "key", "event", "details", "key of details", "phase", "setting", "argument", "exception"),
    *("header", "environment"),
)


def secret(entrance: str) -> str:
    return f"pw{ENTRANCES.index(entrance):02}sEcret1"


def url(entrance: str) -> str:
    return f"https://bob:{secret(entrance)}@host/x"


def trained(monitor: Monitor) -> BaseException:
    model = nn.Sequential()
    for end in "ab":
        model.add_module(f"{LONG}{end}", nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    monitor.attach(model, optimizer)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        monitor.log(**{url("scalar"): 1.0, "loss": {url("key"): 2.0}, f"{LONG}a": 1.0, f"{LONG}b": 2.0})
    with monitor.phase(url("phase")):
        monitor.event("note", f"password={secret('event')} {LONG}", of=url("details"), **{url("key of details"): 1})
    return ValueError(f"{url('exception')} Authorization: Bearer {secret('header')} {LONG}")


def pages(monitor: Monitor) -> str:
    found = [urllib.request.urlopen(f"{monitor.address}{path}", timeout=10).read() for path in ("/metrics", "/config")]
    return b"".join(found).decode()


def test_no_secret_and_no_long_text_of_a_training_leaves_its_rank(tmp_path, quiet, reader, monkeypatch, caplog, capfd):
    monkeypatch.setattr("rankscope_contract.model.redaction._cut", [])  # it is logged once for each process
    monkeypatch.setattr("sys.argv", ["train.py", "--password", secret("argument")])
    monkeypatch.setenv("HOSTNAME", f"https://a:{secret('environment')}@host")
    sinks = {name: {"folder": str(tmp_path / name)} for name in ("tensorboard", "csv")}
    hyper = {"api_key": secret("setting"), "text": LONG}
    monkeypatch.setenv("RANKSCOPE_SPOOL_DIR", str(tmp_path / "records"))
    monitor = Monitor(replace(quiet, console=True, sinks=sinks, run=url("run"), hyperparameters=hyper))
    error = trained(monitor)
    records, shown = reader(monitor).records(), pages(monitor)
    monitor.__exit__(type(error), error, None)
    spooled = [pa.ipc.open_stream(path).read_all().to_pylist() for path in (tmp_path / "records").rglob("*.arrows")]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = "".join(path.read_bytes().decode("latin-1") + str(path) for path in files)
    texts = [repr(records), repr(spooled), shown, written, caplog.text, *capfd.readouterr()]

    assert [] == [(name, place) for name in ENTRANCES for place, text in enumerate(texts) if secret(name) in text]
    assert [] == [place for place, text in enumerate(texts) if LONG[: MAX_TEXT + 1] in text]
    events = [event for part in spooled for record in part for event in record.get("events") or ()]
    assert "exception: ValueError: https://***@host/x Authorization: Bearer *** xxx" in repr(events)
    assert "… (100,077 characters)" in next(event["message"] for event in events if event["type"] == "exit")
    plans = [Plan.from_json(path.read_text()) for path in (tmp_path / "records").rglob("plan-*.json")]
    names = {entry.tensor for plan in plans for entry in plan.entries}
    assert 4 == len(names)  # two weights and two biases, whose long names differ at the end
    logged = {scalar["name"] for part in spooled for record in part for scalar in record.get("scalars") or ()}
    assert 2 == len([name for name in logged if name.startswith("xxx")])
    assert "https://***@host/x" in logged
    assert MAX_NAME == max(map(len, names | logged))
    assert 1 == caplog.text.count("Rankscope cuts a text of 100,001 characters")
