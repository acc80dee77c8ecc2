"""Settings of the rank's server, and the environment variables that override them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.serving.config import Address, ServeConfig, ServeError

HOSTS = st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "::", "fd00::2", "node-7", "::ffff:10.0.0.1"])


@given(HOSTS, st.integers(1, 65535), st.none() | st.integers(1, 900))
def test_address_round_trips_through_its_text(host, port, more):
    last = None if more is None else min(65535, port + more)
    written = Address(host, port, None if last == port else last)

    assert written == Address.parse(str(written), what="listen")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.1.2.3:9400", "[::]:0", "node-7:9400"])
def test_address_reachable_from_other_machines_needs_a_token(listen):
    with pytest.raises(ServeError, match=r"RANKSCOPE_TOKEN.*insecure"):
        ServeConfig(listen=listen)

    assert ServeConfig(listen=listen, token="secret").token
    assert ServeConfig(listen=listen, insecure=True).insecure


@pytest.mark.parametrize("listen", ["127.8.8.8:1", "[::1]:9400", "localhost:0", "[::ffff:127.0.0.1]:0"])
def test_loopback_address_needs_no_token(listen):
    assert ServeConfig(listen=listen).address.is_loopback


WRONG = [
    ({"listen": "127.0.0.1"}, "127.0.0.1:0"),
    ({"listen": "127.0.0.1:99999"}, "0 to 65535"),
    ({"listen": "127.0.0.1:http"}, "0 to 65535"),
    ({"listen": "http://127.0.0.1:0"}, "write host:port"),
    ({"listen": ":9400"}, "write host:port"),
    ({"listen": "127.0.0.1 :0"}, "write host:port"),
    ({"listen": "127.0.0.1:9499-9400"}, "a port range must ascend"),
    ({"listen": "127.0.0.1:0-10"}, "a port range must ascend"),
    ({"listen": "127.0.0.1:1-60000"}, "at most 1000 ports"),
    ({"listen": "::1:9400"}, "in brackets"),
    ({"listen": "[::1"}, "listen"),
    ({"listen": "[fe80::1%eth0]:9400"}, "zone"),
    ({"advertise": "http://node:1/x"}, "advertise"),
    ({"ingest_url": "node:8080"}, "http://host:port"),
    ({"ingest_url": "ftp://node:8080"}, "http://host:port"),
    ({"ingest_url": "http://node:port"}, "http://host:port"),
    ({"ingest_url": "http://me:pass@node:1"}, "RANKSCOPE_TOKEN"),
    ({"ring_records": 255}, "at least 256"),
    ({"ring_bytes": 0}, "at least 1"),
    ({"series_budget": 0}, "at least 1"),
    ({"page_ops": "some"}, "'judged' or 'all'"),
    ({"token": ""}, "remove it"),
    ({"token": "a b"}, "without spaces"),
    ({"token": "ü"}, "ASCII"),
    ({"token": "a", "token_file": "x"}, "both set"),
    ({"token_file": "nowhere"}, "token_file nowhere: No such file"),
    ({"cert_file": "nowhere"}, "cert_file nowhere: no such file"),
    ({"key_file": "nowhere"}, "key_file is set without cert_file"),
    ({"node_page": "yes"}, "node_page must be true or false"),
    ({"spool_bytes": 0}, "spool_bytes must be a whole number of at least 1, not 0"),
    ({"spool_dir": 5}, "spool_dir must be text"),
]


@pytest.mark.parametrize(("wrong", "fix"), WRONG)
def test_wrong_setting_is_refused_with_the_fix(wrong, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServeError, match=fix):
        ServeConfig(**wrong)


@pytest.mark.parametrize(("text", "fix"), [("", "is empty"), ("\n", "is empty"), ("two words", "without spaces")])
def test_content_of_the_token_file_is_checked(tmp_path, text, fix):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ServeError, match=f"token_file .*{fix}"):
        ServeConfig(token_file=str(path))


def test_repr_does_not_contain_the_token():
    assert "hush" not in repr(ServeConfig(token="hush"))


def test_each_environment_variable_sets_its_field_unless_it_is_empty(tmp_path):
    wanted = {"listen": "0.0.0.0:9400", "advertise": "node-3:9500", "token": "secret"}
    wanted |= {"ingest_url": "http://service:8080", "discovery_dir": "/somewhere", "spool_dir": str(tmp_path)}
    texts = {**wanted, "insecure": "yes", "spool_sync": "1"}
    given = MonitorConfig().with_environment({f"RANKSCOPE_{name.upper()}": text for name, text in texts.items()})
    empty = MonitorConfig().with_environment({f"RANKSCOPE_{name.upper()}": "" for name in texts if "spool" not in name})

    assert ServeConfig(**wanted, insecure=True, spool_sync=True) == given.serve
    assert ServeConfig() == empty.serve


def test_spool_folder_is_expanded_or_off():
    texts = ("~/spool", "off")
    found = [MonitorConfig().with_environment({"RANKSCOPE_SPOOL_DIR": text}).serve.spool_dir for text in texts]

    assert "rankscope-records" == ServeConfig().spool_dir
    assert [str(Path("~/spool").expanduser()), None] == found
    assert ServeConfig(spool_dir="off").spool_dir is ServeConfig(spool_dir=None).spool_dir is None


def test_environment_replaces_token_and_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("from-file\n")
    by_file = MonitorConfig(serve=ServeConfig(listen="0.0.0.0:0", token_file=str(path)))
    direct = MonitorConfig(serve=ServeConfig(token="set-directly"))
    given = by_file.with_environment({"RANKSCOPE_TOKEN": "set-directly"})
    named = direct.with_environment({"RANKSCOPE_TOKEN_FILE": str(path)})

    assert ("from-file", "from-file") == (by_file.serve.secret, named.serve.secret)
    assert "set-directly" == given.serve.secret


@pytest.mark.parametrize(
    ("config", "advertised"),
    [
        ({}, "127.0.0.1:4711"),
        ({"listen": "[::1]:0"}, "[::1]:4711"),
        ({"listen": "10.0.0.7:0"}, "10.0.0.7:4711"),
        ({"listen": "0.0.0.0:0", "advertise": "outside"}, "outside:4711"),
        ({"listen": "0.0.0.0:0", "advertise": "outside:80"}, "outside:80"),
        ({"listen": "0.0.0.0:4700-4799"}, "node-1:4711"),
        ({"listen": "[::]:4700-4799"}, "node-1:4711"),
        ({"listen": "0.0.0.0:4700-4799", "advertise": "gateway"}, "gateway:4711"),
        ({"listen": "0.0.0.0:4700-4799", "advertise": "gateway:14700-14799"}, "gateway:14711"),
        ({"listen": "0.0.0.0:4711", "advertise": "gateway:80"}, "gateway:80"),
        ({"listen": "[::]:0", "advertise": "[fd00::2]"}, "[fd00::2]:4711"),
    ],
)
def test_advertised_address_is_paired_with_the_bound_port(config, advertised):
    assert advertised == str(ServeConfig(token="t", **config).advertised(4711, "node-1"))


@pytest.mark.parametrize("advertise", ["gateway:80", "gateway:14700-14710", "0.0.0.0", "[::]:9400"])
def test_advertise_with_another_number_of_ports_is_refused(advertise):
    with pytest.raises(ServeError, match=r"as many ports as listen has|is not a reachable address"):
        ServeConfig(listen="0.0.0.0:4700-4799", token="t", advertise=advertise)
