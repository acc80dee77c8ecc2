"""Replacements of torch's collectives: present while they are measured, below other wrappers, equal to the original.

These tests run in one process without a group: a called function is never reached, or is a fake.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.parts import small
from tests.exporter.runs import config_of, train

from rankscope_exporter import Monitor

NAMES = ("all_reduce", "isend", "irecv", "batch_isend_irecv", "all_to_all_single")


@pytest.fixture
def originals():
    """Return the functions of torch.distributed, and restore them after the test."""
    found = {name: getattr(dist, name) for name in NAMES}
    waits = vars(dist.Work)["wait"]
    yield found
    for name, function in found.items():
        assert getattr(dist, name) is function, name
    assert vars(dist.Work)["wait"] is waits


def attached(**options: Any) -> tuple[Monitor, Callable[[], None]]:
    """Return a monitor of a layer, and a function that trains one step."""
    net, optimizer = small()
    monitor = Monitor(config_of("collectives", options={"collectives": options})).attach(net, optimizer)
    return monitor, functools.partial(train, net, optimizer)


def stands() -> list[str]:
    """Return the names of the intercepted functions."""
    return [name for name in NAMES if type(getattr(dist, name)).__name__ == "_FunctionInterception"]


def test_detach_restores_every_function(originals):
    """The end of the last sampled step restores them, too."""
    monitor, step = attached(times=1)
    intercepted = stands()
    step()
    step()
    after = stands()
    monitor.detach()
    other, _ = attached()
    other.detach()

    assert (list(NAMES), [], []) == (intercepted, after, stands())


def test_switching_off_restores_functions_and_switching_on_intercepts(originals):
    monitor, step = attached()
    found = []
    for on in (False, True):
        step()
        monitor.switch(on=on)
        step()
        found.append(stands())
    monitor.detach()

    assert [[], list(NAMES)] == found


@pytest.mark.parametrize("first", [0, 1])
def test_second_monitor_still_intercepts_after_the_first_detaches(first, originals):
    monitors = [attached()[0], attached()[0]]
    monitors[first].detach()
    between = stands()
    monitors[1 - first].detach()

    assert list(NAMES) == between


def test_wrapper_on_top_remains_and_the_interception_forwards_calls(monkeypatch):
    original, calls = dist.all_reduce, []
    monitor, _ = attached()
    below = dist.all_reduce

    def foreign(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return below(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", foreign)
    monitor.detach()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.ones(1))

    assert (foreign, 1) == (dist.all_reduce, len(calls))
    monkeypatch.undo()  # the previous function was ours, which forwards calls
    dist.all_reduce = original


def test_wrapper_between_two_interceptions_is_called_once_and_remains(originals, monkeypatch):
    """The other wrapper has copied the attributes of ours, as functools.wraps does."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_: calls.append("original"))
    first, _ = attached()
    below = dist.all_reduce

    @functools.wraps(below)
    def foreign(*args: Any) -> Any:
        calls.append("foreign")
        return below(*args)

    monkeypatch.setattr(dist, "all_reduce", foreign)
    second, _ = attached()
    first.detach()
    dist.all_reduce(torch.ones(1))
    second.detach()

    assert (["foreign", "original"], foreign) == (calls, dist.all_reduce)
    monkeypatch.undo()


def test_earlier_replacement_is_called_and_restored(monkeypatch):
    calls: list[Any] = []
    earlier = calls.append
    monkeypatch.setattr(dist, "all_reduce", earlier)
    monitor, step = attached()
    step()
    dist.all_reduce("x")
    monitor.detach()

    assert (["x"], earlier) == (calls, dist.all_reduce)


def test_stored_copied_or_pickled_function_is_the_original(originals):
    monitor, _ = attached()
    kept = dist.isend
    sent = pickle.loads(pickle.dumps(kept))
    copied = copy.deepcopy({"send": kept})["send"]
    equal = kept == originals["isend"], hash(kept) == hash(originals["isend"])  # as P2POp asks
    monitor.detach()

    assert (True, True) == equal
    assert sent is copied is originals["isend"]
    assert ("isend", originals["isend"].__doc__) == (kept.__name__, kept.__doc__)
