"""Deliveries to real servers on loopback: the reason of a failure, proxies, and the login of ~/.netrc."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from tests.ingest.notify.web_server import PROXIES

from rankscope_ingest.notify.notifiers import Message, NotifyError, make_notifiers

MESSAGE = Message(key="k", title="title", body="body", severity="critical")


@pytest.fixture
def root_log() -> Iterator[list[str]]:
    """Return the messages that reach the handlers of the service, which are at the root logger."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector = Collector()
    logging.getLogger().addHandler(collector)
    yield messages
    logging.getLogger().removeHandler(collector)


async def failure(url: str, **settings: Any) -> str:
    """Return the reason why a delivery to `url` fails."""
    (notifier,) = make_notifiers([url], **{"timeout_seconds": 20.0, **settings})
    with pytest.raises(NotifyError) as error:
        await notifier.send(MESSAGE)
    return str(error.value)


async def deliver(url: str, **settings: Any) -> None:
    (notifier,) = make_notifiers([url], timeout_seconds=20.0, **settings)
    await notifier.send(MESSAGE)


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (403, b"<h1>channel is archived</h1>", "403 Forbidden: channel is archived"),
        (503, b"", "503 Service Unavailable"),
        (404, b"/hooks/tok3n bob s3cret Ym9iOnMzY3JldA== is unknown", "404 Not Found: /…/… … … … is unknown"),
    ],
    ids=["text", "no text", "repeated secrets"],
)
async def test_status_and_text_of_a_refusal_are_the_reason(serve, root_log, status, text, reason):
    web = serve(status=status, text=text)

    assert reason == await failure(f"json://bob:s3cret@127.0.0.1:{web.port}/hooks/tok3n")
    assert [] == root_log


async def test_refused_connection_is_the_reason(free_port):
    assert "connection refused by 127.0.0.1" == await failure(f"json://127.0.0.1:{free_port}/tok3n")
    mail = f"mailto://127.0.0.1:{free_port}?from=a@b.example&to=b@b.example"
    assert "Connection refused" == await failure(mail)


async def test_unknown_name_is_the_reason():
    reason = await failure("json://alerts.invalid/tok3n")

    assert reason.startswith("the name alerts.invalid cannot be resolved: ")
    assert "tok3n" not in reason


async def test_missing_tls_is_the_reason(serve):
    assert "TLS with 127.0.0.1 failed" in await failure(f"jsons://127.0.0.1:{serve().port}/")


async def test_silence_of_a_receiver_is_the_reason(free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        assert "timed out after 0.2 s" == await failure(f"json://127.0.0.1:{free_port}/", timeout_seconds=0.2)


async def test_refused_recipient_is_the_reason(free_port):
    class Refuses:
        async def handle_RCPT(self, *_: Any) -> str:  # noqa: N802 - aiosmtpd's name
            return "550 5.1.1 no such user ops@example.com"

    with smtp(Refuses(), free_port):
        reason = await failure(f"mailto://127.0.0.1:{free_port}?from=monitor@example.com&to=ops@example.com")

    assert "'…': 550 5.1.1 no such user …" == reason


async def test_refused_login_of_mail_is_the_reason(free_port):
    refuses = {"authenticator": lambda *_: AuthResult(success=False, handled=False), "auth_require_tls": False}
    with smtp(object(), free_port, **refuses):
        reason = await failure(f"mailto://me:s3cret@127.0.0.1:{free_port}?from=a@example.com&to=b@example.com")

    assert reason.startswith("535 5.7.8 ")
    assert "s3cret" not in reason


# Proxies and logins.


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_loopback_is_reached_directly_and_without_netrc(serve, monkeypatch, host):
    receiver, proxy = serve(), serve(status=502)
    for name in PROXIES[:3]:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    await deliver(f"json://{host}:{receiver.port}/hook")
    await deliver(f"json://{host}:{receiver.port}/hook", proxy=f"http://127.0.0.1:{proxy.port}")

    assert [] == proxy.requests
    assert ["/hook", "/hook"] == [path for path, _ in receiver.requests]
    assert all("Authorization" not in headers for _, headers in receiver.requests)


async def test_other_hosts_are_sent_to_the_proxy_without_resolving_them(serve, monkeypatch):
    proxy = serve()
    monkeypatch.setenv("http_proxy", f"http://pass:word@127.0.0.1:{proxy.port}")
    await deliver("json://alerts.invalid/hook")
    ((path, headers),) = proxy.requests

    assert "http://alerts.invalid/hook" == path
    assert "Basic cGFzczp3b3Jk" == headers["Proxy-Authorization"]
    assert "Authorization" not in headers


@pytest.mark.parametrize(("no_proxy", "setting"), [("alerts.invalid", "environment"), ("", "none")])
async def test_no_proxy_and_the_setting_turn_the_proxy_off(serve, monkeypatch, no_proxy, setting):
    proxy = serve()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("no_proxy", no_proxy)
    reason = await failure("json://alerts.invalid/hook", proxy=setting)

    assert reason.startswith("the name alerts.invalid cannot be resolved")
    assert [] == proxy.requests


async def test_setting_names_the_proxy_and_a_failure_names_it_too(serve, free_port):
    proxy = serve(status=502, text=b"no route")
    url = "json://alerts.invalid/hook"
    refused = await failure(url, proxy=f"http://me:s3cret@127.0.0.1:{free_port}")

    assert f"502 Bad Gateway: no route (sent to the proxy 127.0.0.1:{proxy.port})" == await failure(
        url, proxy=f"http://127.0.0.1:{proxy.port}"
    )
    assert f"connection refused by 127.0.0.1 (sent to the proxy 127.0.0.1:{free_port})" == refused


async def test_invalid_port_of_a_proxy_or_an_address_is_the_reason(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://me:s3cret@proxy.example:99999")
    reason = await failure("json://alerts.invalid/hook")

    assert "the address of the proxy is not valid (sent to the proxy proxy.example)" == reason
    assert "Failed to parse: http://127.0.0.1:99999/…" == await failure("json://127.0.0.1:99999/tok3n")


async def test_redirect_to_loopback_leaves_the_proxy_and_uses_no_netrc(serve):
    receiver = serve()
    proxy = serve(status=307, location=f"http://127.0.0.1:{receiver.port}/moved")
    await deliver("json://alerts.invalid/hook?redirect=yes", proxy=f"http://127.0.0.1:{proxy.port}")
    ((path, headers),) = receiver.requests

    assert "/moved" == path
    assert "Authorization" not in headers


@contextlib.contextmanager
def smtp(handler: Any, port: int, **options: Any) -> Iterator[None]:
    """Run an SMTP server in the body of the context."""
    controller = Controller(handler, hostname="127.0.0.1", port=port, **options)
    controller.start()
    try:
        yield
    finally:
        controller.stop()
