"""The difference between the wanted objects and those of a server: one change per object, and its text."""

from __future__ import annotations

import difflib
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol


class Action(enum.Enum):
    """The step that makes an object equal to the wanted one."""

    SAME = "unchanged"
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    KEEP = "keep"
    """The object is not ours to change: a user changed it, or another tool owns it."""

    CLASH = "clash"
    """Another object has the name that this one needs."""


CHANGED: Final = "it was changed on the server; --force deletes it"
OWNED: Final = "a provisioning file owns it"
WRITES = (Action.CREATE, Action.UPDATE, Action.DELETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One object of a deployment.

    `old` and `new` are the compared parts on the server and of the deployment, for a diff. `payload` is the document to
    write.
    """

    kind: str
    uid: str
    action: Action = Action.CREATE
    title: str = ""
    reason: str = ""
    old: dict[str, Any] | None = None
    new: dict[str, Any] | None = None
    payload: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the change as one line of text."""
        name = f"{self.title} ({self.uid})" if self.title not in {"", self.uid} else self.uid
        return f"{self.action.value:<9} {self.kind} {name}" + (f": {self.reason}" if self.reason else "")

    def diff(self) -> list[str]:
        """Return the lines that differ between both documents; an empty list if one of them is absent."""
        if self.old is None or self.new is None:
            return []
        old, new = (json.dumps(one, indent=1, sort_keys=True).splitlines() for one in (self.old, self.new))
        return list(difflib.unified_diff(old, new, "server", "deployment", lineterm="", n=2))


class Kind(Protocol):
    """Objects of one kind."""

    def plan(self) -> list[Change]:
        """Read the server and return one change per object. Send no write request."""

    def write(self, change: Change) -> None:
        """Send the write requests of one change."""


def pending(changes: Sequence[Change]) -> Iterator[Change]:
    """Yield the changes that need a write request."""
    return (change for change in changes if change.action in WRITES)


def created(change: Change, others: Sequence[str]) -> Change:
    """Return the creation of an object, or a clash if `others`, the uids of other objects with its name, has any."""
    if not others:
        return replace(change, action=Action.CREATE)
    reason = f"uid {', '.join(others)} has this name: rename it, then run the same command again"
    return replace(change, action=Action.CLASH, reason=reason)


def removed(kind: str, uid: str, title: str, *, may: bool, reason: str = "") -> Change:
    """Return the deletion of an object, which remains unless `may` is set."""
    action, why = (Action.DELETE, "") if may else (Action.KEEP, CHANGED)
    return Change(kind=kind, uid=uid, title=title, action=action, reason=", but ".join(filter(None, (reason, why))))


def without_empty(value: Any) -> Any:
    """Return a JSON document without entries that are empty, null or false."""
    if isinstance(value, Mapping):
        kept = {name: without_empty(one) for name, one in value.items()}
        return {
            name: one for name, one in kept.items() if one is not None and one is not False and one not in ("", [], {})
        }
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def fingerprint(document: Any) -> str:
    """Return a short hash of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def judged(*, is_same: bool, is_ours: bool, force: bool) -> tuple[Action, str]:
    """Return the action for an object that exists on the server, with its reason.

    `is_ours` states that the object is as the last deployment wrote it.
    """
    if is_same:
        return Action.SAME, ""
    if is_ours:
        return Action.UPDATE, ""
    if force:
        return Action.UPDATE, "replaces a changed object, as --force requires"
    return Action.KEEP, "it was changed on the server; --force replaces it"
