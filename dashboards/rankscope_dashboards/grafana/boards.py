"""Folders, data sources and boards of a deployment.

A mark in each object states the content that was deployed. An object without it, or with other content, was changed by
a user.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope_dashboards.grafana.changes import OWNED, Action, Change, created, fingerprint, judged, removed
from rankscope_dashboards.grafana.content import Folder
from rankscope_dashboards.grafana.server import FOLDERS, Server, object_path, segment

MARK: Final = "rankscope_deployed"
"""Name of the mark: a hidden variable of a board, and a key in `jsonData` of a data source.

Grafana stores both as they are, and neither is visible in the UI."""

BOARDS: Final = "/dashboards/uid"
SOURCES: Final = "/datasources/uid"
MESSAGE: Final = "rankscope dashboards deploy"
NO_ADDRESS: Final = "it does not exist, and its address is not given"
SOURCE_KEYS: Final = ("name", "type", "access", "url")


class Folders:
    """The folders of a deployment. A folder with another title remains as it is."""

    def __init__(self, server: Server, folders: Sequence[Folder]) -> None:
        self._server = server
        self._folders = {folder.uid: folder for folder in folders}

    def plan(self) -> list[Change]:
        """Return one change per folder."""
        return [self._plan(folder) for folder in self._folders.values()]

    def write(self, change: Change) -> None:
        """Create a folder."""
        self._server.post(FOLDERS, {"uid": change.uid, "title": change.title})

    def _plan(self, folder: Folder) -> Change:
        found = self._server.find(object_path(FOLDERS, folder.uid))
        if found is not None:
            return Change(kind="folder", uid=folder.uid, title=found["title"], action=Action.SAME)
        # A board outside of folders and a folder cannot have the same title.
        named = self._server.get("/search", {"query": folder.title, "limit": 5000})
        others = [one["uid"] for one in named if one["title"] == folder.title and not one.get("folderUid")]
        return created(Change(kind="folder", uid=folder.uid, title=folder.title), others)


class Sources:
    """The data sources of a deployment. `urls` has their addresses by uid.

    A data source without an address is left as it is on the server.
    """

    def __init__(
        self, server: Server, sources: Sequence[dict[str, Any]], urls: Mapping[str, str], *, force: bool
    ) -> None:
        self._server = server
        self._sources = sources
        self._urls = urls
        self._force = force

    def plan(self) -> list[Change]:
        """Return one change per data source."""
        return [self._plan(source) for source in self._sources]

    def write(self, change: Change) -> None:
        """Create or update a data source."""
        if change.action is Action.CREATE:
            self._server.post("/datasources", marked_source(change.payload))
            return
        found = self._server.get(object_path(SOURCES, change.uid))
        wanted = marked_source(change.payload)
        merged = {**found, **wanted, "jsonData": {**found["jsonData"], **wanted["jsonData"]}}
        self._server.put(object_path(SOURCES, change.uid), merged | {"isDefault": found.get("isDefault", False)})

    def _plan(self, source: dict[str, Any]) -> Change:
        uid = source["uid"]
        found = self._server.find(object_path(SOURCES, uid))
        if uid not in self._urls:
            action, reason = (Action.KEEP, NO_ADDRESS) if found is None else (Action.SAME, "")
            return Change(kind="data source", uid=uid, action=action, reason=reason)
        wanted = source | {"url": self._urls[uid]}
        if found is None:
            other = self._server.find(f"/datasources/name/{segment(source['name'])}")
            others = [] if other is None else [other["uid"]]
            return created(Change(kind="data source", uid=uid, payload=wanted), others)
        old, new = _source_content(found, wanted), _source_content(wanted, wanted)
        is_ours = is_source_unchanged(found) is True
        action, reason = judged(is_same=old == new, is_ours=is_ours, force=self._force)
        if found.get("readOnly") and action is not Action.SAME:
            action, reason = Action.KEEP, f"{OWNED}: change its address there"
        return Change(kind="data source", uid=uid, action=action, reason=reason, old=old, new=new, payload=wanted)


class Boards:
    """The boards of a deployment, in one folder."""

    def __init__(self, server: Server, boards: Sequence[dict[str, Any]], folder: Folder, *, force: bool) -> None:
        self._server = server
        self._boards = {board["uid"]: board for board in boards}
        self._folder = folder
        self._force = force

    def plan(self) -> list[Change]:
        """Return one change per board, and one per board of an earlier release that is no longer shipped."""
        titles = board_titles(self._server, self._folder.uid)
        wanted = [self._plan(board, titles) for board in self._boards.values()]
        found = (find_board(self._server, uid) for uid in titles.keys() - self._boards.keys())
        return wanted + [self._dropped(board) for board in found if board is not None and board_mark(board) is not None]

    def write(self, change: Change) -> None:
        """Create, update or delete a board.

        Raises GrafanaError if a user saved it in the meantime. Nothing is overwritten.
        """
        if change.action is Action.DELETE:
            self._server.delete(object_path(BOARDS, change.uid))
            return
        found = find_board(self._server, change.uid)
        version = 0 if found is None else found["dashboard"]["version"]
        body = marked_board(change.payload, version + 1) | ({} if found is None else {"version": version})
        request = {"dashboard": body, "folderUid": self._folder.uid, "overwrite": False, "message": MESSAGE}
        self._server.post("/dashboards/db", request)

    def _plan(self, board: dict[str, Any], titles: Mapping[str, str]) -> Change:
        uid, title = board["uid"], board["title"]
        found = find_board(self._server, uid)
        if found is None:
            others = [other for other, name in titles.items() if name == title]
            return created(Change(kind="board", uid=uid, title=title, payload=board), others)
        old, new = board_content(found["dashboard"]), board_content(board)
        mark = board_mark(found)
        folder = found["meta"].get("folderUid", "")
        is_ours = is_board_unchanged(found) and folder == self._folder.uid
        # A release that migrates boards returns another document than it received.
        is_migrated = is_ours and mark is not None and mark[0] == fingerprint(new)
        is_same = folder == self._folder.uid and (old == new or is_migrated)
        action, reason = judged(is_same=is_same, is_ours=is_ours, force=self._force)
        if action is Action.KEEP and folder != self._folder.uid:
            reason = f"it is in the folder {found['meta'].get('folderTitle')!r}; --force moves it back"
        if found["meta"].get("provisioned") and action is not Action.SAME:
            action, reason = Action.KEEP, OWNED
        return Change(kind="board", uid=uid, title=title, action=action, reason=reason, old=old, new=new, payload=board)

    def _dropped(self, found: dict[str, Any]) -> Change:
        """Return the change for a board of an earlier release."""
        board = found["dashboard"]
        may = self._force or is_board_unchanged(found)
        return removed("board", board["uid"], board["title"], may=may, reason="no longer shipped")


def marked_source(source: dict[str, Any]) -> dict[str, Any]:
    """Return a data source with the mark."""
    return source | {"jsonData": {**source.get("jsonData", {}), MARK: _source_content(source, source)}}


def is_source_unchanged(found: dict[str, Any]) -> bool | None:
    """Return True if a data source is as it was deployed, False if it was changed, None if it was not deployed."""
    mark = found["jsonData"].get(MARK)
    return None if mark is None else _source_content(found, mark) == mark


def _source_content(source: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared part of a data source: our keys, and the keys of `jsonData` that `keys` has."""
    options = {name: source.get("jsonData", {}).get(name) for name in keys.get("jsonData", {}) if name != MARK}
    return {name: source.get(name) for name in SOURCE_KEYS} | {"jsonData": options}


def find_board(server: Server, uid: str) -> dict[str, Any] | None:
    """Return a board with its metadata; None if it does not exist."""
    found: dict[str, Any] | None = server.find(object_path(BOARDS, uid))
    return found


def board_titles(server: Server, folder: str | None = None) -> dict[str, str]:
    """Return the titles of all boards in a folder, or of the server, by uid. 9.4 ignores the parameter `folderUIDs`."""
    only = {} if folder is None else {"folderUIDs": folder}
    found = server.get("/search", {"type": "dash-db", "limit": 5000, **only})
    return {one["uid"]: one["title"] for one in found if folder is None or one.get("folderUid") == folder}


def board_content(board: dict[str, Any]) -> dict[str, Any]:
    """Return a board without the mark and without the keys that the server sets."""
    content = copy.deepcopy({name: value for name, value in board.items() if name not in {"id", "version"}})
    variables = content.get("templating", {}).get("list")
    if variables is not None:
        content["templating"]["list"] = [one for one in variables if one["name"] != MARK]
    return content


def marked_board(board: dict[str, Any], version: int) -> dict[str, Any]:
    """Return a board with the mark: the hash of its content, and the version that the server will give it."""
    content = board_content(board)
    value = f"{fingerprint(content)} {version}"
    mark = {"name": MARK, "type": "constant", "hide": 2, "skipUrlSync": True, "query": value}
    templating = content.get("templating", {})
    return content | {"templating": {**templating, "list": [*templating.get("list", []), mark]}}


def board_mark(found: dict[str, Any]) -> tuple[str, int] | None:
    """Return the hash and the version in the mark of a board; None if the board was not deployed."""
    for variable in found["dashboard"].get("templating", {}).get("list", []):
        if variable["name"] == MARK:
            content, _, version = str(variable["query"]).partition(" ")
            return content, int(version)
    return None


def is_board_unchanged(found: dict[str, Any]) -> bool:
    """Return True if a board was deployed and not saved since."""
    mark = board_mark(found)
    board = found["dashboard"]
    return mark is not None and (mark[1] == board["version"] or mark[0] == fingerprint(board_content(board)))
