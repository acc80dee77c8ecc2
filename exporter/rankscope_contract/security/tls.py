"""TLS of both conversations, rank and service, either way: contexts from files, read again when these change.

Also the words for what goes wrong: OpenSSL's own texts name neither the side that is at fault nor what mends it.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rankscope_contract.security.web_config import TlsServer, WebConfigError

log = logging.getLogger(__name__)

_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_VERIFY: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

MakeContext = Callable[[], ssl.SSLContext]
MakeFromFiles = Callable[[], tuple[ssl.SSLContext, tuple[Path, ...]]]
"""Makes a context, and says which files it was made of."""


def server_context(tls: TlsServer) -> ssl.SSLContext:
    """Return what a server wraps connections with. Raises WebConfigError naming the file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    context.set_alpn_protocols(["http/1.1"])
    load_own(context, tls.cert_file, tls.key_file)
    context.verify_mode = _VERIFY[tls.client_auth_type]
    if tls.client_ca_file is not None:
        load_trusted(context, tls.client_ca_file, "client_ca_file")
    return context


def client_context(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> ssl.SSLContext:
    """Return what a client wraps connections with; without `ca_file` the system's CAs are trusted, else that one alone.

    Raises WebConfigError naming the file that cannot be used.
    """
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
    """Return client contexts that follow their files. Raises WebConfigError."""
    files = tuple(path for path in (ca_file, cert_file, key_file) if path is not None)
    return Reloading(lambda: (client_context(ca_file, cert_file, key_file), files))


def load_own(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    """Have `context` show this certificate, also a context in use. Raises WebConfigError."""
    for what, path in (("cert_file", cert_file), ("key_file", key_file)):
        _check_readable(what, path)
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        why = "the key belongs to another certificate" if mismatch else "no PEM certificate with its key"
        raise WebConfigError(f"cert_file {cert_file} and key_file {key_file}: {why}") from error


def load_trusted(context: ssl.SSLContext, ca_file: Path, what: str) -> None:
    """Have `context` trust certificates that this CA signed. Raises WebConfigError."""
    _check_readable(what, ca_file)
    try:
        context.load_verify_locations(ca_file)
    except (ssl.SSLError, OSError) as error:
        raise WebConfigError(f"{what} {ca_file}: it holds no PEM certificate") from error


class Reloading:
    """A context that is made anew when one of its files changed; while they cannot be used, the former one stays."""

    def __init__(self, make: MakeFromFiles) -> None:
        """Make the first context. Raises WebConfigError."""
        self._make = make
        self._lock = threading.Lock()
        self._context, self._files = make()
        self._stamps = _look(self._files)

    def __call__(self) -> ssl.SSLContext:
        """Return the context of the files as they are now."""
        with self._lock:
            stamps = _look(self._files)
            if stamps != self._stamps:
                self._stamps = stamps  # also when they are bad: told once, and tried again when they change again
                self._reload()
            return self._context

    def _reload(self) -> None:
        try:
            self._context, files = self._make()
        except WebConfigError as error:
            log.warning("certificates changed and cannot be used, the former ones stay: %s", error)
            return
        if files != self._files:  # the configuration names others now; else what was seen before the reading counts
            self._files, self._stamps = files, _look(files)
        log.info("certificates changed: %s", ", ".join(map(str, files)))


HUNG_UP: Final = (
    "it hung up: it may want a client certificate (cert_file, key_file), not trust the one it was shown, "
    "or speak no TLS; its log says which"
)
"""All that can be said when a server's refusal was lost: in TLS 1.3 it comes after the handshake, and may be lost."""

_OF_SERVERS: Final = {  # what a client is told, by OpenSSL's reason
    "WRONG_VERSION_NUMBER": "it does not speak TLS: use http:// there, or give it a web_config",
    "RECORD_LAYER_FAILURE": "it does not speak TLS: use http:// there, or give it a web_config",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a client certificate: set cert_file and key_file",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refused the handshake: it may want a client certificate (cert_file, key_file)",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the CA of our client certificate: see its client_ca_file",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses our client certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our client certificate has expired: renew cert_file",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it speaks no TLS version that is spoken here (1.2 or 1.3)",
    "UNEXPECTED_EOF_WHILE_READING": HUNG_UP,
}
_OF_CLIENTS: Final = {  # what a server says of a client
    "HTTP_REQUEST": "it spoke plain HTTP to a TLS port: use https:// there",
    "WRONG_VERSION_NUMBER": "it did not speak TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no client certificate: give it cert_file and key_file",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust our certificate: name the CA in its ca_file",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses our certificate: wrong name, wrong CA or expired",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses our certificate: wrong name, wrong CA or expired",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired: renew cert_file in web_config",
    "UNSUPPORTED_PROTOCOL": "it speaks only TLS versions below min_version",
    "NO_SHARED_CIPHER": "no cipher is common to both",
    "UNEXPECTED_EOF_WHILE_READING": "it hung up during the handshake: it may not trust our certificate",
}


def explain_to_client(error: BaseException) -> str | None:
    """Return why a server could not be spoken to by TLS and what mends it; None when TLS is not to blame."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_trouble(error, "its certificate", "name its CA in ca_file")
    if isinstance(error, ssl.SSLEOFError):
        return HUNG_UP
    if isinstance(error, ssl.SSLError):
        return _OF_SERVERS.get(error.reason or "", f"TLS failed: {error.reason or error}")
    return None


def explain_to_server(error: BaseException) -> str | None:
    """Return why the handshake with a client failed and what mends it; None when TLS is not to blame."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_trouble(error, "its client certificate", "see client_ca_file in web_config")
    if isinstance(error, ssl.SSLError):
        return _OF_CLIENTS.get(error.reason or "", f"TLS failed: {error.reason or error}")
    return None


def _certificate_trouble(error: ssl.SSLCertVerificationError, whose: str, fix: str) -> str:
    said = error.verify_message
    if "expired" in said:
        return f"{whose} has expired: renew it"
    if "not yet valid" in said:
        return f"{whose} is not valid yet: see the clocks of both machines"
    if "mismatch" in said or "not valid for" in said:
        return f"{whose} is for another name: {said}"
    return f"{whose} is not signed by a CA that is trusted here ({said}): {fix}"


def _check_readable(what: str, path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise WebConfigError(f"{what} {path}: {error.strerror or error}") from error


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal, and a training would wait for an answer.
    raise WebConfigError("the key is encrypted: give a key file without a password")


def _look(files: Iterable[Path]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(map(_stamp, files))


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()  # follows links: secrets are often mounted as links that are swapped
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
