"""How the ranks of a training come to one agreement about changes: through the store of their process group."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from rankscope_contract.identity import Identity
from rankscope_exporter.identity import group_store
from rankscope_exporter.switching.agreement import Agreement

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
