"""TLS of ranks and of the service: Prometheus' web configuration file, contexts for servers and clients, and errors.

node_exporter, Prometheus and Rankscope can use the same web configuration file. An option that Rankscope does not
support is an error, because a server must not have less protection than its configuration requires.

The contexts are reloaded when their files change. Errors are explained, because the error texts of OpenSSL name neither
the side that caused the error nor the fix.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import ssl
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

log = logging.getLogger(__name__)

ClientAuth = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]
TlsVersion = Literal["TLS12", "TLS13"]

_CHOICES: Final = {
    "client_auth_type": get_args(ClientAuth),
    "min_version": get_args(TlsVersion),
    "max_version": get_args(TlsVersion),
}
_TLS_KEYS: Final = ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version")
_REFUSED: Final = {
    "basic_auth_users": "remove it and use a token (RANKSCOPE_TOKEN of a rank, token or token_file of the service)",
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


def read_web_config(path: Path, load_yaml: LoadYaml | None) -> TlsServer:
    """Return the section `tls_server_config` of a web configuration: a YAML, JSON or TOML file.

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
        _check_keys({key: value for key, value in document.items() if value}, ("tls_server_config",), "")
        return _tls(document.get("tls_server_config"), path.parent)
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


def _tls(section: Any, base: Path) -> TlsServer:
    if section is None:
        raise WebConfigError("the file is empty: add tls_server_config with cert_file and key_file")
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


_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_VERIFY: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

MakeContext = Callable[[], ssl.SSLContext]
MakeFromFiles = Callable[[], tuple[ssl.SSLContext, tuple[Path, ...]]]
"""Function that creates a TLS context, and returns it with the files from which it was created."""


def server_context(tls: TlsServer) -> ssl.SSLContext:
    """Return a TLS context for a server. Raises WebConfigError if a file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    context.set_alpn_protocols(["http/1.1"])
    load_own(context, tls.cert_file, tls.key_file)
    context.verify_mode = _VERIFY[tls.client_auth_type]
    if tls.client_ca_file is not None:
        load_trusted(context, tls.client_ca_file, "client_ca_file")
    return context


def client_context(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> ssl.SSLContext:
    """Return a TLS context for a client.

    The context trusts only the CA in `ca_file`, or the CAs of the system if `ca_file` is None. Raises WebConfigError if
    a file cannot be used.
    """
    return _system_context() if ca_file is None and cert_file is None else _loaded(ca_file, cert_file, key_file)


@functools.cache
def _system_context() -> ssl.SSLContext:
    """Return one context for the process: reading the CAs of the system takes tens of milliseconds."""
    return _loaded(None, None, None)


def _loaded(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file is None:
        context.load_default_certs()
    else:
        load_trusted(context, ca_file, "ca_file")
    if cert_file is not None:
        load_own(context, cert_file, key_file or cert_file)
    return context


def reloading_client(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> Reloading:
    """Return a TLS context, created again when one of its files changes. Raises WebConfigError for an unusable file."""
    files = tuple(path for path in (ca_file, cert_file, key_file) if path is not None)
    return Reloading(lambda: (client_context(ca_file, cert_file, key_file), files))


def load_own(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    """Load the certificate that `context` presents; `context` may already be in use.

    Raises WebConfigError if the certificate or the key cannot be used.
    """
    _check_readable("cert_file", cert_file)
    _check_readable("key_file", key_file)
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        reason = "the key belongs to another certificate" if mismatch else "no PEM certificate with its key"
        raise WebConfigError(f"cert_file {cert_file} and key_file {key_file}: {reason}") from error


def load_trusted(context: ssl.SSLContext, ca_file: Path, option: str) -> None:
    """Make `context` trust certificates signed by the CA in `ca_file`.

    `option` is the name of the configuration key for error texts. Raises WebConfigError if the file cannot be used.
    """
    _check_readable(option, ca_file)
    try:
        context.load_verify_locations(ca_file)
    except (ssl.SSLError, OSError) as error:
        raise WebConfigError(f"{option} {ca_file}: the file contains no PEM certificate") from error


class Reloading:
    """A TLS context that is created again when one of its files changes.

    If the new files cannot be used, the previous context remains in use.
    """

    def __init__(self, make: MakeFromFiles) -> None:
        """Create the first context; `make` returns it and its files. Raises WebConfigError if a file cannot be used."""
        self._make = make
        self._lock = threading.Lock()
        self._context, self._files = make()
        self._stamps = tuple(map(_stamp, self._files))

    def __call__(self) -> ssl.SSLContext:
        """Return the TLS context, after creating it again if a certificate, key or CA file has changed.

        If the changed files cannot be used, return the previous context.
        """
        with self._lock:
            stamps = tuple(map(_stamp, self._files))
            if stamps != self._stamps:
                # Also if the files are unusable: they are reported once, and read again after a change.
                self._stamps = stamps
                self._reload()
            return self._context

    def _reload(self) -> None:
        try:
            self._context, files = self._make()
        except WebConfigError as error:
            log.warning(
                "the certificate files changed and cannot be used; the previous certificates remain in use: %s", error
            )
            return
        if files != self._files:  # the configuration now names other files
            self._files, self._stamps = files, tuple(map(_stamp, files))
        log.info("certificates changed: %s", ", ".join(map(str, files)))


HUNG_UP: Final = (
    "it closed the connection: it may require a client certificate (cert_file, key_file), not trust the one it "
    "received, or not use TLS; its log has the reason"
)
"""Explanation, for users, of a TLS connection that the server closed without a reason.

In TLS 1.3 the server rejects a client certificate after the handshake, and the rejection may be lost.
"""

_OF_SERVERS: Final = {  # OpenSSL's reason on the client -> explanation about the server
    "WRONG_VERSION_NUMBER": "it does not use TLS: use an http:// address, or give the server a web_config",
    "RECORD_LAYER_FAILURE": "it does not use TLS: use an http:// address, or give the server a web_config",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a client certificate: set cert_file and key_file",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refused the handshake: set cert_file and key_file if it requires them",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the CA of our client certificate: check client_ca_file of the server",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it rejected our client certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our client certificate has expired: renew cert_file",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it supports neither TLS 1.2 nor TLS 1.3, which Rankscope requires",
    "UNEXPECTED_EOF_WHILE_READING": HUNG_UP,
}
_OF_CLIENTS: Final = {  # OpenSSL's reason on the server -> explanation about the client
    "HTTP_REQUEST": "it sent plain HTTP to a TLS port: use https:// in its configuration",
    "WRONG_VERSION_NUMBER": "it did not use TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no client certificate: set its cert_file and key_file",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust our certificate: set its ca_file to our CA",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it rejected our certificate: wrong name, wrong CA or expired",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it rejected our certificate: wrong name, wrong CA or expired",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired: renew cert_file in web_config",
    "UNSUPPORTED_PROTOCOL": "it supports only TLS versions below min_version",
    "NO_SHARED_CIPHER": "client and server have no cipher in common",
    "UNEXPECTED_EOF_WHILE_READING": "it closed the connection during the handshake: it may not trust our certificate",
}


def explain_to_client(error: BaseException) -> str | None:
    """Return why the TLS connection to a server failed and how to fix it; None if the error is not a TLS error."""
    if isinstance(error, ssl.SSLEOFError):
        return HUNG_UP
    return _explained(error, _OF_SERVERS, "its certificate", "set ca_file to the CA of the server")


def explain_to_server(error: BaseException) -> str | None:
    """Return why the TLS handshake with a client failed and how to fix it; None if the error is not a TLS error."""
    fix = "check client_ca_file in the web_config of the server"
    return _explained(error, _OF_CLIENTS, "its client certificate", fix)


def _explained(error: BaseException, known: Mapping[str, str], certificate: str, fix: str) -> str | None:
    if not isinstance(error, ssl.SSLError):
        return None
    if not isinstance(error, ssl.SSLCertVerificationError):
        return known.get(error.reason or "", f"TLS failed: {error.reason or error}")
    reason = error.verify_message
    if "expired" in reason:
        return f"{certificate} has expired: renew it"
    if "not yet valid" in reason:
        return f"{certificate} is not valid yet: check the clocks of both machines"
    if "mismatch" in reason or "not valid for" in reason:
        return f"{certificate} is for another name: {reason}"
    return f"{certificate} is not signed by a trusted CA ({reason}): {fix}"


def _check_readable(option: str, path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise WebConfigError(f"{option} {path}: {error.strerror or error}") from error


def _no_password() -> str:
    # Without this callback OpenSSL would prompt on the terminal, and the training would wait for input.
    raise WebConfigError("the key is encrypted: use a key file without a password")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()  # follows symbolic links: mounted secrets are often updated by replacing a link
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
