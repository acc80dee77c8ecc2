"""Deploy all objects to a Grafana server, and remove exactly these objects from it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rankscope_dashboards.grafana import routes
from rankscope_dashboards.grafana.boards import (
    BOARDS,
    NO_ADDRESS,
    SOURCES,
    Boards,
    Folders,
    Sources,
    board_mark,
    board_titles,
    find_board,
    is_board_unchanged,
    is_source_unchanged,
)
from rankscope_dashboards.grafana.changes import OWNED, Action, Change, Kind, pending, removed
from rankscope_dashboards.grafana.contact_points import CONTACT_POINTS, ContactPoints, is_our_contact_point
from rankscope_dashboards.grafana.content import Content, Folder
from rankscope_dashboards.grafana.rules import RECEIVER_KEY, RULES, Groups, Rules, is_deployed, is_rule_unchanged
from rankscope_dashboards.grafana.server import (
    FOLDERS,
    GrafanaError,
    RefusedError,
    Server,
    UnreachableError,
    object_path,
)

UNNOTIFIED: Final = "No contact point is notified of alerts of these rules, except by existing notification policies."
AGAIN: Final = "run the same command again to complete it"
Print = Callable[[str], None]
_COLLECTIONS: Final[Mapping[str, str]] = {
    "rule": RULES,
    "contact point": CONTACT_POINTS,
    "board": BOARDS,
    "data source": SOURCES,
    "mute timing": routes.MUTE_TIMINGS,
    "folder": FOLDERS,
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


def deploy(server: Server, content: Content, options: Options, show: Print) -> int:
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


def undeploy(server: Server, content: Content, options: Options, show: Print) -> list[str]:
    """Delete exactly the objects that a deployment has created, and return a text for each object that remains.

    A folder that holds anything else remains, and a data source that a remaining board or rule queries. Objects that a
    user has changed remain, unless `options.force` is set.
    """
    server.check()
    changes = [*_deployed_rules(server, content, options), *_deployed_boards(server, content, options)]
    changes += _deployed_sources(server, content, options, {one.uid for one in changes if one.action is Action.DELETE})
    gone = {one.uid for one in changes if one.action is Action.DELETE}
    if options.dry_run:
        _show([*changes, *_deployed_folders(server, content, gone)], show, with_diff=False)
        return []
    kept = [line for change in changes if (line := _delete(server, change, options, show)) is not None]
    # Grafana deletes the boards of a folder together with it, so its content is read immediately before.
    folders = _deployed_folders(server, content, ())
    return kept + [line for change in folders if (line := _delete(server, change, options, show)) is not None]


def _kinds(server: Server, content: Content, options: Options) -> list[Kind]:
    """Return all kinds of objects, in an order in which each refers only to earlier ones."""
    force, rules_folder = options.force, content.rules_folder
    return [
        Folders(server, (content.boards_folder, content.rules_folder)),
        Sources(server, content.sources, options.urls, force=force),
        Boards(server, content.boards, content.boards_folder, force=force),
        ContactPoints(server, options.contact_points, force=force),
        *([routes.MuteTimings(server)] if options.receiver else []),
        Groups(server, content.groups, rules_folder, force=force),
        Rules(server, content.groups, rules_folder, receiver=options.receiver, force=force),
    ]


def _check(planned: Sequence[Change], content: Content, server: Server, options: Options) -> None:
    """Raise GrafanaError if files own rules, a name is not free, or a needed object is absent, or owned."""
    owned = [change for change in planned if change.reason.startswith(OWNED)]
    if rules := [change.title for change in owned if change.kind == "rule"]:
        others = "".join(f", {one.kind} {one.title or one.uid}" for one in owned if one.kind != "rule")
        raise GrafanaError(
            f"provisioning files own these {len(rules)} rules: {', '.join(rules)}{others}. Only the files can change "
            "them: use either files or this command for a server. Nothing was changed."
        )
    if clashes := [" ".join(change.line().split()) for change in planned if change.action is Action.CLASH]:
        raise GrafanaError("; ".join([*clashes, "nothing was changed"]))
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
        tree, title = server.get(routes.POLICIES), _folder_title(server, content.rules_folder)
        has_receiver = server.release >= (11, 0) or _rule_receivers(server, content) or routes.our_routes(tree, title)
        if options.add_route and not options.dry_run and not has_receiver and (text := routes.owner(tree)):
            raise GrafanaError(f"{text} Nothing was changed. Leave out --add-route: {routes.BY_HAND}")


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


def _notify(server: Server, content: Content, options: Options, show: Print) -> int:
    """Add the route if it is needed, print the notified contact points, and return the number of changes."""
    title = _folder_title(server, content.rules_folder)
    count = 0
    if options.receiver and options.add_route and not _rule_receivers(server, content):
        copy = routes.set_route(server, options.receiver, title, options.copies)
        if copy is not None:
            show(f"{'create':<9} route of the folder {title} to {options.receiver}; copy of the policies: {copy}")
            count = 1
    _show_notification(server, content, options, show)
    return count


def _show_notification(server: Server, content: Content, options: Options, show: Print) -> None:
    """Print the contact point of our rules, or that there is none."""
    ours = routes.our_routes(server.get(routes.POLICIES), _folder_title(server, content.rules_folder))
    receivers = _rule_receivers(server, content) | {one["receiver"] for one in ours}
    if receivers:
        show(f"Alerts of these rules are sent to: {', '.join(sorted(receivers))}.")
    elif options.receiver and options.dry_run:
        text = "" if options.add_route else " A release that drops the receiver of rules needs --add-route."
        show(f"Alerts will be sent to {options.receiver}.{text} {routes.owner(server.get(routes.POLICIES))}".strip())
    elif options.receiver:
        show(f"{UNNOTIFIED} This release drops the receiver of rules: use --add-route.")
    else:
        show(f"{UNNOTIFIED} Use --receiver NAME.")


def _rule_receivers(server: Server, content: Content) -> set[str]:
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


def _deployed_rules(server: Server, content: Content, options: Options) -> list[Change]:
    """Return the removal of the route, rules, contact points and mute timing that a deployment has created."""
    title = _folder_title(server, content.rules_folder)
    ours = routes.our_routes(server.get(routes.POLICIES), title)
    rules = [rule for rule in server.get(RULES) if is_deployed(rule)]
    points = [point for point in server.get(CONTACT_POINTS) if is_our_contact_point(point)]
    timings = [one for one in server.get(routes.MUTE_TIMINGS) if one["name"] == routes.ALWAYS]
    return [
        *(removed("route", title, "", may=True, reason=f"to {one['receiver']}") for one in ours[:1]),
        *(removed("rule", one["uid"], one["title"], may=options.force or is_rule_unchanged(one)) for one in rules),
        *(removed("contact point", one["uid"], one["name"], may=True) for one in points),
        *(removed("mute timing", one["name"], "", may=True) for one in timings),
    ]


def _deployed_boards(server: Server, content: Content, options: Options) -> list[Change]:
    """Return the removal of each board that a deployment has created."""
    uids = board_titles(server, content.boards_folder.uid).keys() | {board["uid"] for board in content.boards}
    boards = [(uid, board) for uid in sorted(uids) if (board := find_board(server, uid)) is not None]
    return [
        removed("board", uid, board["dashboard"]["title"], may=options.force or is_board_unchanged(board))
        for uid, board in boards
        if board_mark(board) is not None
    ]


def _deployed_sources(server: Server, content: Content, options: Options, gone: Collection[str]) -> list[Change]:
    """Return the removal of each data source that a deployment has created.

    `gone` are the uids of the boards and rules that are deleted before.
    """
    found = [source for one in content.sources if (source := server.find(object_path(SOURCES, one["uid"])))]
    deployed = [(source, same) for source in found if (same := is_source_unchanged(source)) is not None]
    removals = [removed("data source", source["uid"], "", may=options.force or same) for source, same in deployed]
    texts = _remaining(server, gone) if removals else {}
    return [_used(change, [name for name, text in texts.items() if f'"{change.uid}"' in text]) for change in removals]


def _deployed_folders(server: Server, content: Content, gone: Collection[str]) -> list[Change]:
    """Return the removal of each folder that exists; it remains if it holds an object that is not in `gone`."""
    found = [
        folder
        for one in (content.boards_folder, content.rules_folder)
        if (folder := server.find(object_path(FOLDERS, one.uid)))
    ]
    removals = [removed("folder", folder["uid"], folder["title"], may=True) for folder in found]
    return [_used(change, list(_remaining(server, gone, change.uid))) for change in removals]


def _remaining(server: Server, gone: Collection[str], folder: str | None = None) -> dict[str, str]:
    """Return the boards and rules of a folder, or of the server, that are not in `gone`, as JSON by name."""
    boards = sorted(board_titles(server, folder).keys() - gone)
    rules = [one for one in server.get(RULES) if one["uid"] not in gone and folder in {None, one["folderUID"]}]
    documents = {f"board {uid}": find_board(server, uid) for uid in boards}
    return {name: json.dumps(one) for name, one in (documents | {f"rule {one['title']}": one for one in rules}).items()}


def _used(change: Change, users: Sequence[str]) -> Change:
    """Return the removal of an object, which remains if it has users."""
    return replace(change, action=Action.KEEP, reason=f"still used by {', '.join(users)}") if users else change


def _delete(server: Server, change: Change, options: Options, show: Print) -> str | None:
    """Delete the object of a change; return a text if it remains."""
    if change.action is not Action.DELETE:
        return change.line()
    try:
        if change.kind == "route":
            copy = routes.set_route(server, None, change.uid, options.copies)
            change = replace(change, reason=f"copy of the policies: {copy}")
        else:
            server.delete(object_path(_COLLECTIONS[change.kind], change.uid))
    except RefusedError as error:
        return replace(change, action=Action.KEEP, reason=str(error)).line()
    show(change.line())
    return None
