"""Read the TOML file of the service. Errors name the file, the key and the allowed values."""

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

_PATH_KEYS: Final = {
    "store": ("path",),
    "service": ("token_file", "web_config", "ca_file", "cert_file", "key_file"),
    "spool": ("folders",),
    "exporter_lists": ("file",),
    "watch": ("log", "known_hosts"),
}
"""Keys whose values are file names, by section.

Relative file names are resolved against the folder of the configuration file. A value that is a URL is not changed; the
validation rejects it if the key does not accept URLs.
"""


def load_config(
    path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ServiceConfig:
    """Return the configuration in the file `path`, with `overrides` applied.

    `overrides` maps dotted keys such as "store.path" to values. Relative paths in the file are relative to its folder.
    Without a file, `overrides` must contain the keys that have no default. If the file sets no token, the token in
    `environment` is used. Raises ConfigError whose text lists all faults.
    """
    document = {} if path is None else _read(Path(path))
    if path is not None:
        _resolve_paths(document, Path(path).resolve().parent)
    for key, value in (overrides or {}).items():
        _put(document, key, value)
    _take_token(document, environment)
    try:
        return ServiceConfig.model_validate(document)
    except ValidationError as error:
        source = "the options" if path is None else f"{path} or the options" if overrides else str(path)
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors(include_url=False))
        raise ConfigError(f"invalid configuration in {source}:\n{faults}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file: give the path of an existing TOML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the file is not valid TOML: {error}") from error


def _resolve_paths(document: dict[str, Any], base: Path) -> None:
    """Resolve the relative paths in `document`, the parsed TOML file, against the folder `base`.

    Values of a wrong type are not changed; the validation rejects them.
    """
    for section_name, keys in _PATH_KEYS.items():
        sections = document.get(section_name)
        for section in sections if isinstance(sections, list) else [sections]:
            if isinstance(section, dict):
                section.update({key: _resolved(section[key], base) for key in keys if key in section})


def _resolved(value: Any, base: Path) -> Any:
    if isinstance(value, list):
        return [_resolved(item, base) for item in value]
    return str(base / Path(value).expanduser()) if isinstance(value, str) and "://" not in value else value


def _take_token(document: dict[str, Any], environment: Mapping[str, str]) -> None:
    service = document.setdefault("service", {})
    if isinstance(service, dict) and not {"token", "token_file"} & service.keys():
        token = token_of(environment)
        service.update({} if token is None else {"token": token})


def token_of(environment: Mapping[str, str]) -> str | None:
    """Return the service token from the environment variables `environment`, or None if it is missing or empty.

    One variable contains the token, another one the name of a token file. Raises ConfigError if both variables are set
    or the file cannot be read.
    """
    path, token = environment.get(TOKEN_FILE), environment.get(TOKEN)
    if path and token:
        raise ConfigError(f"{TOKEN} and {TOKEN_FILE} are both set: remove one of them")
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
    return "token" in key or key.startswith(("notify.urls", "notify.proxy"))


def _allowed(location: tuple[int | str, ...]) -> str:
    """Return the keys that are allowed in a section with an unknown key, as part of the error text.

    `location` is the path of the unknown key in the configuration. If one of the allowed keys is similar to the unknown
    key, the text proposes it.
    """
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
