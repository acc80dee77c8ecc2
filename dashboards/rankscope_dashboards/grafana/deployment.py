"""Deploy all objects to a Grafana server, and remove exactly these objects from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope_dashboards.grafana.changes import Action, Change, Kind, pending
from rankscope_dashboards.grafana.contact_points import CONTACT_POINTS, ContactPoints, is_our_contact_point
from rankscope_dashboards.grafana.content import (
    BOARDS,
    NO_ADDRESS,
    SOURCES,
    Boards,
    Folders,
    Sources,
    board_mark,
    board_uids,
    find_board,
    is_board_unchanged,
    is_source_unchanged,
)
from rankscope_dashboards.grafana.routes import POLICIES, add_route, our_routes, remove_route
from rankscope_dashboards.grafana.rules import RECEIVER_KEY, RULES, Groups, Rules, is_deployed, is_rule_unchanged
from rankscope_dashboards.grafana.server import (
    FOLDERS,
    GrafanaError,
    Server,
    UnauthorizedError,
    UnreachableError,
    object_path,
)
from rankscope_dashboards.grafana.shipped import Folder, Shipped

CHANGED: Final = "it was changed on the server; --force deletes it"
UNNOTIFIED: Final = "No contact point is notified of alerts of these rules, except by existing notification policies."
AGAIN: Final = "run the same command again to complete it"
Print = Callable[[str], None]
_COLLECTIONS: Final[Mapping[str, str]] = {
    "rule": RULES,
    "contact point": CONTACT_POINTS,
    "board": BOARDS,
    "data source": SOURCES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a deployment.

    - `urls`: addresses of the data sources by uid.
    - `contact_points`: integrations in the form of the API.
    - `receiver`: contact point of our rules.
    - `add_route`: add a route for our rules if the release drops the receiver of rules.
    - `copies`: folder for copies of the notification policies.
    - `force`: replace or delete objects of ours that a user has changed.
    - `dry_run`: only print the changes.
    """

    urls: Mapping[str, str] = field(default_factory=dict)
    contact_points: Sequence[dict[str, Any]] = ()
    receiver: str | None = None
    add_route: bool = False
    copies: Path = Path()
    force: bool = False
    dry_run: bool = False


def deploy(server: Server, content: Shipped, options: Options, show: Print) -> int:
    """Make the objects on the server equal to `content`, and return the number of changes.

    Everything is read before the first write, so a missing read permission leaves the server as it is. After the
    writes, everything is read again. Raises GrafanaError; a repeated call then completes the deployment.
    """
    server.check()
    kinds = _kinds(server, content, options)
    planned = [change for kind in kinds for change in kind.plan()]
    _check(planned, content, server, options)
    if options.dry_run:
        _show(planned, show, with_diff=True)
        _show_notification(server, content, options, show)
        return len(list(pending(planned)))
    _show([change for change in planned if change.action is Action.KEEP], show, with_diff=False)
    count = _write(kinds, show) if any(pending(planned)) else 0
    if dropped := next(kind for kind in kinds if isinstance(kind, Rules)).dropped_keys():
        show(f"This release of Grafana drops these keys of rules: {', '.join(dropped)}.")
    count += _notify(server, content, options, show)
    same = sum(change.action is Action.SAME for change in planned)
    show(f"{count} changes, {same} objects were up to date.")
    return count


def undeploy(server: Server, content: Shipped, options: Options, show: Print) -> list[str]:
    """Delete exactly the objects that a deployment has created, and return a text for each object that remains.

    A folder that holds anything else remains. Objects that a user has changed remain, unless `options.force` is set.
    """
    server.check()
    title = _folder_title(server, content.rules_folder)
    changes = [*_deployed_rules(server, options), *_deployed_content(server, content, options)]
    if options.dry_run:
        _show(changes, show, with_diff=False)
        return []
    if our_routes(server.get(POLICIES), title):
        copy = remove_route(server, title, options.copies)
        show(f"{'delete':<9} route of the folder {title}; copy of the policies: {copy}")
    kept = [line for change in changes if (line := _delete(server, change, show)) is not None]
    return kept + list(filter(None, (_delete_folder(server, one, show) for one in _folders(content))))


def _kinds(server: Server, content: Shipped, options: Options) -> list[Kind]:
    """Return all kinds of objects, in an order in which each refers only to earlier ones."""
    force, rules_folder = options.force, content.rules_folder
    return [
        Folders(server, _folders(content)),
        Sources(server, content.sources, options.urls, force=force),
        Boards(server, content.boards, content.boards_folder, force=force),
        ContactPoints(server, options.contact_points, force=force),
        Groups(server, content.groups, rules_folder, force=force),
        Rules(server, content.groups, rules_folder, receiver=options.receiver, force=force),
    ]


def _folders(content: Shipped) -> tuple[Folder, Folder]:
    return content.boards_folder, content.rules_folder


def _check(planned: Sequence[Change], content: Shipped, server: Server, options: Options) -> None:
    """Raise GrafanaError if a data source of the rules or the receiver would not exist."""
    queries = itertools.chain.from_iterable(rule["data"] for group in content.groups for rule in group.rules)
    used = {query["datasourceUid"] for query in queries}
    for change in planned:
        if change.reason == NO_ADDRESS and change.uid in used:
            raise GrafanaError(f"the rules need the data source {change.uid}: give its address with --prometheus-url")
    if options.receiver is not None:
        names = {one["name"] for one in (*server.get(CONTACT_POINTS), *options.contact_points)}
        if options.receiver not in names:
            known = ", ".join(sorted(names))
            raise GrafanaError(f"the contact point {options.receiver!r} does not exist. Contact points: {known}")


def _write(kinds: Sequence[Kind], show: Print) -> int:
    """Write all pending changes, read everything back, and return the number of changes.

    Each kind is planned again after the kinds before it are written.
    """
    count = 0
    try:
        for kind in kinds:
            for change in pending(kind.plan()):
                kind.write(change)
                count += 1
                show(change.line())
        _read_back(kinds)
    except UnreachableError as error:
        raise UnreachableError(f"{error}. The deployment is incomplete after {count} changes: {AGAIN}.") from error
    except GrafanaError as error:
        raise type(error)(f"{error} The deployment is incomplete after {count} changes.") from error
    return count


def _read_back(kinds: Sequence[Kind]) -> None:
    """Raise GrafanaError if the server has not stored an object as it was sent."""
    different = [change for kind in kinds for change in pending(kind.plan())]
    if different:
        names = ", ".join(f"{change.kind} {change.uid}" for change in different)
        raise GrafanaError(f"Grafana has not stored these objects as they were sent: {names}")


def _notify(server: Server, content: Shipped, options: Options, show: Print) -> int:
    """Add the route if it is needed, print the notified contact points, and return the number of changes."""
    title = _folder_title(server, content.rules_folder)
    count = 0
    if options.receiver and options.add_route and not _rule_receivers(server, content):
        copy = add_route(server, options.receiver, title, options.copies)
        if copy is not None:
            show(f"{'create':<9} route of the folder {title} to {options.receiver}; copy of the policies: {copy}")
            count = 1
    _show_notification(server, content, options, show)
    return count


def _show_notification(server: Server, content: Shipped, options: Options, show: Print) -> None:
    """Print the contact point of our rules, or that there is none."""
    routes = our_routes(server.get(POLICIES), _folder_title(server, content.rules_folder))
    receivers = _rule_receivers(server, content) | {one["receiver"] for one in routes}
    if receivers:
        show(f"Alerts of these rules are sent to: {', '.join(sorted(receivers))}.")
    elif options.receiver and options.dry_run:
        show(
            f"Alerts will be sent to {options.receiver}. A release that drops the receiver of rules needs --add-route."
        )
    elif options.receiver:
        show(f"{UNNOTIFIED} This release drops the receiver of rules: use --add-route.")
    else:
        show(f"{UNNOTIFIED} Use --receiver NAME.")


def _rule_receivers(server: Server, content: Shipped) -> set[str]:
    """Return the contact points that our rules name on the server."""
    ours = {rule["uid"] for group in content.groups for rule in group.rules}
    found = [rule.get(RECEIVER_KEY) for rule in server.get(RULES) if rule["uid"] in ours]
    return {settings["receiver"] for settings in found if settings}


def _folder_title(server: Server, folder: Folder) -> str:
    """Return the title of a folder on the server, which a user can have changed."""
    found = server.find(object_path(FOLDERS, folder.uid))
    return folder.title if found is None else str(found["title"])


def _show(changes: Sequence[Change], show: Print, *, with_diff: bool) -> None:
    for change in changes:
        if change.action is not Action.SAME:
            show(change.line())
            for line in change.diff() if with_diff else ():
                show(f"    {line}")


def _removal(kind: str, uid: str, title: str, options: Options, *, is_unchanged: bool) -> Change:
    may = is_unchanged or options.force
    action, reason = (Action.DELETE, "") if may else (Action.KEEP, CHANGED)
    return Change(kind=kind, uid=uid, title=title, action=action, reason=reason)


def _deployed_rules(server: Server, options: Options) -> list[Change]:
    """Return the removal of each rule and contact point that a deployment has created."""
    rules = [rule for rule in server.get(RULES) if is_deployed(rule)]
    points = [point for point in server.get(CONTACT_POINTS) if is_our_contact_point(point)]
    return [
        *(_removal("rule", one["uid"], one["title"], options, is_unchanged=is_rule_unchanged(one)) for one in rules),
        *(_removal("contact point", one["uid"], one["name"], options, is_unchanged=True) for one in points),
    ]


def _deployed_content(server: Server, content: Shipped, options: Options) -> list[Change]:
    """Return the removal of each board and data source that a deployment has created."""
    uids = board_uids(server, content.boards_folder.uid) | {board["uid"] for board in content.boards}
    boards = [board for uid in sorted(uids) if (board := find_board(server, uid)) is not None]
    removals = [
        _removal(
            "board", one["dashboard"]["uid"], one["dashboard"]["title"], options, is_unchanged=is_board_unchanged(one)
        )
        for one in boards
        if board_mark(one) is not None
    ]
    for source in content.sources:
        found = server.find(object_path(SOURCES, source["uid"]))
        is_unchanged = None if found is None else is_source_unchanged(found)
        if is_unchanged is not None:
            removals.append(_removal("data source", source["uid"], "", options, is_unchanged=is_unchanged))
    return removals


def _delete(server: Server, change: Change, show: Print) -> str | None:
    """Delete the object of a change; return a text if it remains."""
    if change.action is not Action.DELETE:
        return change.line()
    try:
        server.delete(object_path(_COLLECTIONS[change.kind], change.uid))
    except (UnreachableError, UnauthorizedError):
        raise
    except GrafanaError as error:
        return f"{Action.KEEP.value:<9} {change.kind} {change.uid}: {error}"
    show(change.line())
    return None


def _delete_folder(server: Server, folder: Folder, show: Print) -> str | None:
    """Delete a folder if it is empty; return a text if it remains.

    Grafana deletes the boards of a folder together with it, so its content is read immediately before.
    """
    found = server.find(object_path(FOLDERS, folder.uid))
    if found is None:
        return None
    rules = [f"rule {rule['title']}" for rule in server.get(RULES) if rule["folderUID"] == folder.uid]
    boards = [f"board {uid}" for uid in sorted(board_uids(server, folder.uid))]
    if rules or boards:
        return f"keep      folder {found['title']}: it holds {', '.join(boards + rules)}"
    server.delete(object_path(FOLDERS, folder.uid))
    show(f"{'delete':<9} folder {found['title']} ({folder.uid})")
    return None
