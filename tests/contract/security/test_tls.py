"""TLS contexts from files: errors name the unusable file, and changed files are loaded without a restart."""

from __future__ import annotations

import logging
import ssl

import pytest

from rankscope_contract.security.tls import Reloading, client_context, server_context
from rankscope_contract.security.web_config import TlsServer, WebConfigError


def served(certificates, cert="server", key=None, **changes):
    return TlsServer(cert_file=certificates.cert(cert), key_file=certificates.key(key or cert), **changes)


def test_a_context_shows_and_demands_what_was_configured(certificates):
    tls = served(
        certificates,
        client_auth_type="RequireAndVerifyClientCert",
        client_ca_file=certificates.ca,
        min_version="TLS13",
    )
    context = server_context(tls)

    assert ssl.CERT_REQUIRED == context.verify_mode
    assert (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3) == (context.minimum_version, context.maximum_version)


def test_a_client_always_checks_certificate_and_name(certificates):
    context = client_context(certificates.ca, None, None)

    assert (ssl.CERT_REQUIRED, True) == (context.verify_mode, context.check_hostname)
    assert 1 == len(context.get_ca_certs())  # the system's are not trusted beside it


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda c: server_context(served(c, key="client")), "the key belongs to another certificate"),
        (lambda c: server_context(served(c, cert="nowhere")), r"cert_file .*nowhere\.pem: No such file"),
        (lambda c: server_context(TlsServer(cert_file=c.key("ca"), key_file=c.key("ca"))), "no PEM certificate"),
        (lambda c: client_context(c.key("ca"), None, None), r"ca_file .*ca\.key: the file contains no PEM certificate"),
        (lambda c: client_context(c.folder / "nowhere", None, None), "ca_file .*nowhere: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(certificates, make, complaint):
    with pytest.raises(WebConfigError, match=complaint):
        make(certificates)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(certificates, tmp_path):
    import subprocess

    key = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(certificates.key("server")), "-aes256", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(key)], check=True, capture_output=True)
    with pytest.raises(WebConfigError, match="the key is encrypted"):
        server_context(TlsServer(cert_file=certificates.cert("server"), key_file=key))


@pytest.fixture
def rotating(certificates, tmp_path):
    """Return (contexts, put): files that `put(name)` replaces as a secret's mount does, by rename."""

    def put(name, key=None):
        for suffix, source in (("pem", certificates.cert(name)), ("key", certificates.key(key or name))):
            fresh = tmp_path / f"fresh.{suffix}"
            fresh.write_bytes(source.read_bytes())
            fresh.replace(tmp_path / f"rank.{suffix}")

    put("server")
    tls = TlsServer(cert_file=tmp_path / "rank.pem", key_file=tmp_path / "rank.key")
    return Reloading(lambda: (server_context(tls), tls.files)), put


def test_files_that_stay_cost_no_new_context(rotating):
    contexts, _ = rotating

    assert contexts() is contexts()


def test_changed_files_are_taken(rotating):
    contexts, put = rotating
    before = contexts()
    put("client")

    assert contexts() is not before


def test_files_that_cannot_be_used_leave_the_former_ones_and_are_told_once(rotating, caplog):
    contexts, put = rotating
    before = contexts()
    put("server", key="client")
    with caplog.at_level(logging.WARNING):
        kept = [contexts() for _ in range(3)]
    put("client")

    assert [before] * 3 == kept
    assert 1 == len(caplog.records)
    assert "the key belongs to another certificate" in caplog.text
    assert contexts() is not before
