"""Ranks agree on a step and change at it: all interleavings of polls and steps, and two real ranks of a gloo group."""

import json
import os
import time
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
from rankscope_exporter.reconfiguration.agreement import Agreement, Proposal
from rankscope_exporter.serving.config import ServeConfig


class Shelf(dist.HashStore):
    """A store that calls `between` before each call that reads or writes it."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def get(self, key: str) -> bytes:
        self.between()
        return super().get(key)

    def set(self, key: str, value: str) -> None:
        self.between()
        super().set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.between()
        return super().add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.between()
        return super().compare_set(key, expected, desired)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rank:
    """A rank that trains and polls. A committed change is applied at its step, or at the next one."""

    agreement: Agreement
    step: int = 0
    seconds: float | None = 0.1
    waiting: list[Proposal] = field(default_factory=list)
    taken: dict[int, int] = field(default_factory=dict)  # number of a change: the step at which it was applied
    asks: bool = False  # the training thread has called the store and waits for it

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            if self.agreement.must_resolve(self.step):
                self.asks = True
                self.waiting += self.agreement.resolve(self.step)
                self.asks = False
            while self.waiting and self.waiting[0].step <= self.step:
                self.taken[self.waiting.pop(0).number] = self.step

    def look(self) -> None:
        self.waiting += self.agreement.look()

    def told(self) -> list[str]:
        return [change.document for change in self.waiting]


def look(*all_ranks: Rank, times: int = 1) -> None:
    for _ in range(times):
        for rank in all_ranks:
            rank.look()


def ranks(world: int, clock: Clock | None = None, store: object = None, margin: float = 1.0) -> list[Rank]:
    made: list[Rank] = []
    shelf = store or Shelf()
    for number in range(world):
        state = lambda number=number: (made[number].step, made[number].seconds)  # noqa: E731
        how: Any = {"margin_seconds": margin, "clock": clock or Clock()}
        agreement = Agreement(shelf, "switch", number, world, state, **how)
        agreement.begin(0, "{}", 0)
        made.append(Rank(agreement))
    return made


def test_document_of_the_first_rank_at_attach_applies_to_all():
    shelf = Shelf()
    one, other = (Agreement(shelf, "s", rank, 2, lambda: (0, None), margin_seconds=1) for rank in range(2))

    assert one.begin(1, "first", 5) == other.begin(1, "second", 6)
    assert "first" == other.begin(1, "third", 6).document


@pytest.mark.parametrize("is_of_torch", [False, True])
def test_all_ranks_change_at_the_step_after_the_margin(is_of_torch):
    """The margin is 1 s, and a step takes 0.1 s."""
    held = dist.TCPStore("127.0.0.1", 0, 1, is_master=True) if is_of_torch else None
    store = dist.PrefixStore("group", held).clone() if held is not None else None  # as the store of the process group
    all_ranks = ranks(3, store=store)
    for rank in all_ranks:
        rank.train(7)
    all_ranks[1].agreement.propose("new", "call", 1)
    look(*all_ranks, times=2)
    for rank in all_ranks:
        rank.train(20)

    assert [{1: 17}] * 3 == [rank.taken for rank in all_ranks]


def test_rank_past_the_step_moves_the_change():
    slow, fast = ranks(2)
    slow.train(5)
    fast.train(30)
    slow.agreement.propose("new", "call", 1)  # for step 15
    look(slow, fast, times=3)
    slow.train(60)
    fast.train(35)

    assert slow.taken == fast.taken == {2: 50}  # twice the margin after the step of the fast rank


def test_silent_rank_is_left_out_and_applies_the_change_later():
    clock = Clock()
    here, there, silent = ranks(3, clock)
    here.agreement.propose("new", "call", 1)
    look(here, there)
    for _ in range(2):
        clock.now += 16
        look(here, there)
    (agreed,) = here.waiting
    for rank in (here, there, silent):
        rank.train(12)
    silent.look()
    silent.train()

    assert (2,) == agreed.without
    assert here.taken == there.taken == {1: 10}
    assert {1: 13} == silent.taken


def test_later_change_replaces_pending_and_follows_committed():
    here, there = ranks(2)
    here.agreement.propose("first", "call", 1)
    there.agreement.propose("second", "request")
    look(here, there, here)
    there.agreement.propose("third", "request")
    look(there, here, there)
    told = here.told()
    for rank in (here, there):
        rank.train(40)

    assert ["second", "third"] == told
    assert here.taken == there.taken
    assert sorted(here.taken.values()) == list(here.taken.values())


def test_old_edit_that_a_rank_reads_late_is_not_a_change():
    here, there = ranks(2)
    here.agreement.propose("first", "file", 10)
    here.agreement.propose("second", "file", 20)
    there.agreement.propose("first", "file", 10)
    look(here, there, here)

    assert ["second"] == here.told()


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_ranks_change_at_one_step_in_all_interleavings(data):
    """The training of each rank, also of the calling one, continues between any two calls of the store."""
    world = data.draw(st.integers(2, 4))
    shelf = Shelf()
    all_ranks = ranks(world, store=shelf, margin=data.draw(st.sampled_from((0.0, 0.4, 2.0))))
    speaking: list[Rank] = []

    def others_train() -> None:
        for rank in data.draw(st.lists(st.sampled_from(all_ranks), max_size=3)):
            # At the step of a change, the training waits for its own thread.
            waits = rank in speaking and rank.agreement.must_resolve(rank.step + 1)
            if not rank.asks and not waits:
                rank.train()

    shelf.between = others_train
    for turn in range(data.draw(st.integers(5, 25))):
        rank = data.draw(st.sampled_from(all_ranks))
        speaking.append(rank)
        if turn < 4:
            rank.agreement.propose(f"change {turn}", "request")
        else:
            rank.look()
        speaking.clear()
    shelf.between = lambda: None
    for _ in range(40):
        for rank in all_ranks:
            rank.look()
            rank.train()
    for rank in all_ranks:
        rank.train(1000 - rank.step)

    assert all(rank.taken == all_ranks[0].taken for rank in all_ranks)
    assert all_ranks[0].taken


def test_additional_change_neither_replaces_nor_is_replaced():
    """A requested decimation or capture must not discard a pending switch, and a switch must not discard these."""
    one, other = ranks(2)

    assert one.agreement.propose("switch", "file", 1)
    assert not other.agreement.propose("stretch", "budget", is_additional=True)
    look(one, other, times=3)
    assert other.agreement.propose("stretch", "budget", is_additional=True)
    assert not one.agreement.propose("switch again", "file", 2)
    look(one, other, times=3)

    assert ["switch", "stretch"] == one.told() == other.told()


def test_requests_up_to_a_stamp_are_accepted_from_one_rank_only():
    """A NaN that all ranks detect at about the same step is captured once."""
    one, other = ranks(2)

    assert one.agreement.propose("of one", "capture", 7, until=20, is_additional=True)
    for step in (7, 20):
        assert other.agreement.propose("of the other", "capture", step, until=step + 13, is_additional=True)
    look(one, other, times=3)
    assert other.agreement.propose("later", "capture", 21, until=34, is_additional=True)
    look(one, other, times=3)

    assert ["of one", "later"] == one.told() == other.told()


MOST_STEPS = 20_000


def changed(path: Path) -> dict[str, Any]:
    serve = ServeConfig(token="secret", ring_records=MOST_STEPS)
    return {"quantities": ["parameters"], "switch_file": str(path), "switch_poll_seconds": 0.05, "serve": serve}


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
    """Rank 1 is killed before it reads the change that rank 0 requests."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Watched(model, optimizer, **changed(path))
    agreement = watched.session.change_sources._agreement
    assert agreement is not None
    agreement._patience_seconds = 1.0
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
    not_heard = [json.loads(event.details or "")["ranks_not_heard"] for _, event in watched.events("switch")]
    return slowest, leaving, not_heard, watched.faults


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
    slowest, leaving, not_heard, faults = found["survive", 0]

    assert ([[1]], 0) == (not_heard, faults)
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
    watched = Watched(model, optimizer, quantities=["parameters"], switch_poll_seconds=0.05)
    dist.barrier()
    if rank == 1:
        wait_until(stored.exists)
        leave(results, rank, ())
    watched.monitor.switch({"every": 2})
    time.sleep(0.5)  # until the change is stored; the result is the same if it is not
    stored.touch()
    wait_until(lambda: not answers(store))
    for every in (3, 4):
        watched.monitor.switch({"every": every})
    deadline = time.monotonic() + 30
    while watched.session.change_queue.sampling.config.every != 4 and time.monotonic() < deadline:
        step_of(model, optimizer)
        time.sleep(0.005)
    watched.monitor.detach()
    intervals = [json.loads(event.details or "")["now"]["every"] for _, event in watched.events("switch")]
    told = [event.message for _, event in watched.events("note")]
    leave(results, rank, (intervals, told, watched.faults))


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
    intervals, told, faults = outcomes(tmp_path, continue_alone, ("alone",), exit_codes=(0, 9))["alone", 0]

    assert ([2, 3, 4], 0) == (intervals, faults)
    assert 3 == sum("applies to this rank only: no key-value store is available" in message for message in told)
