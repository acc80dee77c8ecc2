"""Read Prometheus' web configuration file: certificate, client certificates, users.

The HTTP server of a rank and that of the service read it. node_exporter, Prometheus and Rankscope can use the same
file. An option that Rankscope does not support is an error, because a server must not have less protection than its
configuration requires.
`tls` creates the TLS contexts.
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
_CHOICES: Final = {
    "client_auth_type": get_args(ClientAuth),
    "min_version": get_args(TlsVersion),
    "max_version": get_args(TlsVersion),
}
_TLS_KEYS: Final = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version")
_REFUSED: Final = {
    "http_server_config": "this server has no HTTP/2 and no additional headers: remove the option",
    "cert": "use a file: cert_file",
    "key": "use a file: key_file",
    "client_ca": "use a file: client_ca_file",
    "client_allowed_sans": "remove it, and sign the certificates of allowed clients with a separate CA",
    "cipher_suites": "remove it, or set min_version: TLS13",
    "prefer_server_cipher_suites": "remove it",
    "curve_preferences": "remove it",
}
_UNVERIFIED: Final = ("RequestClientCert", "RequireAnyClientCert")

LoadYaml = Callable[[str], Any]


class WebConfigError(ValueError):
    """Error: the web configuration cannot be used. The text names the file, the option and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsServer:
    """The section `tls_server_config` of a web configuration file.

    It contains the certificate of the server, and whether and how clients must present certificates.
    """

    cert_file: Path
    key_file: Path
    client_auth_type: ClientAuth = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.cert_file, self.key_file, *(() if self.client_ca_file is None else (self.client_ca_file,)))

    @property
    def demands_client_certificates(self) -> bool:
        return self.client_auth_type == "RequireAndVerifyClientCert"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The content of a web configuration file. Without TLS it contains only users."""

    tls: TlsServer | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)  # name -> bcrypt hash

    @property
    def demands_identity(self) -> bool:
        return bool(self.users) or (self.tls is not None and self.tls.demands_client_certificates)


def read_web_config(path: Path, load_yaml: LoadYaml | None) -> WebConfig:
    """Return the configuration in a YAML, JSON or TOML file.

    File names in it are relative to its folder. `load_yaml` parses YAML; it is None if no YAML reader is installed.
    Raises WebConfigError if the configuration cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WebConfigError(f"web_config {path}: {getattr(error, 'strerror', None) or error}") from error
    document = _parsed(path, text, load_yaml)
    if not isinstance(document, Mapping):
        raise WebConfigError(f"web_config {path}: the file must contain keys and values, not {type(document).__name__}")
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
    except (ValueError, RecursionError) as error:
        raise WebConfigError(f"web_config {path}: {error}") from error
    if load_yaml is None:
        raise WebConfigError(
            f"web_config {path}: no YAML reader is installed. Install pyyaml, or write the same keys as JSON into a "
            "file with the ending .json, which Prometheus' own programs can read too"
        )
    try:
        return load_yaml(text) or {}
    except Exception as error:  # the type of a YAML reader's errors is unknown here
        raise WebConfigError(f"web_config {path}: not YAML: {error}") from error


def _web_config(document: Mapping[str, Any], base: Path) -> WebConfig:
    _check_keys(document, _SECTIONS, "")
    tls = document.get("tls_server_config")
    users = document.get("basic_auth_users") or {}
    if not isinstance(users, Mapping) or not all(isinstance(item, str) for pair in users.items() for item in pair):
        raise WebConfigError("basic_auth_users: write a user and a bcrypt hash on each line")
    config = WebConfig(tls=None if tls is None else _tls(tls, base), users=dict(users))
    if config.tls is None and not config.users:
        raise WebConfigError("the file is empty: add tls_server_config with cert_file and key_file")
    return config


def _tls(section: Any, base: Path) -> TlsServer:
    if not isinstance(section, Mapping):
        raise WebConfigError("tls_server_config: write cert_file and key_file below it")
    _check_keys(section, _TLS_KEYS, "tls_server_config.")
    for key, value in section.items():
        if not (isinstance(value, str) and value):
            raise WebConfigError(f"tls_server_config.{key}: expected text, not {value!r}")
    for key in ("cert_file", "key_file"):
        if key not in section:
            raise WebConfigError(f"tls_server_config.{key} is missing")
    for key, choices in _CHOICES.items():
        value = section.get(key, choices[0])
        if value in _UNVERIFIED:
            raise WebConfigError(
                f"tls_server_config.{key} {value} would accept unverified certificates, which is not supported: "
                "use RequireAndVerifyClientCert"
            )
        if value not in choices:
            raise WebConfigError(f"tls_server_config.{key} is {value!r}: use {' or '.join(choices)}")
    files = {key: base / Path(name).expanduser() for key, name in section.items() if key.endswith("_file")}
    tls = TlsServer(**dict(section) | files)
    _check_together(tls)
    return tls


def _check_together(tls: TlsServer) -> None:
    if tls.client_auth_type != "NoClientCert" and tls.client_ca_file is None:
        raise WebConfigError(
            f"tls_server_config.client_ca_file is missing: {tls.client_auth_type} requires a CA to verify clients"
        )
    if tls.client_auth_type == "NoClientCert" and tls.client_ca_file is not None:
        raise WebConfigError(
            "tls_server_config.client_ca_file has no effect without client_auth_type: "
            "set client_auth_type: RequireAndVerifyClientCert"
        )
    if tls.min_version > tls.max_version:
        raise WebConfigError(f"tls_server_config.min_version {tls.min_version} is above max_version {tls.max_version}")


def _check_keys(section: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in section:
        if key in known:
            continue
        if key in _REFUSED:
            raise WebConfigError(f"{prefix}{key} is not supported: {_REFUSED[key]}")
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise WebConfigError(f"unknown key {prefix}{key}: {hint}Known keys: {', '.join(known)}")
