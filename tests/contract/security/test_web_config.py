"""Tests of the web configuration of Prometheus: keys, defaults, and errors for unsupported options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rankscope_contract.security.web_config import TlsServer, WebConfigError, read_web_config

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
    assert TlsServer(cert_file=tmp_path / "rank.pem", key_file=Path("/keys/rank.key"), **defaults) == config.tls
    assert not config.demands_identity


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
    assert tmp_path / "keys/rank.key" == read(tmp_path, text, name).tls.key_file


def test_error_without_yaml_reader_names_the_alternatives(tmp_path):
    with pytest.raises(WebConfigError, match=r"web\.yml: no YAML reader.*pyyaml.*\.json"):
        read(tmp_path, {"tls_server_config": TLS}, load_yaml=None)

    assert read(tmp_path, {"tls_server_config": TLS}, "web.json", load_yaml=None).tls is not None


def test_only_required_client_certificates_demand_an_identity(tmp_path):
    def demands(kind):
        settings = {**TLS, "client_auth_type": kind, "client_ca_file": "ca.pem"}
        return read(tmp_path, {"tls_server_config": settings}).demands_identity

    assert [True, False] == [demands("RequireAndVerifyClientCert"), demands("VerifyClientCertIfGiven")]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (None, "No such file"),
        ("", "the file is empty"),
        ("[1, 2]", "not list"),
        ("a: [", "not YAML"),
        ({"tls_server_config": None, "basic_auth_users": None}, "the file is empty"),
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
        ({"basic_auth_users": ["me"]}, "a user and a bcrypt hash"),
    ],
)  # fmt: skip
def test_error_names_the_file_the_key_and_the_fix(tmp_path, document, complaint):
    with pytest.raises(WebConfigError) as error:
        read(tmp_path, document) if document is not None else read_web_config(tmp_path / "web.yml", yaml.safe_load)

    assert str(tmp_path / "web.yml") in str(error.value)
    assert complaint in str(error.value)
