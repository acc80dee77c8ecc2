"""Agreement of all ranks on the step of a change, over a key-value store, without waiting.

The ranks use a two-phase commit over one key. The key holds the last change that was committed and at most one that is
pending. A pending change names a future step; each rank that reads it before that step acknowledges it, and the rank
that sees all acknowledgements commits it. If a rank has already passed the step, it writes a later step, and all ranks
acknowledge the change again. The key is changed by compare-and-set only: if two ranks write different values, one of
them succeeds.

A background thread reads the key. The training thread reads it only if it reaches the step of a change that its rank
has acknowledged without knowing whether the ranks have committed it. If the change is not committed then, the rank
moves it to a later step. Even with a late background thread, no rank passes a step at which another rank applies a
change. The step of a new change is so far in the future that the training thread rarely reads the key.

If a rank does not acknowledge a change within `patience_seconds`, the others commit the change without this rank. The
late rank applies the change when it reads the key. The store is the key-value store of the process group.
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
_ATTEMPTS: Final = 8  # attempts of compare-and-set until the next poll


class Store(Protocol):
    """The functions of torch's key-value store with which ranks agree on a change of the sampling.

    None of them waits for another rank.
    """

    def get(self, key: str) -> bytes:
        """Return the value of a key, which must exist."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    def check(self, keys: list[str]) -> bool:
        """Return whether the key-value store contains all of `keys`."""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter and return its new value."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the value of a key to `desired` if it is `expected`; return the value after the call.

        An `expected` of "" means that the key does not exist.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A proposed change of the sampling, with its settings as a JSON document.

    It takes effect at `step`, or at the first later step if no step has this number.
    """

    number: int
    step: int
    document: str
    source: str
    margin_seconds: float = 0.0
    without: tuple[int, ...] = ()
    """Ranks that did not acknowledge the proposed change in time."""
    is_additional: bool = False
    """True for an automatic change, such as a capture, which applies in addition to other changes of the sampling.

    It is proposed only if no change is pending, and no later proposal replaces it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    agreed: Proposal
    pending: Proposal | None = None
    seen: dict[str, int] = field(default_factory=dict)
    """By source of changes, the newest stamp that any rank has proposed.

    A stamp is a number that increases from one proposal of a source to the next, such as the time of an edit. Proposals
    with an older or equal stamp are ignored. A rank that reads an edit of the switch file late therefore does not
    propose it again.
    """

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
    """The agreement of one rank with the other ranks on changes of sampling.

    The function `pace` returns the number of the last step that began on this rank, and the seconds per step. The
    methods `look` and `resolve` are called from two threads. The caller ensures that they never run at the same time.
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
        self._armed: tuple[int, float] = (-1, 0.0)  # the newest pending number that was read here, and the time
        self._acknowledged: tuple[Proposal, ...] = ()  # proposals without a known outcome
        self._delivered = 0

    def begin(self, step: int, document: str, stamp: int) -> Proposal:
        """Return the sampling settings with which all ranks start, as a JSON document.

        It is the proposal of the first rank that calls this method.
        """
        mine = _State(agreed=Proposal(number=0, step=step, document=document, source="file"), seen={"file": stamp})
        return _State.of(_text(self._store.compare_set(self._key, "", mine.text()))).agreed

    def propose(
        self,
        document: str,
        source: str,
        stamp: int | None = None,
        *,
        until: int | None = None,
        is_additional: bool = False,
    ) -> bool:
        """Propose a change to all ranks.

        Return False if it could not be written and must be proposed again at the next poll.

        The optional `stamp` orders the proposals of one `source`. For the switch file, it is the time of the edit. A
        proposal is ignored if its stamp is not newer than that of the last proposal of the same source. If `until` is
        given, later proposals of the source with stamps of at most `until` are ignored as well.
        """
        for _ in range(_ATTEMPTS):
            state = self._state()
            last = state.pending or state.agreed
            if stamp is not None and stamp <= state.seen.get(source, -1):
                return True
            if state.pending is not None and (is_additional or state.pending.is_additional):
                return False
            seen = state.seen if stamp is None else {**state.seen, source: stamp if until is None else until}
            proposal = Proposal(
                number=last.number + 1, step=0, document=document, source=source, is_additional=is_additional
            )
            fresh = self._ahead(proposal, state, self._margin_seconds)
            if self._exchange(state, replace(state, pending=fresh, seen=seen)):
                return True
        return False

    def look(self) -> list[Proposal]:
        """Read the key with the state of the agreement, and process the pending change; return committed changes.

        The pending change is acknowledged, committed, or moved to a later step. The result contains the changes that
        were committed since the last call.
        """
        self._acknowledged = tuple(item for item in self._acknowledged if item.number > self._delivered)
        state = self._state()
        changes = self._new(state)
        if state.pending is not None:
            changes += self._new(self._take_part(state, state.pending))
        return changes

    def must_resolve(self, step: int) -> bool:
        """Return whether a change with unknown outcome may take effect at step number `step`.

        This rank has acknowledged the change, but has not read whether the ranks have committed it. Called when the
        step is about to begin.
        """
        return any(step >= item.step for item in self._acknowledged)

    def resolve(self, step: int) -> list[Proposal]:
        """Read the state of the agreement before step number `step` begins; return committed changes.

        Changes that this rank has received before are left out. If a change for this step is acknowledged but not
        committed, move the change to a later step.
        """
        for _ in range(_ATTEMPTS):
            state = self._state()
            pending = state.pending
            if pending is None or pending not in self._acknowledged or step < pending.step:
                break
            moved = self._move(state, pending)
            if moved is not state:
                state = moved
                break
        self._acknowledged = tuple(item for item in self._acknowledged if item == state.pending)
        return self._new(state)

    def _new(self, state: _State) -> list[Proposal]:
        if state.agreed.number <= self._delivered:
            return []
        self._delivered = state.agreed.number
        return [state.agreed]

    @property
    def pending(self) -> bool:
        """True if a change was pending when this rank last read the state of the agreement."""
        return self._armed[0] > self._delivered

    @property
    def unresolved(self) -> tuple[Proposal, ...]:
        """The last change that this rank has acknowledged, if its outcome is not known."""
        return tuple(item for item in self._acknowledged[-1:] if item.number > self._delivered)

    def claim(self, name: str) -> bool:
        """Claim the task `name` for this rank in the key-value store; return True if no rank has claimed it before."""
        return self._store.add(f"{self._name}/claim/{name}", 1) == 1

    def count(self, name: str, amount: int) -> int:
        """Add `amount` to the counter `name`, which all ranks share, and return its new value."""
        return self._store.add(f"{self._name}/count/{name}", amount)

    def is_claimed(self, name: str) -> bool:
        """Return whether any rank has claimed the task `name`."""
        return self._store.check([f"{self._name}/claim/{name}"])

    def _take_part(self, state: _State, pending: Proposal) -> _State:
        is_new = self._armed[0] != pending.number
        if is_new:
            # Before the pace is read: either the training reads this, or the pace shows a later step.
            self._acknowledged += (pending,)
        if self._pace()[0] >= pending.step:
            return self._move(state, pending)
        if is_new:
            self._armed = (pending.number, self._clock())
            self._store.set(f"{self._name}/{pending.number}/{self._rank}", "1")
            acknowledgements = self._store.add(f"{self._name}/{pending.number}", 1)
        else:
            acknowledgements = self._store.add(f"{self._name}/{pending.number}", 0)
        if acknowledgements >= self._world_size:
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
        """Return `proposal` with a later step: one that no rank should have reached when it reads the proposal."""
        step = self._pace()[0] + self._margin(margin_seconds, LEAST_STEPS)
        later = max(step, state.agreed.step + 1, 0 if state.pending is None else state.pending.step)
        return replace(proposal, step=later, margin_seconds=margin_seconds)

    def _margin(self, seconds: float, least: int) -> int:
        step_seconds = self._pace()[1]
        return (
            max(least, min(MOST_STEPS, math.ceil(seconds / max(step_seconds, 1e-6))))
            if step_seconds is not None
            else least
        )

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
"""Number of poll intervals from the proposal of a change to the step at which it takes effect.

A rank may read the proposal late by half of this number of intervals.
"""

_sessions = itertools.count(1)
"""Counter that numbers the monitors which a process attaches one after the other.

The same monitor has the same number on all ranks.
"""


def agreement_of(
    identity: Identity, pace: Callable[[], tuple[int, float | None]], poll_seconds: float
) -> Agreement | None:
    """Return the object by which this rank agrees with the other ranks on changes of sampling.

    Return None if there is only one rank, or if the process group has no store.
    """
    store = group_store() if identity.world_size > 1 else None
    if store is None:
        return None
    name = f"rankscope/switch/{identity.launch_id}/{next(_sessions)}"
    try:
        store = store.clone()  # a separate connection: callers that wait on the other one do not block it
    except (AttributeError, NotImplementedError, RuntimeError):  # not supported by all stores
        log.debug("the store of the process group does not support a second connection: the existing one is used")
    return Agreement(
        store, name, identity.rank, identity.world_size, pace, margin_seconds=_POLLS_PER_MARGIN * poll_seconds
    )
