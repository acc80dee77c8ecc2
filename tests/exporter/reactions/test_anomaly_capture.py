"""A firing starts a capture for some steps, names the samples and calls `on_anomaly`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.conftest import wait_until
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Anomaly, AnomalyNan, AnomalyTurbulence, ConfigError, Monitor, MonitorConfig
from rankscope_exporter.records.step_record import Scalar

CAPTURE: dict[str, Any] = {"quantities": ["activations"], "steps": 3, "cooldown_steps": 6}
PLAIN: dict[str, Any] = {
    "quantities": ["parameters"],
    "rules": [AnomalyNan()],
    "every": 4,
    "console": False,
    "exit_wait_seconds": 0,
}


class Training:
    """A training that logs a loss at every step, NaN at some, and waits for the capture after those."""

    def __init__(self, *, on_anomaly: Callable[[Anomaly], object] | None = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.monitor = Monitor({**PLAIN, "capture": CAPTURE, **settings}, on_anomaly=on_anomaly)
        self.monitor.attach(self.net, self.optimizer)
        session = session_of(self.monitor)
        self.change_queue, self.ring, self.publisher = session.change_queue, session.channel.ring, session.publisher
        self.step = 0

    def train(self, steps: int, *, loss: float = 1.0, ids: Callable[[int], Any] = lambda step: [step]) -> None:
        for _ in range(steps):
            self.step += 1
            self.monitor.batch(ids(self.step))
            self.net(torch.ones(2, 3)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.log(loss=loss)

    def fire(self, **more: Any) -> None:
        """Make one step with a NaN loss, and wait until it is published."""
        self.train(1, loss=float("nan"), **more)
        self.monitor.end_step()
        assert self.publisher.catch_up(60)

    def finish(self) -> None:
        self.monitor.detach()
        self.records = self.ring.after(-1, 1 << 30).records
        assert 0 == self.monitor.faults

    def steps_with(self, kind: str) -> list[int | None]:
        """Return the numbers of the steps with statistics of `kind`."""
        found = []
        for record in self.records:
            if record.statistics is not None:
                entries = record.statistics.plan.plan.entries
                sizes = record.statistics.counts[-len(entries) :]
                if any(e.kind == kind and n.is_valid for e, n in zip(entries, sizes, strict=True)):
                    found.append(record.step)
        return found

    def published_events(self) -> list[Any]:
        return [event for record in self.ring.after(-1, 1 << 30).records for event in record.events]

    def told(self, state: str) -> list[dict[str, Any]]:
        events = [e for r in self.records for e in r.events if e.type == "capture"]
        return [d for e in events if (d := {**json.loads(e.details or ""), "rule": e.rule})["state"] == state]


def hooks(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def test_firing_adds_quantities_for_some_steps_and_changes_nothing_else():
    training = Training()
    training.train(5)
    before = hooks(training.net)
    training.fire()
    training.train(9)
    after = hooks(training.net)
    training.finish()

    assert [7, 8, 9] == training.steps_with("act_out")
    assert [1, 5, 9, 13] == training.steps_with("param_before")
    assert before == after
    (asked,), (began,), (ended,) = (training.told(state) for state in ("asked", "began", "ended"))
    assert ("AnomalyNan", 6, {"6": [[6]]}) == (asked["rule"], asked["fired_step"], asked["samples"])
    assert (7, 9) == (began["first_step"], began["last_step"])
    assert ({"7": [[7]], "8": [[8]], "9": [[9]]}, False) == (ended["samples"], ended["cut_short"])


def test_capture_of_an_active_quantity_keeps_its_schedule():
    """Parameters are sampled at every 4th step, at most 3 times."""
    training = Training(capture={**CAPTURE, "quantities": ["parameters"]}, times=3)
    training.train(1)
    training.fire()
    training.train(14)
    training.finish()

    assert [1, 3, 4, 5, 9] == training.steps_with("param_before")


def test_quantity_can_be_captured_with_other_options():
    """Its rows replace those of the active quantity, which continues afterwards with its own rows."""
    capture = {**CAPTURE, "options": {"parameters": {"targets": ["0.*"]}}, "quantities": ["parameters"]}
    training = Training(capture=capture, options={"parameters": {"targets": ["0.weight", "2.*"]}}, every=2)
    training.train(3)
    training.fire()
    training.train(6)
    training.finish()
    found: dict[int | None, list[str]] = {}
    for record in training.records:
        if record.statistics is not None:
            entries = record.statistics.plan.plan.entries
            sizes = record.statistics.counts[-len(entries) :]
            measured = [e.tensor for e, n in zip(entries, sizes, strict=True) if n.is_valid and e.kind == "param_after"]
            found[record.step] = sorted(measured)

    usual, captured = ["0.weight", "2.bias", "2.weight"], ["0.bias", "0.weight"]
    assert {1: usual, 3: usual, 5: captured, 6: captured, 7: captured, 9: usual} == found


@pytest.mark.parametrize(("options", "count"), [({}, 6), ({"targets": ["0.*"]}, 0)])
def test_entries_of_a_capture_leave_the_plan_and_return_with_the_next_one(options, count):
    quantity = "parameters" if options else "activations"
    capture = {**CAPTURE, "quantities": [quantity], "options": {quantity: options}, "cooldown_steps": 1}
    training = Training(capture=capture, every=1)
    training.train(1)
    training.fire()
    training.train(30)
    training.fire()
    training.train(6)
    training.finish()
    plans = [len(r.statistics.plan.plan.entries) for r in training.records if r.statistics is not None]

    assert plans[0] == plans[1] == plans[31] < plans[2] == plans[33]
    assert count == len(training.steps_with("act_out"))


def test_firings_in_the_cooldown_or_above_the_limit_start_no_capture():
    training = Training(capture={**CAPTURE, "max_captures": 2})
    for _ in range(20):
        training.fire()
    training.finish()

    assert [1, 8] == [told["fired_step"] for told in training.told("asked")]  # 6 steps of cooldown
    assert [2, 3, 4, 9, 10, 11] == training.steps_with("act_out")


def test_a_switch_ends_a_capture():
    training = Training()
    training.fire()
    training.train(1)
    training.monitor.switch({"quantities": ["parameters"], "every": 1})
    training.train(3)
    training.finish()

    assert [2] == training.steps_with("act_out")
    assert [1, 3, 4, 5] == training.steps_with("param_before")
    assert [True] == [told["cut_short"] for told in training.told("ended")]


def test_the_end_of_training_ends_a_capture():
    training = Training()
    training.fire()
    training.train(2)
    training.finish()

    assert [{"2": [[2]], "3": [[3]]}] == [told["samples"] for told in training.told("ended")]


def test_capture_that_does_not_begin_before_the_end_is_reported():
    """The rule fires at the last step. The capture would begin with the next one."""
    training = Training()
    training.train(2)
    training.train(1, loss=float("nan"))
    training.finish()

    assert [3] == [told["fired_step"] for told in training.told("asked")]
    assert [] == training.told("began")
    assert [3] == [told["fired_step"] for told in training.told("missed")]


def test_capture_that_began_is_not_reported_as_missed():
    training = Training()
    training.fire()
    training.train(9)
    training.finish()

    assert [2] == [told["first_step"] for told in training.told("began")]
    assert [] == training.told("missed")


def test_only_configured_rules_start_a_capture():
    rules = [AnomalyNan(), AnomalyNan(name="large", threshold=1e15)]
    training = Training(rules=rules, capture={**CAPTURE, "rules": ["large"]})
    training.fire()
    training.train(2)
    training.train(1, loss=1e16)
    training.monitor.end_step()
    training.publisher.catch_up(60)
    training.train(4)
    training.finish()

    assert [(4, "large")] == [(told["fired_step"], told["rule"]) for told in training.told("asked")]


def test_training_with_captures_is_bit_identical():
    def weights(capture: Any) -> list[torch.Tensor]:
        training = Training(capture=capture)
        training.train(2)
        training.fire()
        training.train(5)
        training.finish()
        return [parameter.detach() for parameter in training.net.parameters()]

    assert all(torch.equal(*pair) for pair in zip(weights(None), weights(CAPTURE), strict=True))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([3, 1], [3, 1]),
        (("a.jpg", "b.jpg"), ["a.jpg", "b.jpg"]),
        (torch.tensor([[7, 8]]), [7, 8]),
        ({"shard": 3, "rows": [1, 2]}, {"shard": 3, "rows": [1, 2]}),
        ("epoch 1, batch 3", "epoch 1, batch 3"),
        (range(3), [0, 1, 2]),
        ({(1, 2): "a"}, "a dict that JSON cannot hold: TypeError"),
        ([float("nan")], "a list that JSON cannot hold: ValueError"),
    ],
)
def test_sample_ids_are_json_values_or_a_tensor(said, expected):
    training = Training()
    training.fire(ids=lambda _: said)
    training.finish()

    assert [{"1": [expected]}] == [told["samples"] for told in training.told("asked")]


def test_sample_ids_belong_to_the_step_of_the_next_forward_pass():
    """Two micro-batches; the second one is named during the step."""
    training = Training()
    for ids in ([1, 2], [3, 4]):
        training.monitor.batch(ids)
        training.net(torch.ones(2, 3)).sum().backward()
    training.optimizer.step()
    training.monitor.log(loss=float("nan"))
    training.monitor.batch([5, 6])
    training.net(torch.ones(2, 3)).sum().backward()
    training.publisher.catch_up(60)
    training.finish()

    assert [{"1": [[1, 2], [3, 4]]}] == [told["samples"] for told in training.told("asked")]


def test_sample_ids_of_an_evaluation_belong_to_no_step():
    training = Training()
    for ids in (["seen", 1], ["seen", 2]):
        training.monitor.batch(ids)
        with torch.no_grad():
            training.net(torch.ones(2, 3))
    training.fire()
    training.finish()

    assert [{"1": [[1]]}] == [told["samples"] for told in training.told("asked")]


def test_sample_ids_of_an_evaluated_then_trained_batch_belong_to_the_step():
    """As for a reference model that is the same model without adapters."""
    training = Training()
    training.monitor.batch([7])
    with torch.no_grad():
        training.net(torch.ones(2, 3))
    training.net(torch.ones(2, 3)).sum().backward()
    training.optimizer.step()
    training.monitor.log(loss=float("nan"))
    training.finish()

    assert [{"1": [[7]]}] == [told["samples"] for told in training.told("asked")]


def test_sample_ids_of_training_in_evaluation_mode_belong_to_the_step():
    training = Training()
    training.net.eval()
    training.train(2)
    training.fire()
    training.finish()

    assert [{"3": [[3]]}] == [told["samples"] for told in training.told("asked")]


def test_iterator_of_sample_ids_is_not_consumed():
    training = Training()
    ids = iter([1, 2])
    training.monitor.batch(ids)

    assert [1, 2] == list(ids)
    training.finish()


def test_only_the_first_of_many_sample_ids_are_read():
    training = Training()
    training.fire(ids=lambda _: range(10**12))
    training.finish()
    (told,) = training.told("asked")

    assert 10**12 == len(told["samples"]["1"][0]) + told["samples_left_out"]


def test_sample_ids_that_do_not_fit_an_event_are_counted():
    training = Training()
    training.fire(ids=lambda _: [f"{'x' * 40}{i}" for i in range(5000)])
    training.finish()
    (told,) = training.told("asked")

    assert 5000 == len(told["samples"]["1"][0]) + told["samples_left_out"]
    assert 0 < len(json.dumps(told)) < 20_000


def test_on_anomaly_is_called_once_per_step_on_another_thread():
    seen: list[tuple[Anomaly, str]] = []
    training = Training(capture=None, on_anomaly=lambda a: seen.append((a, threading.current_thread().name)))
    training.train(1)
    training.train(1, loss=float("nan"))
    with torch.no_grad():
        training.net[0].weight[0, 0] = float("nan")
    training.train(3)
    training.finish()

    assert [2, 5] == [anomaly.step for anomaly, _ in seen]  # step 5 is the next sampled step of the parameters
    assert {"rankscope-on-anomaly"} == {name for _, name in seen} - {threading.current_thread().name}
    loss, first = seen[0][0], seen[1][0]
    assert ("AnomalyNan", None, "loss") == (loss.rule, loss.tensor, loss.op)
    assert ("AnomalyNan", "param_before", "nans") == (first.rule, first.kind, first.op)
    assert (training.monitor.run or first.run, 0, ([5],)) == (first.run, first.rank, first.samples)
    assert len(first.events) > 1


def test_failing_or_slow_on_anomaly_delays_nothing():
    gate, calls = threading.Event(), []

    def told(anomaly: Anomaly) -> None:
        calls.append(anomaly.step)
        gate.wait(60)
        raise OSError("no pager")

    training = Training(capture=None, on_anomaly=told)
    for _ in range(100):
        training.fire()
    dropped = session_of(training.monitor).reactions.dropped()["on_anomaly"]
    published = len([r for r in training.ring.after(-1, 1 << 30).records if any(e.type == "anomaly" for e in r.events)])
    gate.set()
    training.monitor.detach()
    wait_until(lambda: len(calls) == 100 - dropped)

    assert (100, 35) == (published, dropped)  # one call is running, 64 wait
    assert 65 == training.monitor.faults


@pytest.mark.parametrize(
    ("capture", "why"),
    [
        ({"quantites": []}, "Did you mean capture.quantities"),
        ({"quantities": ["activation"]}, "Did you mean 'activations'"),
        ({"rules": ["AnomalyNaN"]}, "Did you mean 'AnomalyNan'"),
        ({"rules": "AnomalyNan"}, r"write \['AnomalyNan'\]"),
        ({"steps": 0}, "capture.steps must be a whole number of at least 1"),
        ({"cooldown_steps": -1}, "capture.cooldown_steps must be a whole number of at least 0"),
        ({"options": {"activations": {"target": []}}}, "Did you mean options.activations.targets"),
        ({"options": {"router": {}}}, "add 'router' to capture.quantities"),
        ({"flight_record": "yes"}, "capture.flight_record must be true or false"),
        (True, "capture must be a table of settings"),
    ],
)
def test_invalid_capture_settings_raise_with_the_fix(capture, why):
    with pytest.raises(ConfigError, match=why):
        MonitorConfig.from_mapping({"capture": capture})


def test_all_rules_start_captures_with_a_star_and_by_default():
    both = (MonitorConfig(capture={"rules": "*"}), MonitorConfig(capture={}))  # type: ignore[arg-type]  # a mapping

    assert 2 == sum(c.capture is not None and c.capture.chooses("anything") for c in both)


def test_on_anomaly_must_be_a_function():
    with pytest.raises(ConfigError, match="on_anomaly must be a function"):
        Monitor(on_anomaly="notify")  # type: ignore[arg-type]  # as a script may have it


def test_capture_rules_are_names_of_rules_of_the_monitor():
    rules = (AnomalyTurbulence(threshold=3.0, name="spike"),)

    assert MonitorConfig(rules=rules, capture={"rules": ["spike"]}).capture is not None  # type: ignore[arg-type]


# Independent parts of a capture.


def failing(*_: Any, **__: Any) -> Any:
    raise OSError("no such device")


def test_failed_capture_request_keeps_the_flight_record(monkeypatch):
    taken: list[str] = []
    training = Training()
    captures = session_of(training.monitor).reactions.captures
    monkeypatch.setattr(captures._sources, "request_reaction", failing)
    monkeypatch.setattr(captures, "_take_flight_record", lambda: taken.append("taken"))
    training.train(2)
    training.fire()
    wait_until(lambda: taken)
    training.monitor.detach()

    assert (["taken"], 1) == (taken, training.monitor.faults)


def test_capture_with_unremovable_hooks_ends(monkeypatch):
    training = Training()
    captures = session_of(training.monitor).reactions.captures
    monkeypatch.setattr(captures, "_release", failing)
    training.train(2)
    training.fire()
    training.train(9)
    training.monitor.detach()
    training.records = training.ring.after(-1, 1 << 30).records

    assert [False] == [told["cut_short"] for told in training.told("ended")]
    assert 1 == training.monitor.faults


def test_unreadable_samples_keep_event_and_callback(monkeypatch):
    seen: list[tuple[Any, ...]] = []
    training = Training(on_anomaly=lambda anomaly: seen.append((anomaly.step, anomaly.samples)))
    training.train(2)
    monkeypatch.setattr("rankscope_exporter.records.pending_step.Transfer.wait", failing)
    monkeypatch.setattr(
        "rankscope_exporter.records.pending_step.Pending.scalar", lambda item: Scalar(item.name, item.value)
    )
    training.fire(ids=lambda step: torch.tensor([step]))
    # Two threads read the samples, for the callback and for the event. Both must do so before the device recovers.
    wait_until(lambda: seen and any(event.type == "capture" for event in training.published_events()))
    monkeypatch.undo()
    training.finish()

    assert [(3, ("a tensor that cannot be read: OSError",))] == seen
    assert [{"3": ["a tensor that cannot be read: OSError"]}] == [told["samples"] for told in training.told("asked")]


def test_failed_lookup_of_batches_keeps_the_callback(monkeypatch):
    seen: list[tuple[Any, ...]] = []
    training = Training(on_anomaly=lambda anomaly: seen.append((anomaly.step, anomaly.samples)))
    training.train(2)
    monkeypatch.setattr(session_of(training.monitor).reactions.callbacks, "_samples", failing)
    training.fire()
    wait_until(lambda: seen)
    training.monitor.detach()

    assert ([(3, ())], 1) == (seen, training.monitor.faults)
