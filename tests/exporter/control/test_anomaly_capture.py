"""A firing starts a capture for some steps on all ranks, names the samples and calls `on_anomaly`."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter import parts
from tests.exporter.conftest import wait_until
from tests.exporter.parts import QUIET, hooks_of
from tests.programs import run_two_ranks

from rankscope_exporter import Anomaly, AnomalyNan, Monitor
from rankscope_exporter.records.record import Scalar

NAN = float("nan")
CAPTURE: dict[str, Any] = {"quantities": ["activations"], "steps": 3, "cooldown_steps": 6}
PLAIN: dict[str, Any] = QUIET | {"quantities": ["parameters"], "rules": [AnomalyNan()], "every": 4, "capture": CAPTURE}


class Training(parts.Watched):
    """A training that logs a loss at every step, NaN at some, and waits for the capture after those."""

    def __init__(self, *, on_anomaly: Callable[[Anomaly], object] | None = None, **settings: Any) -> None:
        super().__init__(*parts.small(), monitor=Monitor(PLAIN | settings, on_anomaly=on_anomaly))
        self.step = 0

    def forward(self, ids: Any) -> torch.Tensor:
        self.monitor.batch(ids)
        return self.net(torch.ones(2, 3)).sum()

    def train(self, steps: int = 1, *, loss: float = 1.0, ids: Callable[[int], Any] = lambda step: [step]) -> None:
        for _ in range(steps):
            self.step += 1
            self.forward(ids(self.step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.log(loss=loss)

    def fire(self, loss: float = NAN, **more: Any) -> None:
        """Make one step with a loss that fires, and wait until it is published."""
        self.train(loss=loss, **more)
        self.publish()

    def told(self, state: str) -> list[dict[str, Any]]:
        found = [{**json.loads(event.details or ""), "rule": event.rule} for _, event in self.events("capture")]
        return [details for details in found if details["state"] == state]

    def samples(self) -> list[Any]:
        assert 0 == self.faults
        return [told["samples"] for told in self.told("asked")]


def test_firing_adds_quantities_for_some_steps_and_changes_nothing_else():
    with Training() as training:
        training.train(5)
        before = hooks_of(training.net)
        training.fire()
        training.train(9)
        after = hooks_of(training.net)
    (asked,), (began,), (ended,) = (training.told(state) for state in ("asked", "began", "ended"))

    assert ([7, 8, 9], [1, 5, 9, 13]) == (training.steps("act_out"), training.steps("param_before"))
    assert (before, [], 0) == (after, training.told("missed"), training.faults)
    assert ("AnomalyNan", 6, {"6": [[6]]}) == (asked["rule"], asked["fired_step"], asked["samples"])
    assert (7, 9) == (began["first_step"], began["last_step"])
    assert ({"7": [[7]], "8": [[8]], "9": [[9]]}, False) == (ended["samples"], ended["cut_short"])


def test_only_two_hooks_on_the_whole_model_wait_for_a_capture():
    hooks = []
    for capture in (None, CAPTURE):
        with Training(capture=capture) as training:
            training.train(3)
            hooks.append(hooks_of(training.net))

    assert hooks[0] + 2 == hooks[1]


def test_capture_of_an_active_quantity_keeps_its_schedule():
    """Parameters are sampled at every 4th step, at most 3 times."""
    with Training(capture={**CAPTURE, "quantities": ["parameters"]}, times=3) as training:
        training.train()
        training.fire()
        training.train(14)

    assert [1, 3, 4, 5, 9] == training.steps("param_before")


def test_quantity_can_be_captured_with_other_options():
    """Its rows replace those of the active quantity, which continues afterwards with its own rows."""
    capture = {**CAPTURE, "options": {"parameters": {"targets": ["0.*"]}}, "quantities": ["parameters"]}
    with Training(capture=capture, options={"parameters": {"targets": ["0.weight", "2.*"]}}, every=2) as training:
        training.train(3)
        training.fire()
        training.train(6)
    found: dict[int, list[str]] = {}
    for row in training.rows("param_after"):
        found[row.step] = sorted([*found.get(row.step, []), row.entry.tensor])

    usual, captured = ["0.weight", "2.bias", "2.weight"], ["0.bias", "0.weight"]
    assert {1: usual, 3: usual, 5: captured, 6: captured, 7: captured, 9: usual} == found


def test_firings_in_the_cooldown_or_above_the_limit_start_no_capture():
    with Training(capture={**CAPTURE, "max_captures": 2}) as training:
        for _ in range(20):
            training.fire()

    assert [1, 8] == [told["fired_step"] for told in training.told("asked")]  # 6 steps of cooldown
    assert [2, 3, 4, 9, 10, 11] == training.steps("act_out")


def test_a_switch_ends_a_capture():
    with Training() as training:
        training.fire()
        training.train()
        training.monitor.switch({"quantities": ["parameters"], "every": 1})
        training.train(3)

    assert ([2], [1, 3, 4, 5]) == (training.steps("act_out"), training.steps("param_before"))
    assert [True] == [told["cut_short"] for told in training.told("ended")]


def test_the_end_of_training_ends_a_capture():
    with Training() as training:
        training.fire()
        training.train(2)

    assert [{"2": [[2]], "3": [[3]]}] == [told["samples"] for told in training.told("ended")]


def test_capture_that_does_not_begin_before_the_end_is_reported():
    """The rule fires at the last step. The capture would begin with the next one."""
    with Training() as training:
        training.train(2)
        training.train(loss=NAN)

    assert [] == training.told("began")
    assert [[3], [3]] == [[told["fired_step"] for told in training.told(state)] for state in ("asked", "missed")]


def test_only_configured_rules_start_a_capture():
    rules = [AnomalyNan(), AnomalyNan(name="large", threshold=1e15)]
    with Training(rules=rules, capture={**CAPTURE, "rules": ["large"]}) as training:
        training.fire()
        training.train(2)
        training.fire(1e16)
        training.train(4)

    assert [(4, "large")] == [(told["fired_step"], told["rule"]) for told in training.told("asked")]


def test_training_with_captures_is_bit_identical():
    def weights(capture: Any) -> list[torch.Tensor]:
        with Training(capture=capture) as training:
            training.train(2)
            training.fire()
            training.train(5)
        return [parameter.detach() for parameter in training.net.parameters()]

    assert all(map(torch.equal, weights(None), weights(CAPTURE)))


def test_sample_ids_are_json_values_or_a_tensor():
    cases: list[tuple[Any, Any]] = [
        *(([3, 1], [3, 1]), (("a.jpg", "b.jpg"), ["a.jpg", "b.jpg"]), (torch.tensor([[7, 8]]), [7, 8])),
        *(({"shard": 3, "rows": [1, 2]}, {"shard": 3, "rows": [1, 2]}), ("epoch 1, batch 3", "epoch 1, batch 3")),
        *((range(3), [0, 1, 2]), ({(1, 2): "a"}, "a dict that JSON cannot hold: TypeError")),
        ([NAN], "a list that JSON cannot hold: ValueError"),
    ]
    with Training(capture=CAPTURE | {"cooldown_steps": 0, "steps": 1}) as training:
        for ids, _ in cases:
            training.fire(ids=lambda _, ids=ids: ids)
            training.train(2)

    assert [{str(3 * place + 1): [expected]} for place, (_, expected) in enumerate(cases)] == training.samples()


def test_sample_ids_belong_to_the_step_of_the_next_forward_pass():
    """Two micro-batches; the second one is named during the step. An iterator is not consumed."""
    ids = iter([1, 2])
    with Training() as training:
        for batch in ([1, 2], [3, 4]):
            training.forward(batch).backward()
        training.optimizer.step()
        training.monitor.log(loss=NAN)
        training.forward(ids).backward()

    assert [{"1": [[1, 2], [3, 4]]}] == training.samples()
    assert [1, 2] == list(ids)


def test_sample_ids_of_an_evaluation_belong_to_no_step():
    """Those of a batch that is evaluated, then trained, do, as for a reference model without adapters."""
    with Training() as training:
        with torch.no_grad():
            for ids in (["seen", 1], ["seen", 2]):
                training.forward(ids)
            training.forward([7])
        training.net(torch.ones(2, 3)).sum().backward()
        training.optimizer.step()
        training.monitor.log(loss=NAN)

    assert [{"1": [[7]]}] == training.samples()


def test_sample_ids_of_training_in_evaluation_mode_belong_to_the_step():
    with Training() as training:
        training.net.eval()
        training.train(2)
        training.fire()

    assert [{"3": [[3]]}] == training.samples()


@pytest.mark.parametrize("ids", [range(10**12), [f"{'x' * 40}{i}" for i in range(5000)]])
def test_sample_ids_that_do_not_fit_an_event_are_counted(ids):
    with Training() as training:
        training.fire(ids=lambda _: ids)
    (told,) = training.told("asked")

    assert len(ids) == len(told["samples"]["1"][0]) + told["samples_left_out"]
    assert 0 < len(json.dumps(told)) < 20_000


def test_on_anomaly_is_called_once_per_step_on_another_thread():
    seen: list[tuple[Anomaly, str]] = []
    with Training(capture=None, on_anomaly=lambda a: seen.append((a, threading.current_thread().name))) as training:
        training.train()
        training.train(loss=NAN)
        with torch.no_grad():
            training.net[0].weight[0, 0] = NAN
        training.train(3)

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
    dropped = training.session.callbacks.dropped
    published = len({step for step, _ in training.events("anomaly")})
    gate.set()
    training.monitor.detach()
    wait_until(lambda: len(calls) == 100 - dropped)

    assert (100, 35) == (published, dropped)  # one call is running, 64 wait
    assert 65 == training.faults


def failing(*_: Any, **__: Any) -> Any:
    raise OSError("no such device")


def test_failed_capture_request_keeps_the_flight_record_and_the_callback(monkeypatch):
    """Also if the batches cannot be looked up."""
    taken: list[str] = []
    seen: list[tuple[Any, ...]] = []
    with Training(on_anomaly=lambda anomaly: seen.append((anomaly.step, anomaly.samples))) as training:
        session = training.session
        monkeypatch.setattr(session.change_sources, "request_reaction", failing)
        monkeypatch.setattr(session.captures, "take_flight_record", lambda _: taken.append("taken"))
        monkeypatch.setattr(session.callbacks, "_samples", failing)
        training.train(2)
        training.fire()
        wait_until(lambda: taken and seen)

    assert (["taken"], [(3, ())], 2) == (taken, seen, training.faults)


def test_capture_with_unremovable_hooks_ends(monkeypatch):
    with Training() as training:
        monkeypatch.setattr(training.session.active_quantities, "release", failing)
        training.train(2)
        training.fire()
        training.train(9)

    assert [False] == [told["cut_short"] for told in training.told("ended")]
    assert 1 == training.faults


def test_unreadable_samples_keep_event_and_callback(monkeypatch):
    seen: list[tuple[Any, ...]] = []
    with Training(on_anomaly=lambda anomaly: seen.append((anomaly.step, anomaly.samples))) as training:
        training.train(2)
        module = "rankscope_exporter.records.record"
        monkeypatch.setattr(f"{module}.Transfer.wait", failing)
        monkeypatch.setattr(f"{module}.Pending.scalar", lambda item: Scalar(item.name, item.value))
        training.fire(ids=lambda step: torch.tensor([step]))
        # Two threads read the samples, for the callback and for the event. Both must do so before the device recovers.
        wait_until(lambda: seen and training.told("asked"))
        monkeypatch.undo()

    assert [(3, ("a tensor that cannot be read: OSError",))] == seen
    assert [{"3": ["a tensor that cannot be read: OSError"]}] == training.samples()


PROGRAM = """
import time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from rankscope_exporter import Monitor

LIMIT, STEP = 4000, 1.0
QUIET = {
    "quantities": ["parameters"], "switch_poll_seconds": 0.1, "console": False, "exit_wait_seconds": 0,
    "serve": {"ring_records": 3 * LIMIT},
}

def make():
    torch.manual_seed(7)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    return net, torch.optim.SGD(net.parameters(), lr=0.01)

def train(net, optimizer, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    loss = net(torch.randn(6, 4, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def agreed(*flags):
    told = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(told)
    return (told == dist.get_world_size()).tolist()

def details(records, kind):
    return [json.loads(e.details) for r in records for e in r.events if e.type == kind]

def captures():
    net, optimizer = make()
    anomalies = []
    config = {
        **QUIET, "every": 50, "rules": [{"rule_name": "AnomalyNan"}],
        "capture": {"quantities": ["activations"], "steps": 3, "cooldown_steps": 10_000},
    }
    monitor = Monitor(config, on_anomaly=lambda a: anomalies.append([a.rule, a.step, a.samples]))
    monitor.attach(net, optimizer)
    ring = monitor._session.channel.ring
    step, done = 0, False
    while not done and step < LIMIT:
        step += 1
        ids = [100 * step + 10 * rank + i for i in range(2)]
        monitor.batch(torch.tensor(ids) if step % 2 else ids)
        loss = train(net, optimizer, step)
        monitor.log(loss=float("nan") if step == 12 and rank == 1 else loss)
        time.sleep(0.002)
        if step % 20 == 0:
            told = details(ring.after(-1, 1 << 30).records, "capture")
            (done,) = agreed(any(one["state"] == "ended" for one in told))
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    captured = []
    for record in records:
        if record.statistics is not None:
            entries = record.statistics.plan.plan.entries
            sizes = record.statistics.counts[-len(entries):]
            if any(e.kind == "act_out" and n.is_valid for e, n in zip(entries, sizes)):
                captured.append(record.step)
    bare, bare_optimizer = make()
    for number in range(1, step + 1):
        train(bare, bare_optimizer, number)
    same = all(torch.equal(a, b) for a, b in zip(net.parameters(), bare.parameters()))
    return {
        "captured": captured, "anomalies": anomalies, "same": same, "faults": monitor.faults,
        "told": details(records, "capture"), "flight": [one["reason"] for one in details(records, "flight_record")],
    }

now = cost = 0.0  # of this rank: a clock and a cost that the program moves

def stretches():
    global now, cost
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor({**QUIET, "max_overhead": 0.2}).attach(net, optimizer)
    session = monitor._session
    controller, ring = session.overhead_controller, session.channel.ring
    controller.clock, controller.cost = lambda: now, lambda: cost
    was_high = done = False
    for step in range(1, LIMIT):
        net(torch.ones(2, 3)).sum().backward()
        if rank == 1 and not was_high and session.current_step.is_sampled:
            now, cost = now + STEP, cost + STEP  # half of the time
        optimizer.step()
        optimizer.zero_grad()
        now += STEP
        time.sleep(0.003 - 0.002 * rank)  # the ranks do not keep pace
        if step % 10 == 0:  # except for a comparison of their states
            is_high, is_low = agreed(controller.stretch >= 4, controller.stretch == 1)
            was_high |= is_high
            if was_high and is_low:
                break
    monitor.detach()
    records = ring.after(-1, 1 << 30).records
    measured = [r.step for r in records if r.statistics is not None]
    return {"measured": measured, "events": details(records, "budget"), "faults": monitor.faults, "steps": step}

def main():
    return {"captures": captures(), "stretches": stretches()}
"""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_two_ranks(PROGRAM)


def test_both_ranks_capture_the_same_configured_number_of_steps(ranks):
    """Each reports the firing rank and the captured steps, and has a flight record. Training is bit-identical."""
    one, other = (rank["captures"] for rank in ranks)
    first = one["captured"][0]

    assert [first, first + 1, first + 2] == one["captured"] == other["captured"]
    assert first > 12
    for number, rank in enumerate((one, other)):
        (began,), (ended,) = ([told for told in rank["told"] if told["state"] == state] for state in ("began", "ended"))
        ids = {str(step): [[100 * step + 10 * number + i for i in range(2)]] for step in rank["captured"]}
        assert (1, 12, first, first + 2) == tuple(began[k] for k in ("rank", "fired_step", "first_step", "last_step"))
        assert first == began["agreed_step"]
        assert "loss is nan" in began["reason"]
        assert ids == ended["samples"]
        assert (["capture"], True, 0) == (rank["flight"], rank["same"], rank["faults"])


def test_on_anomaly_is_called_on_the_rank_that_fired(ranks):
    """Its event has the samples of the step that fired."""
    events = [[told for told in rank["captures"]["told"] if told["state"] == "asked"] for rank in ranks]

    assert [[], [{"12": [[1210, 1211]]}]] == [[told["samples"] for told in asked] for asked in events]
    assert [[], [["AnomalyNan", 12, [[1210, 1211]]]]] == [rank["captures"]["anomalies"] for rank in ranks]


def test_rank_above_max_overhead_stretches_all_ranks(ranks):
    """All ranks sample the same steps throughout, and return to the interval when all overheads are low."""
    one, other = (rank["stretches"] for rank in ranks)
    up = [event for event in one["events"] if event["now"] > event["was"]]

    assert one["measured"] == other["measured"]
    assert len(one["measured"]) < one["steps"]
    assert (one["events"], 0, 0) == (other["events"], one["faults"], other["faults"])
    assert {1} == {event["rank"] for event in up}
    assert all(event["share"] > 0.2 for event in up)
    assert 1 == one["events"][-1]["now"]
    assert all(event["step"] == event["agreed_step"] for event in one["events"])
