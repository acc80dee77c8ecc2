"""Agreement of all ranks on the step of a change, over a key-value store, without waiting.

Two-phase commit over one key. The key holds the last change that was committed and at most one that is pending. A
pending change names a future step; each rank that reads it before that step acknowledges it, and the rank that sees all
acknowledgements commits it. A rank that is past the step moves it, and all acknowledge it again. Only compare-and-set
changes the key, so of two ranks that would do different things, one does.

A background thread reads the key. The training thread reads it only if it reaches the step of a change that its rank
has acknowledged and whose outcome it does not know: either the change is committed, or the rank moves it. So no rank
passes a step at which another one changes, however late its background thread is; the step is far enough ahead that
this is rarely needed.

A rank that does not acknowledge for `patience_seconds` is left out: it applies the change when it reads it. The store
is that of the process group.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Protocol

from rankscope_contract.model.identity import Identity
from rankscope_exporter.process.identity import group_store

LEAST_STEPS: Final = 4
MOST_STEPS: Final = 1_000_000
MOST_MARGIN_SECONDS: Final = 60.0
PATIENCE_SECONDS: Final = 30.0
_ATTEMPTS: Final = 8  # of compare-and-set, before the next look tries again


class Store(Protocol):
    """What is used of torch's key-value store: none of it waits for another rank."""

    def get(self, key: str) -> bytes:
        """Return what is there; only asked for what is known to be there."""
        ...

    def set(self, key: str, value: str) -> None:
        """Put `value` there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `desired` where `expected` is, "" for nothing, and return what is there then."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A document that shall hold from the first step at or behind `step` on."""

    number: int
    step: int
    document: str
    source: str
    margin_seconds: float = 0.0
    without: tuple[int, ...] = ()
    """Ranks that were not heard."""
    stands: bool = False
    """Whether it comes beside other changes: it waits for one that is pending, and none takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    agreed: Proposal
    pending: Proposal | None = None
    seen: dict[str, int] = field(default_factory=dict)
    """By source: the newest stamp that was proposed, so that a rank that sees an old edit late does not repeat it."""

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> _State:
        document: dict[str, Any] = json.loads(text)
        pending = document["pending"]
        return cls(
            agreed=_proposal(document["agreed"]),
            pending=None if pending is None else _proposal(pending),
            seen=document["seen"],
        )


def _proposal(document: dict[str, Any]) -> Proposal:
    return Proposal(**{**document, "without": tuple(document["without"])})


class Agreement:
    """One rank's part. `pace` tells the number of the last step that began here, and the seconds a step takes.

    `look` and `arrive` come from two threads, and never at the same time: the caller sees to that.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        pace: Callable[[], tuple[int, float | None]],
        *,
        margin_seconds: float,
        patience_seconds: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._pace = pace
        self._margin_seconds = margin_seconds
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._armed: tuple[int, float] = (-1, 0.0)  # the last number that was heard of here, and when
        self._promises: tuple[Proposal, ...] = ()  # what was answered, until the caller has what became of it
        self._told = 0

    def begin(self, step: int, document: str, stamp: int) -> Proposal:
        """Return what holds from `step` on: what the first rank to come here says, for all. Called at attach."""
        mine = _State(agreed=Proposal(number=0, step=step, document=document, source="file"), seen={"file": stamp})
        return _State.of(_text(self._store.compare_set(self._key, "", mine.text()))).agreed

    def propose(
        self, document: str, source: str, stamp: int | None = None, *, until: int | None = None, stands: bool = False
    ) -> bool:
        """Ask for a change, and return whether it was heard; what `source` asked for before, by `stamp`, is none.

        With `until` nothing that `source` asks for up to that stamp is. False means: ask again at the next look.
        """
        for _ in range(_ATTEMPTS):
            state = self._state()
            last = state.pending or state.agreed
            if stamp is not None and stamp <= state.seen.get(source, -1):
                return True
            if state.pending is not None and (stands or state.pending.stands):
                return False
            seen = state.seen if stamp is None else {**state.seen, source: stamp if until is None else until}
            asked = Proposal(number=last.number + 1, step=0, document=document, source=source, stands=stands)
            fresh = self._ahead(asked, state, self._margin_seconds)
            if self._exchange(state, replace(state, pending=fresh, seen=seen)):
                return True
        return False

    def look(self) -> list[Proposal]:
        """Take part, and return the changes that were agreed since the last look, in order."""
        self._promises = tuple(promise for promise in self._promises if promise.number > self._told)
        state = self._state()
        told = self._news(state)
        if state.pending is not None:
            told += self._news(self._take_part(state, state.pending))
        return told

    def must_resolve(self, step: int) -> bool:
        """Return whether step number `step`, about to begin, may be that of a change whose fate is not known here."""
        return any(step >= promise.step for promise in self._promises)

    def resolve(self, step: int) -> list[Proposal]:
        """Return what was agreed and not told yet; what was answered and not sealed by now is moved behind `step`."""
        for _ in range(_ATTEMPTS):
            state = self._state()
            pending = state.pending
            if pending is None or pending not in self._promises or step < pending.step:
                break
            moved = self._move(state, pending)
            if moved is not state:
                state = moved
                break
        self._promises = tuple(promise for promise in self._promises if promise == state.pending)
        return self._news(state)

    def _news(self, state: _State) -> list[Proposal]:
        if state.agreed.number <= self._told:
            return []
        self._told = state.agreed.number
        return [state.agreed]

    @property
    def pending(self) -> bool:
        """Return whether a change was pending at the last look."""
        return self._armed[0] > self._told

    def claim(self, what: str) -> bool:
        """Return whether this rank is the first to claim `what`."""
        return self._store.add(f"{self._name}/claim/{what}", 1) == 1

    def count(self, what: str, amount: int) -> int:
        """Add to what the ranks count together as `what`, and return it."""
        return self._store.add(f"{self._name}/count/{what}", amount)

    def is_claimed(self, what: str) -> bool:
        """Return whether some rank has claimed `what`."""
        return self._store.check([f"{self._name}/claim/{what}"])

    def _take_part(self, state: _State, pending: Proposal) -> _State:
        is_new = self._armed[0] != pending.number
        if is_new:
            self._promises += (pending,)  # before the pace is read: training either sees this or is seen to be past it
        if self._pace()[0] >= pending.step:
            return self._move(state, pending)
        if is_new:
            self._armed = (pending.number, self._clock())
            self._store.set(f"{self._name}/{pending.number}/{self._rank}", "1")
            heard = self._store.add(f"{self._name}/{pending.number}", 1)
        else:
            heard = self._store.add(f"{self._name}/{pending.number}", 0)
        if heard >= self._world_size:
            return self._commit(state, pending)
        if self._clock() - self._armed[1] > self._patience_seconds:
            return self._commit(state, replace(pending, without=self._unresponsive(pending.number)))
        return state

    def _commit(self, state: _State, pending: Proposal) -> _State:
        step, _ = self._pace()
        if pending.step - step < self._margin(pending.margin_seconds / 2, LEAST_STEPS // 2):
            return self._move(state, pending)
        return self._exchange(state, replace(state, agreed=pending, pending=None)) or state

    def _move(self, state: _State, pending: Proposal) -> _State:
        margin = min(MOST_MARGIN_SECONDS, 2 * pending.margin_seconds)
        moved = self._ahead(replace(pending, number=pending.number + 1, without=()), state, margin)
        return self._exchange(state, replace(state, pending=moved)) or state

    def _ahead(self, proposal: Proposal, state: _State, margin_seconds: float) -> Proposal:
        """Return `proposal` for a step that no rank should have reached when it hears of it."""
        step = self._pace()[0] + self._margin(margin_seconds, LEAST_STEPS)
        later = max(step, state.agreed.step + 1, 0 if state.pending is None else state.pending.step)
        return replace(proposal, step=later, margin_seconds=margin_seconds)

    def _margin(self, seconds: float, least: int) -> int:
        a_step = self._pace()[1]
        return max(least, min(MOST_STEPS, math.ceil(seconds / max(a_step, 1e-6)))) if a_step is not None else least

    def _unresponsive(self, number: int) -> tuple[int, ...]:
        keys = {rank: f"{self._name}/{number}/{rank}" for rank in range(self._world_size)}
        return tuple(rank for rank, key in keys.items() if not self._store.check([key]))

    @property
    def _key(self) -> str:
        return f"{self._name}/state"

    def _state(self) -> _State:
        return _State.of(_text(self._store.get(self._key)))

    def _exchange(self, old: _State, new: _State) -> _State | None:
        text = new.text()
        return new if _text(self._store.compare_set(self._key, old.text(), text)) == text else None


def _text(data: bytes | str) -> str:
    return data.decode() if isinstance(data, bytes) else data


log = logging.getLogger("rankscope")

_POLLS_PER_MARGIN = 6
"""How many looks fit between a change being asked for and its step: a rank may be late by half of them."""

_sessions = itertools.count(1)
"""Tells monitors of one process apart that are attached one after the other, on all ranks alike."""


def agreement_of(
    identity: Identity, pace: Callable[[], tuple[int, float | None]], poll_seconds: float
) -> Agreement | None:
    """Return what this rank agrees with the others by; None where it is alone, or there is no store."""
    store = group_store() if identity.world_size > 1 else None
    if store is None:
        return None
    name = f"rankscope/switch/{identity.launch_id}/{next(_sessions)}"
    try:
        store = store.clone()  # a connection of its own: whoever waits on the other one does not hold us up
    except (AttributeError, NotImplementedError, RuntimeError):  # not every store can
        log.debug("the store of the process group has no second connection")
    return Agreement(
        store, name, identity.rank, identity.world_size, pace, margin_seconds=_POLLS_PER_MARGIN * poll_seconds
    )
