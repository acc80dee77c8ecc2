"""Names in paths, SQL, HTML and file names, TLS contexts and the web configuration."""

import json
import logging
import pathlib
import sqlite3
import ssl
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rankscope_contract.wire.escaping import LONGEST_FILE_NAME, file_name, label_value
from rankscope_contract.wire.tls import (
    Reloading,
    TlsServer,
    WebConfigError,
    client_context,
    read_web_config,
    server_context,
)
from rankscope_storage.base.escaping import from_path_segment, path_segment, sql_identifier, sql_string

# Lone surrogates are excluded, because they have no UTF-8 encoding.
names = st.text(st.characters(exclude_categories=["Cs"]))
AWKWARD = ["", ".", "..", "../x", "a=b", "lr'\"", "学习", "%", "%2E", "a/b", "a\\b", "~", "a b", "-", ".hidden", "\x00"]


@given(names | st.sampled_from(AWKWARD), names | st.sampled_from(AWKWARD))
@example("..", "")
@example("%", ".")
def test_path_segments_are_distinct_and_remain_in_their_folder(first, second):
    segment = path_segment(first)
    path = pathlib.PurePosixPath("/store") / segment

    assert (first == second) == (segment == path_segment(second))
    assert first == from_path_segment(segment)
    assert (pathlib.PurePosixPath("/store"), segment) == (path.parent, path.name)
    assert not set(segment) & set("/\\=\x00 ")
    assert not segment.startswith(".")


@given(names, names.filter(lambda name: name.replace("\x00", "")))
def test_sql_text_and_identifier_are_read_as_they_were_written(text, name):
    """SQLite represents all engines that follow the SQL standard. Only SQLite ends a text at NUL."""
    text, name = (part.replace("\x00", "") for part in (text, name))
    cursor = sqlite3.connect(":memory:").execute(f"SELECT {sql_string(text)} AS {sql_identifier(name)}")

    assert (name, (text,)) == (cursor.description[0][0], cursor.fetchone())


@given(names)
def test_label_value_is_read_as_it_was_written(name):
    label = label_value(name)
    unescaped = label.replace("\\\\", "\0").replace('\\"', '"').replace("\\n", "\n").replace("\0", "\\")

    assert "\n" not in label
    assert "\0" in name or name == unescaped


@given(names, names)
@example("a/b", "a_b")
@example("学" * 300, "学" * 299)
@example("e\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER E WITH ACUTE}")
def test_different_names_have_different_file_names_that_are_safe(name, other):
    found = [file_name(name), file_name(other), file_name(file_name(name)), file_name(name, "x"), file_name("x", name)]

    assert (name == other) == (found[0] == found[1])
    for one in found:
        assert not set(one) & set("/\\\x00 \n")
        assert one[0] not in ".-"
        assert LONGEST_FILE_NAME >= len(one.encode())
        assert unicodedata.is_normalized("NFC", one)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        *((("llama-1b", "overview"), "llama-1b-overview"), (("实验一",), "实验一"), (("परीक्षण_α.2",), "परीक्षण_α.2")),
        *((("a/b",), "a_b~"), (("-rf",), "rf~"), (("..",), "unnamed~"), (("a", "b-c"), "a-b-c~"), (("a~",), "a_~")),
    ],
)
def test_file_name_keeps_letters_and_marks_every_other_change(parts, name):
    found = file_name(*parts)

    assert name == found[: len(name)]
    assert (len(name) + 8 if name.endswith("~") else len(name)) == len(found)


def served(certificates, cert="server", key=None, **changes):
    return TlsServer(cert_file=certificates.cert(cert), key_file=certificates.key(key or cert), **changes)


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


def test_unusable_new_files_keep_the_old_context_and_log_one_warning(certificates, tmp_path, caplog):
    def put(name, key=None):
        """Replace the files by rename, as the mount of a Kubernetes secret does."""
        for suffix, source in (("pem", certificates.cert(name)), ("key", certificates.key(key or name))):
            fresh = tmp_path / f"fresh.{suffix}"
            fresh.write_bytes(source.read_bytes())
            fresh.replace(tmp_path / f"rank.{suffix}")

    put("server")
    tls = TlsServer(cert_file=tmp_path / "rank.pem", key_file=tmp_path / "rank.key")
    contexts = Reloading(lambda: (server_context(tls), tls.files))
    before = contexts()
    put("server", key="client")
    with caplog.at_level(logging.WARNING):
        kept = [contexts() for _ in range(3)]
    put("client")

    assert [before] * 3 == kept
    assert 1 == len(caplog.records)
    assert "the key belongs to another certificate" in caplog.text
    assert contexts() is not before


TLS = {"cert_file": "rank.pem", "key_file": "keys/rank.key"}


def read(tmp_path, document, name="web.yml", load_yaml=yaml.safe_load):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_web_config(path, load_yaml)


def test_paths_are_relative_to_the_file_and_defaults_equal_prometheus(tmp_path):
    config = read(tmp_path, "tls_server_config:\n  cert_file: rank.pem\n  key_file: /keys/rank.key\n")

    defaults = {
        "client_auth_type": "NoClientCert",
        "client_ca_file": None,
        "min_version": "TLS12",
        "max_version": "TLS13",
    }
    assert TlsServer(cert_file=tmp_path / "rank.pem", key_file=Path("/keys/rank.key"), **defaults) == config
    assert not config.demands_client_certificates


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("web.yml", "tls_server_config: {cert_file: rank.pem, key_file: keys/rank.key}"),
        ("web.yaml", json.dumps({"tls_server_config": TLS})),
        ("web.json", json.dumps({"tls_server_config": TLS})),
        ("web.toml", "[tls_server_config]\ncert_file = 'rank.pem'\nkey_file = 'keys/rank.key'"),
    ],
)
def test_yaml_json_and_toml_have_the_same_meaning(tmp_path, name, text):
    assert tmp_path / "keys/rank.key" == read(tmp_path, text, name).key_file


def test_error_without_yaml_reader_names_the_alternatives(tmp_path):
    with pytest.raises(WebConfigError, match=r"web\.yml: no YAML reader.*pyyaml.*\.json"):
        read(tmp_path, {"tls_server_config": TLS}, load_yaml=None)

    assert read(tmp_path, {"tls_server_config": TLS}, "web.json", load_yaml=None) is not None


def test_only_required_client_certificates_demand_an_identity(tmp_path):
    def demands(kind):
        settings = {**TLS, "client_auth_type": kind, "client_ca_file": "ca.pem"}
        return read(tmp_path, {"tls_server_config": settings}).demands_client_certificates

    assert [True, False] == [demands("RequireAndVerifyClientCert"), demands("VerifyClientCertIfGiven")]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        *((None, "No such file"), ("", "the file is empty"), ("[1, 2]", "not list"), ("a: [", "not YAML")),
        ({"tls_server_config": None}, "the file is empty"),
        ({"tls_server_config": []}, "write cert_file and key_file below it"),
        ({"tls_server_confg": TLS}, "unknown key tls_server_confg: did you mean tls_server_config?"),
        ({"http_server_config": {"http2": True}}, "http_server_config is not supported"),
        ({"tls_server_config": {"cert_file": "a"}}, "key_file is missing"),
        ({"tls_server_config": {**TLS, "cert_flie": "a"}}, "cert_flie: did you mean cert_file?"),
        ({"tls_server_config": {**TLS, "cipher_suites": ["x"]}}, "cipher_suites is not supported"),
        ({"tls_server_config": {**TLS, "client_allowed_sans": ["x"]}}, "client_allowed_sans is not supported"),
        ({"tls_server_config": {**TLS, "min_version": "TLS10"}}, "min_version is 'TLS10': use TLS12 or TLS13"),
        ({"tls_server_config": {**TLS, "min_version": 12}}, "min_version: expected text, not 12"),
        ({"tls_server_config": {**TLS, "min_version": "TLS13", "max_version": "TLS12"}}, "above max_version"),
        ({"tls_server_config": {**TLS, "client_auth_type": "RequireAnyClientCert"}}, "RequireAndVerifyClientCert"),
        ({"tls_server_config": {**TLS, "client_auth_type": "Always"}}, "use NoClientCert or"),
        ({"tls_server_config": {**TLS, "client_auth_type": "RequireAndVerifyClientCert"}}, "client_ca_file is missing"),
        ({"tls_server_config": {**TLS, "client_ca_file": "ca.pem"}}, "has no effect without client_auth_type"),
        ({"basic_auth_users": ["me"]}, "basic_auth_users is not supported"),
    ],
)  # fmt: skip
def test_error_names_the_file_the_key_and_the_fix(tmp_path, document, complaint):
    with pytest.raises(WebConfigError) as error:
        read(tmp_path, document) if document is not None else read_web_config(tmp_path / "web.yml", yaml.safe_load)

    assert str(tmp_path / "web.yml") in str(error.value)
    assert complaint in str(error.value)
