"""The end of a monitor without model and references, and the life of a monitor that only its model keeps alive."""

from __future__ import annotations

import gc
import json
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exporter.parts import QUIET, records_of, session_of, small
from torch import nn

from rankscope_contract.model.events import Event
from rankscope_exporter import Monitor
from rankscope_exporter.api.session import Session

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


def keep_in_hook(net: nn.Sequential, monitor: Monitor) -> Any:
    net[0].register_forward_hook(lambda *_: monitor.log(loss=1.0))


WAYS: dict[str, Callable[[nn.Sequential, Monitor], Any]] = {
    "names": lambda _net, _monitor: None,
    "attribute of the model": keep_as_attribute,
    "hook of the model": keep_in_hook,
    "open phase": lambda _net, monitor: monitor.phase("evaluation").__enter__(),
}
"""References to a monitor."""


@pytest.mark.parametrize(
    ("way", "collects"),
    [*((way, True) for way in WAYS), ("names", False), ("attribute of the model", False)],
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
