"""Requests, callers and answers of the contract server."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
