"""Ranks change at one step: all interleavings of polls and steps, and two real ranks of a gloo group."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exporter.adapters.observation import begin, outcomes
from tests.exporter.conftest import wait_until
from tests.exporter.parts import Watched
from tests.properties import examples
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor
from rankscope_exporter.control.changes import Change, ChangeLog
from rankscope_exporter.publish.serving_config import ServeConfig


class Shelf(dist.HashStore):
    """A store that calls `between` before each call that reads or writes it."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def get(self, key: str) -> bytes:
        self.between()
        return super().get(key)

    def check(self, keys: list[str]) -> bool:
        self.between()
        return super().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.between()
        return super().compare_set(key, expected, desired)


@dataclass
class Rank:
    """A rank that trains and polls. A change is applied at its step, or at the next one."""

    log: ChangeLog
    step: int = 0
    seconds: float | None = 0.1
    waiting: list[Change] = field(default_factory=list)
    read: list[tuple[Change, int]] = field(default_factory=list)  # changes, and the last step before they were read
    applied: list[tuple[str, int]] = field(default_factory=list)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            while self.waiting and (self.waiting[0].step or 0) <= self.step:
                self.applied.append((self.waiting.pop(0).document, self.step))

    def write(self, document: str, source: str = "request", stamp: int | None = None, until: int | None = None) -> None:
        self.log.write(Change(document=document, source=source, stamp=stamp), until)
        self.take()

    def poll(self) -> None:
        self.log.poll()
        self.take()

    def take(self) -> None:
        while self.log.unread:
            self.waiting.append(self.log.unread.popleft())
            self.read.append((self.waiting[-1], self.step))


def ranks(world: int, store: object = None, margin: float = 1.0) -> list[Rank]:
    made: list[Rank] = []
    shelf: Any = store or Shelf()
    for number in range(world):
        pace = lambda number=number: (made[number].step, made[number].seconds)  # noqa: E731
        made.append(Rank(ChangeLog(shelf, "switch", pace, margin_seconds=margin)))
    for rank in made:
        rank.log.begin(Change(document="{}", source="file", step=0, stamp=0))
    return made


def test_document_of_the_first_rank_at_attach_applies_to_all():
    shelf = Shelf()
    one, other = (ChangeLog(shelf, "s", lambda: (0, None), margin_seconds=1) for _ in range(2))
    first, second = (Change(document=text, source="file", step=1, stamp=5) for text in ("first", "second"))

    assert first == one.begin(first) == other.begin(second)


@pytest.mark.parametrize("is_of_torch", [False, True])
def test_all_ranks_change_at_the_step_after_the_margin(is_of_torch):
    """The margin is 1 s, and a step takes 0.1 s."""
    held = dist.TCPStore("127.0.0.1", 0, 1, is_master=True) if is_of_torch else None
    store = dist.PrefixStore("group", held).clone() if held is not None else None  # as the store of the process group
    all_ranks = ranks(3, store=store)
    for rank in all_ranks:
        rank.train(7)
    all_ranks[1].write("new", "call", 1)
    for rank in all_ranks:
        rank.poll()
        rank.train(20)

    assert [[("new", 17)]] * 3 == [rank.applied for rank in all_ranks]


def test_ranks_that_write_together_add_both_changes_and_read_the_same():
    one, other, third = ranks(3)
    shelf: Any = one.log.store

    def other_writes() -> None:
        shelf.between = lambda: None
        other.write("second")

    def after_the_read() -> None:
        shelf.between = other_writes

    shelf.between = after_the_read
    one.write("first")
    for rank in (one, other, third):
        rank.poll()
        rank.train(20)

    assert [["second", "first"]] * 3 == [[document for document, _ in rank.applied] for rank in (one, other, third)]


def test_old_edit_that_a_rank_reads_late_is_not_a_change():
    here, there = ranks(2)
    here.write("first", "file", 10)
    here.write("second", "file", 20)
    there.write("first", "file", 10)
    here.poll()

    assert ["first", "second"] == [change.document for change in here.waiting]


def test_requests_up_to_a_stamp_are_accepted_from_one_rank_only():
    """A NaN that all ranks detect at about the same step is captured once."""
    one, other = ranks(2)
    one.write("of one", "capture", 7, until=20)
    for step in (7, 20):
        other.write("of the other", "capture", step, until=step + 13)
    other.write("later", "capture", 21, until=34)
    one.poll()

    assert ["of one", "later"] == [change.document for change in one.waiting]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_ranks_change_at_one_step_in_all_interleavings(data):
    """The training of each rank, also of the calling one, continues between any two calls of the store.

    A rank that reads a change before its step applies it there, and another one at its next step. All ranks apply the
    same changes in the same order, so that the newest is in effect on all of them.
    """
    shelf = Shelf()
    all_ranks = ranks(data.draw(st.integers(2, 4)), store=shelf, margin=data.draw(st.sampled_from((0.0, 0.4, 2.0))))

    def others_train() -> None:
        for rank in data.draw(st.lists(st.sampled_from(all_ranks), max_size=3)):
            rank.train()

    shelf.between = others_train
    written = data.draw(st.integers(1, 5))
    for number in range(written):
        data.draw(st.sampled_from(all_ranks)).write(f"{number}")
        for rank in data.draw(st.lists(st.sampled_from(all_ranks), max_size=4)):
            rank.poll()
            rank.train()
    shelf.between = lambda: None
    for rank in all_ranks:
        rank.poll()
        rank.train(1000 - rank.step)

    for rank in all_ranks:
        expected = [(change.document, max(change.step or 0, before + 1)) for change, before in rank.read]
        assert expected == rank.applied
        assert [change for change, _ in all_ranks[0].read] == [change for change, _ in rank.read]
    assert [f"{number}" for number in range(written)] == [document for document, _ in all_ranks[0].applied]


MOST_STEPS = 20_000


def changed(path: Path) -> dict[str, Any]:
    serve = ServeConfig(token="secret", ring_records=MOST_STEPS)
    return {"quantities": ["parameters"], "switch_file": str(path), "switch_poll_seconds": 0.2, "serve": serve}


def put(monitor: Monitor, **document: Any) -> int:
    body, headers = json.dumps(document).encode(), {"Authorization": "Bearer secret"}
    request = urllib.request.Request(f"{monitor.address}/config", body, headers, method="PUT")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)


PACE = "each at its own pace, by"
CASES = {"in step, by file": "file", f"{PACE} request": "request", f"{PACE} call": "call"}


def work(rank: int, store: str, _names: list[str], results: Any) -> None:
    begin(rank, store)
    for case, ask in CASES.items():
        model = DistributedDataParallel(nn.Linear(4, 2)) if ask == "file" else nn.Linear(4, 2)
        results.put((case, rank, train(rank, Path(store).with_name(f"{ask}.json"), model, ask)))
        dist.barrier()
    results.put(("survive", rank, survive(rank, Path(store).with_name("survive.json"))))
    results.close()
    results.join_thread()
    os._exit(9 * rank)  # destroying the group would wait for the dead rank


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def train(rank: int, path: Path, model: nn.Module, ask: str) -> tuple[Any, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:
        path.write_text("{}")
    dist.barrier()
    watched = Watched(model, optimizer, **changed(path))
    dist.barrier()
    stop = path.with_suffix(".stop")
    changed_at = None
    for step in range(1, MOST_STEPS):
        if step == 20:
            if ask == "call":
                watched.monitor.switch({"every": 2})
            elif rank == 1 and ask == "file":
                path.write_text(json.dumps({"dynamic_on": True, "every": 2}))
            elif rank == 1:
                assert 202 == put(watched.monitor, every=2)
        time.sleep(0.002 + 0.002 * rank)  # the slower rank requests the change
        step_of(model, optimizer)
        if changed_at is None and watched.session.change_queue.sampling.on:
            changed_at = step
            stop.with_suffix(f".{rank}").touch()
        if changed_at is not None and step > changed_at + 8 and stop.with_suffix(f".{1 - rank}").exists():
            break
    else:
        pytest.fail("never changed")
    watched.monitor.detach()
    agreed = [(step, json.loads(event.details or "")["agreed_step"]) for step, event in watched.events("switch")]
    return changed_at, watched.measured(), agreed, watched.faults


def survive(rank: int, path: Path) -> tuple[Any, ...]:
    """Rank 1 was killed before it reads the change that rank 0 requests."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Watched(model, optimizer, **changed(path))
    dist.barrier()
    if rank == 1:
        return ()
    path.write_text('{"dynamic_on": true}')
    slowest = 0.0
    deadline = time.monotonic() + 30
    while not watched.session.change_queue.sampling.on and time.monotonic() < deadline:
        began = time.monotonic()
        step_of(model, optimizer)
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.005)
    began = time.monotonic()
    watched.monitor.detach()
    leaving = time.monotonic() - began
    late = [json.loads(event.details or "")["late_steps"] for _, event in watched.events("switch")]
    return slowest, leaving, late, watched.faults


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    return outcomes(tmp_path_factory.mktemp("ranks"), work, (*CASES, "survive"), exit_codes=(0, 9))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_change_at_the_same_step_although_one_is_slower(case, found):
    (one, measured, events, faults), (other, _, others, other_faults) = found[case, 0], found[case, 1]

    assert one == other
    assert [one] == [step for step, _ in events] == [agreed for _, agreed in others]
    assert [one, one + 2, one + 4] == measured[:3]
    assert 0 == faults == other_faults


def test_pending_change_of_a_dead_rank_delays_no_rank(found):
    slowest, leaving, late, faults = found["survive", 0]

    assert ([0], 0) == (late, faults)
    assert slowest < 10.0  # a rank that waits for the dead rank would wait until the deadline
    assert leaving < 20.0


def continue_alone(rank: int, path: str, _names: list[str], results: Any) -> None:
    """The process with the key-value store exits after the first of three changes that rank 0 requests."""
    port, stored = Path(path).with_name("port"), Path(path).with_name("stored")
    wait_until(lambda: rank == 1 or port.exists())
    store = dist.TCPStore(
        "127.0.0.1", int(port.read_text()) if rank == 0 else 0, is_master=rank == 1, wait_for_workers=False
    )
    if rank == 1:
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    serve = ServeConfig(token="secret")
    watched = Watched(model, optimizer, quantities=["parameters"], switch_poll_seconds=0.05, serve=serve)
    dist.barrier()
    if rank == 1:
        wait_until(stored.exists)
        leave(results, rank, ())
    watched.monitor.switch({"every": 2})
    wait_until(lambda: watched.session.change_queue.state()["to_come"])
    stored.touch()
    wait_until(lambda: not answers(store))
    watched.monitor.switch({"every": 3})
    with pytest.raises(urllib.error.HTTPError) as refused:
        put(watched.monitor, every=4)
    deadline = time.monotonic() + 30
    while watched.session.change_queue.sampling.config.every != 4 and time.monotonic() < deadline:
        step_of(model, optimizer)
        time.sleep(0.005)
    watched.monitor.detach()
    intervals = [json.loads(event.details or "")["now"]["every"] for _, event in watched.events("switch")]
    told = [event.message for _, event in watched.events("note")]
    leave(results, rank, (intervals, told, refused.value.code, watched.faults))


def leave(results: Any, rank: int, outcome: tuple[Any, ...]) -> None:
    results.put(("alone", rank, outcome))
    results.close()
    results.join_thread()
    os._exit(9 * rank)


def answers(store: dist.Store) -> bool:
    try:
        store.set("is there", "yes")
    except RuntimeError:
        return False
    return True


def test_changes_apply_to_this_rank_and_are_reported_if_the_store_fails(tmp_path):
    """The first one was stored before. The HTTP request is answered by an error, and applies too."""
    intervals, told, status, faults = outcomes(tmp_path, continue_alone, ("alone",), exit_codes=(0, 9))["alone", 0]

    assert ([2, 3, 4], 502, 0) == (intervals, status, faults)
    assert 2 == sum("applies to this rank only: no key-value store is available" in message for message in told)
