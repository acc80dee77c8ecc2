"""Tests of TLS contexts from files: errors name the unusable file; changed files are loaded without a restart."""

from __future__ import annotations

import logging
import ssl

import pytest

from rankscope_contract.security.tls import Reloading, client_context, server_context
from rankscope_contract.security.web_config import TlsServer, WebConfigError


def served(certificates, cert="server", key=None, **changes):
    return TlsServer(cert_file=certificates.cert(cert), key_file=certificates.key(key or cert), **changes)


def test_server_context_has_the_configured_settings(certificates):
    settings = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": certificates.ca}
    context = server_context(served(certificates, **settings, min_version="TLS13"))

    assert ssl.CERT_REQUIRED == context.verify_mode
    assert (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3) == (context.minimum_version, context.maximum_version)


def test_client_context_verifies_certificate_and_host_name(certificates):
    context = client_context(certificates.ca, None, None)

    assert (ssl.CERT_REQUIRED, True) == (context.verify_mode, context.check_hostname)
    assert 1 == len(context.get_ca_certs())  # the certificates of the system are not trusted


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
def test_error_names_the_unusable_file(certificates, make, complaint):
    with pytest.raises(WebConfigError, match=complaint):
        make(certificates)


def test_encrypted_key_is_rejected_without_a_password_prompt(certificates, tmp_path):
    import subprocess

    key = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(certificates.key("server")), "-aes256", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(key)], check=True, capture_output=True)
    with pytest.raises(WebConfigError, match="the key is encrypted"):
        server_context(TlsServer(cert_file=certificates.cert("server"), key_file=key))


@pytest.fixture
def rotating(certificates, tmp_path):
    """Return (contexts, put). `put(name)` replaces the files by rename, as the mount of a Kubernetes secret does."""

    def put(name, key=None):
        for suffix, source in (("pem", certificates.cert(name)), ("key", certificates.key(key or name))):
            fresh = tmp_path / f"fresh.{suffix}"
            fresh.write_bytes(source.read_bytes())
            fresh.replace(tmp_path / f"rank.{suffix}")

    put("server")
    tls = TlsServer(cert_file=tmp_path / "rank.pem", key_file=tmp_path / "rank.key")
    return Reloading(lambda: (server_context(tls), tls.files)), put


def test_changed_files_are_loaded_and_unchanged_ones_reuse_the_context(rotating):
    contexts, put = rotating
    before = contexts()

    assert before is contexts()
    put("client")
    assert before is not contexts()


def test_unusable_new_files_keep_the_old_context_and_log_one_warning(rotating, caplog):
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
