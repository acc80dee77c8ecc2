"""The proxy of a request."""

import os
import socket
from collections.abc import Callable

import pytest

from rankscope_ingest.base.proxies import is_loopback, is_proxy, proxy_of

PROXY = "http://proxy.example:3128"
EVERYWHERE = {"http_proxy": PROXY, "https_proxy": PROXY}


@pytest.fixture(autouse=True)
def no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object) -> None:
        raise AssertionError("a name was resolved")

    for function in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getfqdn"):
        monkeypatch.setattr(socket, function, resolve)


@pytest.fixture
def proxy_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, dict[str, str]], str | None]:
    """Return a function that calls `proxy_of` with the variables of an environment."""

    def found(url: str, setting: str, environment: dict[str, str]) -> str | None:
        monkeypatch.setattr(os, "environ", environment)
        return proxy_of(url, setting)

    return found


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "127.1", "2130706433", "0.0.0.0"),
        *("::1", "[::1]", "::ffff:127.0.0.1", "::"),
    ],
)
def test_loopback_is_reached_directly_in_every_notation(proxy_in, host):
    shown = f"[{host}]" if ":" in host and "[" not in host else host

    assert is_loopback(host)
    assert None is proxy_in(f"http://{shown}:8080/hook", "environment", EVERYWHERE)
    assert None is proxy_in(f"https://{shown}/", PROXY, {})


def test_other_hosts_are_no_loopback():
    hosts = ["localhost.example", "127.example", "10.0.0.1", "::2", "mylocalhost", "128.0.0.1"]

    assert [] == [host for host in hosts if is_loopback(host)]


@pytest.mark.parametrize(
    ("environment", "url", "expected"),
    [
        (EVERYWHERE, "https://chat.example/", PROXY),
        ({"HTTPS_PROXY": PROXY}, "https://chat.example/", PROXY),
        ({"HTTPS_PROXY": PROXY}, "http://chat.example/", None),
        ({"https_proxy": "", "HTTPS_PROXY": PROXY}, "https://chat.example/", None),
        ({"all_proxy": "socks5h://proxy.example"}, "http://chat.example/", "socks5h://proxy.example"),
        ({"http_proxy": "proxy.example:3128"}, "http://chat.example/", PROXY),
        ({"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, "http://chat.example/", None),
        ({}, "http://chat.example/", None),
    ],
)
def test_proxy_of_the_environment(proxy_in, environment, url, expected):
    assert expected == proxy_in(url, "environment", environment)


@pytest.mark.parametrize(
    ("no_proxy", "host", "is_direct"),
    [
        *(("*", "chat.example", True), ("chat.example", "chat.example", True)),
        *(("chat.example", "a.chat.example", True), ("chat.example", "mychat.example", False)),
        *((".example", "chat.example", True), ("*.example, other", "chat.example", True)),
        *(("other chat.example", "chat.example", True), ("CHAT.example.", "chat.EXAMPLE", True)),
        *(("chat.example:443", "chat.example", True), ("chat.example:80", "chat.example", False)),
        *(("10.0.0.0/8", "10.1.2.3", True), ("10.0.0.0/8", "11.1.2.3", False), ("10.1.2.3", "10.1.2.3", True)),
        *(("1.2.3", "10.1.2.3", False), ("fd00::/8", "[fd00::5]", True), ("[fd00::5]:443", "[fd00::5]", True)),
        *(("fd00::5", "[fd00::15]", False), ("not/a/network, ,", "chat.example", False), ("", "chat.example", False)),
    ],
)
@pytest.mark.parametrize("setting", ["environment", "http://proxy.example:3128"])
def test_hosts_in_no_proxy_are_reached_directly(proxy_in, no_proxy, host, is_direct, setting):
    found = proxy_in(f"https://{host}/x", setting, {**EVERYWHERE, "NO_PROXY": no_proxy})

    assert (None if is_direct else PROXY) == found


def test_setting_takes_precedence_over_the_environment(proxy_in):
    assert None is proxy_in("https://chat.example/", "none", EVERYWHERE)
    assert "http://other:1" == proxy_in("https://chat.example/", "http://other:1", EVERYWHERE)


@pytest.mark.parametrize("port", ["99999", "x", "0", "-1"])
def test_proxy_with_an_invalid_port_is_refused(proxy_in, port):
    assert not is_proxy(f"http://proxy.example:{port}")
    assert PROXY == proxy_in(f"http://host.example:{port}/", PROXY, {"no_proxy": "other.example:80"})
