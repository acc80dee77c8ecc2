"""Folders, data sources and boards of the contract server, and its requests, callers and answers."""

import copy
import enum
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit


class Role(enum.Enum):
    """Role of a service account, an API key or a user in its organisation."""

    ADMIN = "Admin"
    EDITOR = "Editor"
    VIEWER = "Viewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The authenticated sender of a request."""

    role: Role
    login: str
    organisation: int
    is_grafana_admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request. `path` is quoted, and `body` is the JSON document or the text of a form."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer: its status and its JSON document. An empty text is an empty body."""

    status: int
    body: Any = ""
    content_type: str = "application/json"


def message(status: int, text: str, /, **more: Any) -> Answer:
    """Return an answer with the text of an error or a confirmation."""
    return Answer(status, {"message": text, **more})


NULL = Answer(404, None, "text/plain; charset=utf-8")
"""The answer to requests for absent rules, templates and mute timings."""

NOT_MODELLED = message(501, "no deployment sends this request")
"""The answer of the contract server, but not of Grafana, to all other requests."""


MOST_UID_CHARACTERS: Final = 40
CHANGED_FOLDER: Final = message(412, "the folder has been changed by someone else", status="version-mismatch")
NO_FOLDER: Final = message(404, "folder not found", status="not-found")
NO_SOURCE: Final = message(404, "Data source not found")
NO_BOARD: Final = message(404, "Dashboard not found")
CHANGED_BOARD: Final = message(412, "The dashboard has been changed by someone else", status="version-mismatch")
SAME_NAME: Final = message(412, "A dashboard with the same name in the folder already exists", status="name-exists")


@dataclass
class Folder:
    """A folder of the first organisation."""

    uid: str
    title: str
    id: int
    login: str
    version: int = 1


@dataclass
class Board:
    """A saved board."""

    uid: str
    id: int
    folder: str
    login: str
    document: dict[str, Any]
    version: int = 0
    file: str = ""

    @property
    def title(self) -> str:
        return str(self.document["title"])

    def save(self, document: dict[str, Any]) -> None:
        self.version += 1
        self.document = {**document, "id": self.id, "uid": self.uid, "version": self.version}


def uid_error(uid: str) -> str | None:
    """Return the reason why a uid of a folder or board is not permitted."""
    if not re.fullmatch(r"[A-Za-z0-9_-]*", uid):
        return "uid contains illegal characters"
    return f"uid too long, max {MOST_UID_CHARACTERS} characters" if len(uid) > MOST_UID_CHARACTERS else None


class Content:
    """Folders, data sources, boards. `migrates_boards`: return another schema version than was sent (not recorded)."""

    def __init__(self) -> None:
        self.migrates_boards = False
        self.folders: dict[str, Folder] = {}
        self.boards: dict[str, Board] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.folder_holds_rules: Callable[[str], bool] = lambda _uid: False
        self.delete_rules: Callable[[str], None] = lambda _uid: None
        self._board_ids = itertools.count(1)
        self._source_ids = itertools.count(1)

    def routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        return [
            *(("POST", "/api/folders", self._create_folder), ("GET", "/api/folders/([^/]+)", self._get_folder)),
            ("DELETE", "/api/folders/([^/]+)", self._delete_folder),
            ("POST", "/api/datasources", self._create_source),
            ("GET", "/api/datasources/(uid|name)/([^/]+)", self._get_source),
            ("PUT", "/api/datasources/uid/([^/]+)", self._update_source),
            ("DELETE", "/api/datasources/uid/([^/]+)", self._delete_source),
            ("POST", "/api/dashboards/db", self._save_board),
            ("GET", "/api/dashboards/uid/([^/]+)", self._get_board),
            *(("DELETE", "/api/dashboards/uid/([^/]+)", self._delete_board), ("GET", "/api/search", self._search)),
        ]

    def add_folder(self, uid: str, title: str, login: str = "Anonymous") -> Folder:
        self.folders[uid] = Folder(uid=uid, title=title, id=next(self._board_ids), login=login)
        return self.folders[uid]

    def add_board(self, uid: str, document: dict[str, Any], folder: str, *, login: str, file: str = "") -> Board:
        board = Board(uid=uid, id=next(self._board_ids), folder=folder, login=login, document={}, file=file)
        board.save(document)
        self.boards[uid] = board
        return board

    def _create_folder(self, request: Request, caller: Caller) -> Answer:
        title, uid = request.body["title"], request.body.get("uid", "")
        if not title:
            return message(400, "folder title cannot be empty")
        if error := uid_error(uid):
            return message(400, error)
        if any(folder.title == title for folder in self.folders.values()):
            return message(409, "a folder or dashboard in the general folder with the same name already exists")
        if uid in self.folders:
            return CHANGED_FOLDER
        return self._folder_answer(self.add_folder(uid, title, caller.login), caller)

    def _folder_answer(self, folder: Folder, caller: Caller) -> Answer:
        may = {"canSave": caller.role is Role.ADMIN, "version": folder.version}
        return Answer(200, {"uid": folder.uid, "title": folder.title, "createdBy": folder.login, **may})

    def _get_folder(self, _request: Request, caller: Caller, uid: str) -> Answer:
        return self._folder_answer(self.folders[uid], caller) if uid in self.folders else NO_FOLDER

    def _delete_folder(self, request: Request, _caller: Caller, uid: str) -> Answer:
        if uid not in self.folders:
            return NO_FOLDER
        if self.folder_holds_rules(uid):
            if request.query.get("forceDeleteRules") != "true":
                return message(400, "folder cannot be deleted: folder contains alert rules")
            self.delete_rules(uid)
        del self.folders[uid]
        self.boards = {key: board for key, board in self.boards.items() if board.folder != uid}
        return Answer(200)

    def _create_source(self, request: Request, _caller: Caller) -> Answer:
        wanted = request.body
        if "type" not in wanted:
            return message(400, "bad request data")
        try:
            urlsplit(wanted.get("url", ""))
        except ValueError:
            return message(400, "Validation error, invalid URL")
        for name in ("name", "uid"):
            if any(source[name] == wanted[name] for source in self.sources.values()):
                return message(409, f"data source with the same {name} already exists")
        return self._source_answer(self.add_source(wanted), "Data source added")

    def add_source(
        self, wanted: dict[str, Any], *, number: int | None = None, version: int = 1, read_only: bool = False
    ) -> Any:
        made = {"id": number or next(self._source_ids), "version": version, "readOnly": read_only}
        made |= {name: wanted[name] for name in ("uid", "name", "type", "access")}
        made |= {name: wanted.get(name, unset) for name, unset in (("url", ""), ("isDefault", False), ("jsonData", {}))}
        self.sources[wanted["uid"]] = made
        return made

    def _source_answer(self, source: dict[str, Any], text: str) -> Answer:
        shown = text.replace("Data source", "Datasource")
        return Answer(200, {"datasource": source, "id": source["id"], "message": shown, "name": source["name"]})

    def _get_source(self, _request: Request, _caller: Caller, key: str, value: str) -> Answer:
        found = [source for source in self.sources.values() if source[key] == value]
        return Answer(200, found[0]) if found else NO_SOURCE

    def _update_source(self, request: Request, _caller: Caller, uid: str) -> Answer:
        wanted = request.body
        if uid not in self.sources:
            return NO_SOURCE
        old = self.sources[uid]
        if old["readOnly"]:
            return message(403, "Cannot update read-only data source")
        if any(source["name"] == wanted["name"] for key, source in self.sources.items() if key != uid):
            return message(500, "Failed to update datasource")
        made = self.add_source(wanted, number=old["id"], version=wanted.get("version", 0) + 1)
        return self._source_answer(made, "Data source updated")

    def _delete_source(self, _request: Request, _caller: Caller, uid: str) -> Answer:
        if uid not in self.sources:
            return NO_SOURCE
        if self.sources[uid]["readOnly"]:
            return message(403, "Cannot delete read-only data source")
        return message(200, "Data source deleted", id=self.sources.pop(uid)["id"])

    def _save_board(self, request: Request, caller: Caller) -> Answer:
        wanted = copy.deepcopy(request.body["dashboard"])
        uid, folder = wanted.get("uid", ""), request.body.get("folderUid", "")
        overwrite = request.body.get("overwrite", False)
        if not wanted.get("title"):
            return message(400, "Dashboard title cannot be empty", status="empty-name")
        if error := uid_error(uid):
            return message(400, error)
        if folder and folder not in self.folders:
            return message(400, "Folder not found")
        if wanted.get("id") and wanted["id"] not in {board.id for board in self.boards.values()}:
            return message(404, "Dashboard not found", status="not-found")
        old = self.boards.get(uid)
        if old is not None and old.file:
            return message(400, "Cannot save provisioned dashboard")
        if old is not None and not overwrite and wanted.get("version") != old.version:
            return CHANGED_BOARD
        boards, place = self.boards.values(), (wanted["title"], folder)
        same = next((one for one in boards if (one.title, one.folder) == place and one.uid != uid), None)
        if same is not None:
            if not overwrite:
                return SAME_NAME
            old = same  # the other board is replaced and keeps its uid
        if old is None:
            old = self.add_board(uid, wanted, folder, login=caller.login)
        else:
            old.folder = folder
            old.save(wanted)
        return Answer(200, {"id": old.id, "status": "success", "uid": old.uid, "version": old.version})

    def _get_board(self, _request: Request, _caller: Caller, uid: str) -> Answer:
        if uid not in self.boards:
            return NO_BOARD
        board = self.boards[uid]
        meta = {"folderUid": board.folder, "version": board.version, "updatedBy": board.login, "createdBy": board.login}
        meta |= {"provisioned": bool(board.file), "provisionedExternalId": board.file}
        document = board.document | ({"schemaVersion": 99} if self.migrates_boards else {})
        return Answer(200, {"meta": meta, "dashboard": document})

    def _delete_board(self, _request: Request, _caller: Caller, uid: str) -> Answer:
        if uid not in self.boards:
            return NO_BOARD
        board = self.boards[uid]
        if board.file:
            return message(400, "provisioned dashboard cannot be deleted")
        del self.boards[uid]
        return message(200, f"Dashboard {board.title} deleted", id=board.id, title=board.title)

    def _search(self, request: Request, _caller: Caller) -> Answer:
        """Return boards and folders. The parameter `folderUIDs` is ignored, as Grafana 9.4 does."""
        title = request.query.get("query", "").lower()
        boards = [self._found(board) for board in self.boards.values()]
        named = {"type": "dash-folder"}
        folders = [named | {"id": one.id, "uid": one.uid, "title": one.title} for one in self.folders.values()]
        if (number := request.query.get("folderIds")) is not None:
            return Answer(200, [one for one in boards if str(one["folderId"]) == number])
        found = boards if request.query.get("type") == "dash-db" else folders + boards
        return Answer(200, [one for one in found if title in one["title"].lower()])

    def _found(self, board: Board) -> dict[str, Any]:
        found = {"id": board.id, "uid": board.uid, "title": board.title, "type": "dash-db", "folderId": 0}
        if (folder := self.folders.get(board.folder)) is None:
            return found
        return found | {"folderId": folder.id, "folderUid": folder.uid, "folderTitle": folder.title}
