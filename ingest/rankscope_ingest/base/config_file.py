"""Read the service's TOML file; say what is wrong in it as a person would: file, key, what is allowed."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rankscope_ingest.base.config import ServiceConfig
from rankscope_ingest.base.errors import ConfigError

TOKEN: Final = "RANKSCOPE_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE: Final = "RANKSCOPE_TOKEN_FILE"  # noqa: S105 - the name of a variable


def load_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ServiceConfig:
    """Return the configuration in `path`, with `overrides` ("store.path": …) put over it.

    Relative paths are relative to the file. Without a file the overrides must hold what has no default. Where the file
    names no token, the one of `environment` is taken. Raises ConfigError naming every fault at once.
    """
    document = {} if path is None else _read(Path(path))
    base = Path.cwd() if path is None else Path(path).resolve().parent
    _anchor_store(document, base)
    _anchor_files(document, base)
    _anchor_spools(document, base)
    _anchor_lists(document, base)
    for key, value in (overrides or {}).items():
        _put(document, key, value)
    _take_token(document, environment)
    try:
        return ServiceConfig.model_validate(document)
    except ValidationError as error:
        source = "the given settings" if path is None else str(path)
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors(include_url=False))
        raise ConfigError(f"{source} is not a valid configuration:\n{faults}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; name an existing TOML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _anchor_store(document: dict[str, Any], base: Path) -> None:
    store = document.get("store")
    if isinstance(store, dict) and isinstance(store.get("path"), str) and "://" not in store["path"]:
        store["path"] = str(base / Path(store["path"]).expanduser())


def _anchor_files(document: dict[str, Any], base: Path) -> None:
    service = document.get("service")
    if not isinstance(service, dict):
        return
    for key in ("token_file", "web_config", "ca_file", "cert_file", "key_file"):
        if isinstance(service.get(key), str):
            service[key] = str(base / Path(service[key]).expanduser())


def _anchor_spools(document: dict[str, Any], base: Path) -> None:
    spool = document.get("spool")
    if isinstance(spool, dict) and isinstance(spool.get("folders"), list):
        spool["folders"] = [
            str(base / Path(folder).expanduser()) if isinstance(folder, str) else folder for folder in spool["folders"]
        ]


def _anchor_lists(document: dict[str, Any], base: Path) -> None:
    lists = document.get("exporter_lists")
    for one in lists if isinstance(lists, list) else ():
        if isinstance(one, dict) and isinstance(one.get("file"), str):
            one["file"] = str(base / Path(one["file"]).expanduser())


def _take_token(document: dict[str, Any], environment: Mapping[str, str]) -> None:
    service = document.setdefault("service", {})
    if isinstance(service, dict) and not {"token", "token_file"} & service.keys():
        token = token_of(environment)
        service.update({} if token is None else {"token": token})


def token_of(environment: Mapping[str, str]) -> str | None:
    """Return the token that the environment gives, as ranks read it: itself or in a file; an empty one is none."""
    path, token = environment.get(TOKEN_FILE), environment.get(TOKEN)
    if path and token:
        raise ConfigError(f"{TOKEN} and {TOKEN_FILE} are both set: leave one of them out")
    if not path:
        return token or None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOKEN_FILE} {path}: {getattr(error, 'strerror', None) or error}") from error


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[last] = str(value) if isinstance(value, Path) else value


def _explain(fault: ErrorDetails) -> str:
    location = tuple(fault["loc"])
    key = _dotted(location)
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_allowed(location)}"
    if fault["type"] == "missing":
        return f"{key}: is missing and has no default"
    text = fault["msg"].removeprefix("Value error, ")
    given = "" if _is_secret(key) or isinstance(fault["input"], dict) else f" (given: {fault['input']!r})"
    return f"{key}: {text}{given}" if key else f"{text}{given}"


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _is_secret(key: str) -> bool:
    return "token" in key or key.startswith("notify.urls")


def _allowed(location: tuple[int | str, ...]) -> str:
    """Return the keys that may stand where `location` ends, and the nearest to what was written."""
    model: type[BaseModel] = ServiceConfig
    for part in location[:-1]:
        if isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation)
    names = list(model.model_fields)
    nearest = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{hint}allowed: {', '.join(names)}"


def _model_in(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_model_in(argument) for argument in get_args(annotation) if argument is not Ellipsis)
