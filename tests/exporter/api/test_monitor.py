"""One process: what the monitor records of a training loop, against float64 references; its end without model."""

import gc
import json
import math
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.parts import QUIET, Training, Watched, hooks_of, records_of, session_of, small
from torch import nn

from rankscope_contract.model.events import Event
from rankscope_exporter import Monitor
from rankscope_exporter.api.session import Session

RELATIVE = 1e-5


class Net(nn.Module):
    """A model with dropout, a frozen tensor, and a tensor without influence on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(64, 4)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x)))) * self.frozen.sum()


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def backward(net: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    return loss


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = backward(net, step)
    optimizer.step()
    return loss


def reference(tensor: torch.Tensor) -> dict[str, float]:
    exact = tensor.detach().double().flatten()
    return {
        "norm": exact.square().sum().sqrt().item(),
        "min": exact.min().item(),
        "max": exact.max().item(),
        "mean": exact.mean().item(),
        "scale": exact.abs().mean().item(),
        "nans": 0,
        "infs": 0,
        "zeros": int((exact == 0).sum()),
        "numel": exact.numel(),
    }


def assert_equal_statistics(expected: dict[str, float], numbers: dict[str, Any]) -> None:
    for op in ("norm", "min", "max"):
        assert numbers[op] == pytest.approx(expected[op], rel=RELATIVE, abs=1e-30), op
    assert abs(numbers["mean"] - expected["mean"]) <= RELATIVE * expected["scale"]
    for op in ("nans", "infs", "zeros", "numel"):
        assert expected[op] == numbers[op], op


def test_all_quantities_of_all_steps_equal_a_float64_reference(quiet, reader, eventually):
    """As its rank serves them. A tensor without a gradient has no row."""
    net, optimizer = make()
    expected: dict[tuple[int, str, str], dict[str, float]] = {}

    def note(step: int, kind: str, tensors: dict[str, torch.Tensor | None]) -> None:
        expected.update({(step, kind, name): reference(item) for name, item in tensors.items() if item is not None})

    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        for step in range(1, 6):
            optimizer.zero_grad()
            backward(net, step)
            gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
            note(step, "grad_unreduced", gradients)
            note(step, "grad_reduced", gradients)
            note(step, "param_before", dict(net.named_parameters()))
            if nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 0.1:
                note(step, "grad_clipped", gradients)
            optimizer.step()
            note(step, "param_after", dict(net.named_parameters()))
            for key in ("exp_avg", "exp_avg_sq"):
                note(step, key, {n: optimizer.state[p][key] for n, p in net.named_parameters() if optimizer.state[p]})
        monitor.end_step()
        rows = eventually(lambda: (found := read.rows()) and found[-1].step == 5 and found)

    assert set(expected) == {(row.step, row.kind, row.tensor) for row in rows}
    assert len(expected) == len(rows)
    for row in rows:
        assert_equal_statistics(expected[row.step, row.kind, row.tensor], row.numbers)
    assert 0 == monitor.faults


def test_fifty_steps_with_dropout_are_bit_identical_with_the_monitor(quiet):
    results = []
    for watched in (False, True):
        net, optimizer = make()
        torch.manual_seed(42)
        with Monitor(quiet) as monitor:
            if watched:
                monitor.attach(net, optimizer)
            for step in range(1, 51):
                monitor.log(loss=train_step(net, optimizer, step), tokens=8)
        results.append([parameter.detach().clone() for parameter in net.parameters()] + [torch.random.get_rng_state()])

    assert all(torch.equal(without, with_it) for without, with_it in zip(*results, strict=True))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_attach_leaves_the_garbage_collector_as_it_was(quiet, is_enabled):
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with Monitor(quiet).attach(*make()):
            found = gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()

    assert is_enabled == found


def test_attach_frees_recent_garbage_and_keeps_frozen_objects_frozen(quiet):
    class Knot:
        def __init__(self) -> None:
            self.own = self

    gc.freeze()
    frozen = gc.get_freeze_count()
    garbage = weakref.ref(Knot())
    with Monitor(quiet).attach(*make()):
        found = garbage(), gc.get_freeze_count() > frozen // 2

    assert (None, True) == found


def test_nan_gradient_is_counted_and_its_norm_covers_finite_elements():
    net, optimizer = make()

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 0], gradient[0, 1], gradient[0, 2] = math.nan, math.inf, 0.0
        return gradient

    net.first.weight.register_hook(spoil)
    with Watched(net, optimizer) as watched:
        backward(net, 1)
        gradient = net.first.weight.grad
    (numbers,) = (row.numbers for row in watched.rows("grad_unreduced") if row.entry.tensor == "first.weight")
    events = [event for _, event in watched.events("anomaly")]
    finite = gradient[torch.isfinite(gradient)].double()

    assert (1, 1, int((gradient == 0).sum())) == (numbers["nans"], numbers["infs"], numbers["zeros"])
    assert (numbers["norm"], numbers["max"]) == pytest.approx((finite.norm().item(), finite.max().item()), RELATIVE)
    assert {("AnomalyNan", "first.weight", "nans")} == {(event.rule, event.tensor, event.op) for event in events}
    assert {"grad_unreduced", "grad_reduced"} == {event.kind for event in events}


def test_logged_nan_inf_zero_and_absence_differ(quiet, reader, eventually):
    net, optimizer = make()
    with Monitor(quiet).attach(net, optimizer) as monitor:
        read = reader(monitor)
        train_step(net, optimizer, 1)
        monitor.log(a=math.nan, b=math.inf, c=0.0, d=None, loss={"lm": torch.tensor(2.5), "aux": 1})
        monitor.end_step()
        (record,) = eventually(read.records)
    scalars = {(item["name"], item["labels"]): item["value"] for item in record["scalars"]}

    assert math.isnan(scalars["a", None])
    assert (math.inf, 0.0) == (scalars["b", None], scalars["c", None])
    assert ("d", None) not in scalars
    assert (2.5, 1.0) == (scalars["loss", '{"loss":"lm"}'], scalars["loss", '{"loss":"aux"}'])
    assert 0.01 == pytest.approx(scalars["learning_rate", '{"group":"0"}'])


def test_a_disabled_monitor_opens_nothing(monkeypatch):
    monkeypatch.setenv("RANKSCOPE_DISABLED", "1")
    net, optimizer = make()
    monitor = Monitor()
    with monitor.attach(net, optimizer), monitor.phase("evaluation"):
        monitor.log(loss=1.0)
        monitor.event("note", "nothing happens")
        train_step(net, optimizer, 1)

    assert monitor.address is None
    assert 0 == hooks_of(net, optimizer)


def test_an_exception_in_training_leaves_an_exit_record():
    training = Training()

    def fail() -> None:
        with training.monitor:
            training.train()
            raise ZeroDivisionError("training failed at \ud800")

    with pytest.raises(ZeroDivisionError):
        fail()
    ((_, event),) = training.events("exit")

    assert '"reason": "exception"' in event.details
    assert '"last_step": 1' in event.details
    assert "training failed at" in event.details
    event.details.encode()  # raises an error if the stream cannot represent it


def test_a_monitor_holds_no_reference_to_the_model_after_detach(quiet):
    net, optimizer = make()
    monitor = Monitor(quiet)
    monitor.attach(net, optimizer)
    monitor.detach()
    del optimizer
    gc.collect()

    assert [] == [item for item in gc.get_referrers(net) if type(item).__module__.startswith("rankscope")]


Trained = tuple[nn.Sequential, torch.optim.Optimizer, Monitor]


def step(net: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (net(torch.ones(2, 3)).square().sum() * scale).backward()
    optimizer.step()


def trained(**settings: Any) -> Trained:
    net, optimizer = small()
    monitor = Monitor(QUIET, **settings).attach(net, optimizer)
    for _ in range(3):
        step(net, optimizer)
    return net, optimizer, monitor


def of_the_monitor() -> set[threading.Thread]:
    names = ("rankscope-stop", "rankscope-stop-watch")  # of the process, not of a monitor
    return {item for item in threading.enumerate() if item.name.startswith("rankscope") and item.name not in names}


def events_of(session: Session, kind: str) -> list[Event]:
    return [event for record in records_of(session) for event in record.events if event.type == kind]


class Ended:
    """The threads, the port, the records and the model of one monitor."""

    def __init__(self, net: nn.Module, monitor: Monitor, before: set[threading.Thread]) -> None:
        self.session = session_of(monitor)
        self.net, self.monitor = weakref.ref(net), weakref.ref(monitor)
        self.port = urllib.parse.urlsplit(str(monitor.address)).port
        self.threads = of_the_monitor() - before

    def is_complete(self) -> bool:
        return not any(thread.is_alive() for thread in self.threads) and bool(events_of(self.session, "exit"))

    def check(self) -> None:
        (event,) = events_of(self.session, "exit")

        assert {"reason": "unknown", "last_step": 3, "error": None} == json.loads(str(event.details))
        assert {1, 2, 3} == {record.step for record in records_of(self.session) if record.statistics is not None}
        assert (None, None) == (self.net(), self.monitor())
        with socket.socket() as free:
            free.bind(("", self.port or 0))


class Trainer:
    """A trainer that refers to the model, its optimizer and its monitor, and is referred to by all of them."""

    def __init__(self) -> None:
        self.anomalies: list[Any] = []
        self.trained = trained(on_anomaly=lambda anomaly: self.anomalies.append((anomaly, self.trained)))
        self.trained[0].trainer = self  # type: ignore[assignment]  # as frameworks do


def keep_as_attribute(net: nn.Module, monitor: Monitor) -> Any:
    net.monitor = monitor  # type: ignore[assignment]  # no module


WAYS: dict[str, Callable[[nn.Sequential, Monitor], Any]] = {
    "names": lambda _net, _monitor: None,
    "attribute of the model": keep_as_attribute,
    "hook of the model": lambda net, monitor: net[0].register_forward_hook(lambda *_: monitor.log(loss=1.0)),
    "open phase": lambda _net, monitor: monitor.phase("evaluation").__enter__(),
}
"""References to a monitor."""


@pytest.mark.parametrize(
    ("way", "collects"), [*((way, True) for way in WAYS), ("names", False), ("attribute of the model", False)]
)
def test_monitor_ends_when_script_has_dropped_it_and_its_model(way, collects, eventually):
    """Usually without a garbage collection."""
    before = of_the_monitor()
    gc.collect()
    gc.disable()
    try:
        net, optimizer, monitor = trained()
        held = WAYS[way](net, monitor)
        ended = Ended(net, monitor, before)
        del net, optimizer, monitor, held
        if collects:
            gc.collect()
        eventually(ended.is_complete)

        ended.check()
    finally:
        gc.enable()


def test_monitor_ends_in_a_cycle_with_its_callback(eventually):
    before = of_the_monitor()
    trainer = Trainer()
    ended = Ended(trainer.trained[0], trainer.trained[2], before)
    del trainer
    gc.collect()
    eventually(ended.is_complete)

    ended.check()


def unheld() -> tuple[nn.Sequential, torch.optim.Optimizer, Ended]:
    """Return a model and its optimizer, which are attached in this function, and no monitor."""
    before = of_the_monitor()
    net, optimizer, monitor = trained()
    return net, optimizer, Ended(net, monitor, before)


def steps_of(session: Session) -> set[int | None]:
    session.publisher.catch_up(30)
    return {record.step for record in records_of(session) if record.statistics is not None}


@pytest.mark.parametrize("hooks", ["kept", "removed"])
def test_monitor_without_references_lives_as_long_as_its_model(hooks, eventually):
    net, optimizer, ended = unheld()
    for module in net.modules() if hooks == "removed" else ():  # as other libraries do
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    gc.collect()
    for _ in range(3):
        step(net, optimizer)

    assert {1, 2, 3, 4, 5} <= steps_of(ended.session)
    assert [] == events_of(ended.session, "exit")

    module = net = None  # type: ignore[assignment]  # the last references
    eventually(ended.is_complete)


def test_kept_monitor_of_a_freed_model_ends_with_the_monitor(eventually):
    before = of_the_monitor()
    net, optimizer, monitor = trained()
    ended = Ended(net, monitor, before)
    del net, optimizer
    gc.collect()

    assert ended.net() is None
    assert monitor.address is not None
    assert [] == events_of(ended.session, "exit")

    del monitor
    eventually(ended.is_complete)
    ended.check()


def test_last_anomaly_of_a_dropped_run_reaches_its_callback(eventually):
    anomalies: list[int | None] = []
    net, optimizer, monitor = trained(on_anomaly=lambda anomaly: anomalies.append(anomaly.step))
    step(net, optimizer, scale=float("nan"))
    del net, optimizer, monitor
    gc.collect()

    assert [4] == eventually(lambda: anomalies)


def test_end_never_waits_on_the_thread_that_collects(eventually):
    before = of_the_monitor()
    net, optimizer, monitor = trained()
    ended = Ended(net, monitor, before)
    with ended.session.current_step.lock:  # the end needs this lock
        del net, optimizer, monitor
        gc.collect()
        held = not ended.is_complete()
    eventually(ended.is_complete)

    assert held
    ended.check()


def test_repeated_notebook_cell_keeps_one_model_and_its_threads(eventually):
    models: list[weakref.ref[nn.Module]] = []
    before = of_the_monitor()
    for _ in range(4):
        net, optimizer, monitor = trained()
        models.append(weakref.ref(net))
    threads = len({item for item in of_the_monitor() - before if item.is_alive()})
    gc.collect()
    eventually(lambda: len(of_the_monitor() - before) <= threads / 2)

    assert [True, True, True, False] == [model() is None for model in models]
    assert step(net, optimizer) is None
    monitor.detach()


def notes_of(monitor: Monitor) -> list[str]:
    session = session_of(monitor)
    session.publisher.catch_up(30)
    return [event.message for event in events_of(session, "note")]


def test_second_live_monitor_of_a_model_is_named_once():
    """Monitors of other models in the process are not."""
    (net, optimizer), (other, _) = small(), small()
    with Monitor(QUIET).attach(other), Monitor(QUIET).attach(net, optimizer) as first:
        with Monitor(QUIET).attach(net, optimizer) as second:
            for _ in range(4):
                step(net, optimizer)
            notes = notes_of(first), notes_of(second)
        with Monitor(QUIET).attach(*small()) as third:
            later = notes_of(third)

    assert ([], 1, []) == (notes[0], len(notes[1]), later)
    assert "another Monitor is attached to the same model" in notes[1][0]
