"""Prometheus' web configuration file, as both our HTTP servers read it: certificate, client certificates, users.

One file serves node_exporter, Prometheus and us. What it asks for and we cannot do is refused by name: a server that
protects less than its configuration says would be worse than none. Values and checks; contexts are made in `tls`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

ClientAuth = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]
TlsVersion = Literal["TLS12", "TLS13"]

_SECTIONS: Final = ("tls_server_config", "basic_auth_users")
_TLS_KEYS: Final = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version")
_REFUSED: Final = {
    "http_server_config": "it asks for HTTP/2 or more headers, which this server does not have: leave it out",
    "cert": "name a file in cert_file",
    "key": "name a file in key_file",
    "client_ca": "name a file in client_ca_file",
    "client_allowed_sans": "sign the certificates of allowed clients with a CA of their own, and leave it out",
    "cipher_suites": "leave it out, or ask for min_version: TLS13",
    "prefer_server_cipher_suites": "leave it out",
    "curve_preferences": "leave it out",
}
_UNVERIFIED: Final = ("RequestClientCert", "RequireAnyClientCert")

LoadYaml = Callable[[str], Any]


class WebConfigError(ValueError):
    """A web configuration cannot be used; the text names the file, the key and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsServer:
    """`tls_server_config`: what the server shows, and whom it asks to show something."""

    cert_file: Path
    key_file: Path
    client_auth_type: ClientAuth = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"

    @property
    def files(self) -> tuple[Path, ...]:
        """Return what must be read again when it changes."""
        return (self.cert_file, self.key_file, *(() if self.client_ca_file is None else (self.client_ca_file,)))

    @property
    def demands_client_certificates(self) -> bool:
        """Return whether nobody gets in without a certificate that a CA of ours has signed."""
        return self.client_auth_type == "RequireAndVerifyClientCert"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The whole file; without TLS it has users alone."""

    tls: TlsServer | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)  # name -> bcrypt hash

    @property
    def demands_identity(self) -> bool:
        """Return whether the file by itself keeps strangers out."""
        return bool(self.users) or (self.tls is not None and self.tls.demands_client_certificates)


def read_web_config(path: Path, load_yaml: LoadYaml | None) -> WebConfig:
    """Return the configuration in a YAML, JSON or TOML file; file names in it are relative to its folder.

    `load_yaml` is None where no YAML reader is installed. Raises WebConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WebConfigError(f"web_config {path}: {getattr(error, 'strerror', None) or error}") from error
    document = _parsed(path, text, load_yaml)
    if not isinstance(document, Mapping):
        raise WebConfigError(f"web_config {path}: keys and values are expected, not {type(document).__name__}")
    try:
        return _web_config(document, path.parent)
    except WebConfigError as error:
        raise WebConfigError(f"web_config {path}: {error}") from error


def _parsed(path: Path, text: str, load_yaml: LoadYaml | None) -> Any:
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            return json.loads(text)
    except ValueError as error:
        raise WebConfigError(f"web_config {path}: {error}") from error
    if load_yaml is None:
        raise WebConfigError(
            f"web_config {path}: no YAML reader is installed here. Install pyyaml, or write the same keys as JSON into "
            "a file that ends in .json, which Prometheus' own programs read as well"
        )
    try:
        return load_yaml(text) or {}
    except Exception as error:  # the reader's own error type is not known here
        raise WebConfigError(f"web_config {path}: not YAML: {error}") from error


def _web_config(document: Mapping[str, Any], base: Path) -> WebConfig:
    _check_keys(document, _SECTIONS, "")
    tls = document.get("tls_server_config")
    users = document.get("basic_auth_users") or {}
    if not isinstance(users, Mapping) or not all(isinstance(item, str) for pair in users.items() for item in pair):
        raise WebConfigError("basic_auth_users: write a user and a bcrypt hash on each line")
    config = WebConfig(tls=None if tls is None else _tls(tls, base), users=dict(users))
    if config.tls is None and not config.users:
        raise WebConfigError("it is empty: give tls_server_config with cert_file and key_file")
    return config


def _tls(section: Any, base: Path) -> TlsServer:
    if not isinstance(section, Mapping):
        raise WebConfigError("tls_server_config: write cert_file and key_file below it")
    _check_keys(section, _TLS_KEYS, "tls_server_config.")
    for key in _TLS_KEYS:
        if key in section and not (isinstance(section[key], str) and section[key]):
            raise WebConfigError(f"tls_server_config.{key}: text is expected, not {section[key]!r}")
    for key in ("cert_file", "key_file"):
        if key not in section:
            raise WebConfigError(f"tls_server_config.{key} is missing")
    values = {
        key: base / Path(section[key]).expanduser() for key in _TLS_KEYS if key.endswith("_file") and key in section
    }
    tls = TlsServer(
        **values,
        client_auth_type=_client_auth(section.get("client_auth_type", "NoClientCert")),
        min_version=_version(section, "min_version", "TLS12"),
        max_version=_version(section, "max_version", "TLS13"),
    )
    _check_together(tls)
    return tls


def _check_together(tls: TlsServer) -> None:
    if tls.client_auth_type != "NoClientCert" and tls.client_ca_file is None:
        raise WebConfigError(
            f"tls_server_config.client_ca_file is missing: {tls.client_auth_type} needs a CA to verify by"
        )
    if tls.client_auth_type == "NoClientCert" and tls.client_ca_file is not None:
        raise WebConfigError(
            "tls_server_config.client_ca_file without client_auth_type would ask nobody for a certificate: "
            "set client_auth_type: RequireAndVerifyClientCert"
        )
    if tls.min_version > tls.max_version:
        raise WebConfigError(f"tls_server_config.min_version {tls.min_version} is above max_version {tls.max_version}")


def _client_auth(value: str) -> Any:
    if value in _UNVERIFIED:
        raise WebConfigError(
            f"tls_server_config.client_auth_type {value} takes any certificate unverified, which this server cannot: "
            "use RequireAndVerifyClientCert"
        )
    return _one_of(get_args(ClientAuth), value, "tls_server_config.client_auth_type")


def _version(section: Mapping[str, Any], key: str, default: TlsVersion) -> Any:
    return _one_of(get_args(TlsVersion), section.get(key, default), f"tls_server_config.{key}")


def _one_of(choices: tuple[str, ...], value: str, what: str) -> str:
    if value not in choices:
        raise WebConfigError(f"{what} is {value!r}: use {' or '.join(choices)}")
    return value


def _check_keys(section: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in section:
        if key in known:
            continue
        if key in _REFUSED:
            raise WebConfigError(f"{prefix}{key} is not supported: {_REFUSED[key]}")
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise WebConfigError(f"unknown key {prefix}{key}: {hint}there are {', '.join(known)}")
