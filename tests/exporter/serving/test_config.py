"""Settings of the rank's server, and the environment variables that override them."""

from __future__ import annotations

import pytest

from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.serving.config import Address, ServeConfig, ServeError


def test_default_is_loopback_and_a_free_port():
    address = ServeConfig().address

    assert ("127.0.0.1", 0) == (address.host, address.port)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.1.2.3:9400", "[::]:0", "node-7:9400"])
def test_address_reachable_from_other_machines_needs_a_token(listen):
    with pytest.raises(ServeError, match=r"RANKSCOPE_TOKEN.*insecure"):
        ServeConfig(listen=listen)

    assert ServeConfig(listen=listen, token="secret").token
    assert ServeConfig(listen=listen, insecure=True).insecure


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.8.8:1", "[::1]:9400", "localhost:0"])
def test_loopback_address_needs_no_token(listen):
    assert ServeConfig(listen=listen).address.is_loopback


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"listen": "127.0.0.1"}, "127.0.0.1:0"),
        ({"listen": "127.0.0.1:99999"}, "0 to 65535"),
        ({"listen": "127.0.0.1:http"}, "0 to 65535"),
        ({"listen": "http://127.0.0.1:0"}, "write host:port"),
        ({"listen": ":9400"}, "write host:port"),
        ({"listen": "127.0.0.1 :0"}, "write host:port"),
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
    ],
)
def test_wrong_setting_is_refused_with_the_fix(wrong, fix):
    with pytest.raises(ServeError, match=fix):
        ServeConfig(**wrong)


def test_repr_does_not_contain_the_token():
    assert "hush" not in repr(ServeConfig(token="hush"))


def test_each_environment_variable_sets_its_field():
    config = MonitorConfig().with_environment(
        {
            "RANKSCOPE_LISTEN": "0.0.0.0:9400",
            "RANKSCOPE_ADVERTISE": "node-3:9500",
            "RANKSCOPE_TOKEN": "secret",
            "RANKSCOPE_INSECURE": "yes",
            "RANKSCOPE_INGEST_URL": "http://service:8080",
            "RANKSCOPE_DISCOVERY_DIR": "/somewhere",
        }
    )
    wanted = ServeConfig(
        listen="0.0.0.0:9400",
        advertise="node-3:9500",
        token="secret",
        insecure=True,
        ingest_url="http://service:8080",
        discovery_dir="/somewhere",
    )

    assert wanted == config.serve


def test_empty_variable_counts_as_unset():
    names = ("LISTEN", "ADVERTISE", "TOKEN", "INSECURE", "INGEST_URL", "DISCOVERY_DIR")

    assert ServeConfig() == MonitorConfig().with_environment({f"RANKSCOPE_{name}": "" for name in names}).serve


@pytest.mark.parametrize(
    ("config", "advertised"),
    [
        ({}, "127.0.0.1:4711"),
        ({"listen": "[::1]:0"}, "[::1]:4711"),
        ({"listen": "0.0.0.0:0", "token": "t"}, "node-1:4711"),
        ({"listen": "10.0.0.7:0", "token": "t"}, "10.0.0.7:4711"),
        ({"listen": "0.0.0.0:0", "token": "t", "advertise": "outside"}, "outside:4711"),
        ({"listen": "0.0.0.0:0", "token": "t", "advertise": "outside:80"}, "outside:80"),
    ],
)
def test_advertised_address_is_reachable_from_other_machines(config, advertised):
    assert advertised == str(ServeConfig(**config).advertised(4711, "node-1"))


def test_ipv6_address_is_written_in_brackets():
    assert "[fe80::1]:1" == str(Address.parse("[fe80::1]:1", what="listen"))
