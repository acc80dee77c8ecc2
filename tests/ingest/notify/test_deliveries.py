"""Deliveries to real servers on loopback: failures and their reasons, counters, proxies, logins, and secrets."""

import asyncio
import contextlib
import ipaddress
import itertools
import json
import logging
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from rankscope.access.service import request
from rankscope.commands.dashboards import _server
from rankscope_dashboards.grafana.server import GrafanaError
from rankscope_exporter.publish.registration import ServiceClient
from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.network.http_client import HttpClient
from rankscope_ingest.notify.announcer import Deliveries, Message, NotifyError, receiver_names
from rankscope_ingest.notify.apprise_notifier import MAX_CHARACTERS, Secrets
from rankscope_ingest.notify.notifiers import make_notifiers

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass
class Web:
    """An HTTP server on loopback: its answer, and the requests that it got."""

    status: int = 200
    text: bytes = b""
    location: str = ""
    port: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def start(self) -> ThreadingHTTPServer:
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                web.requests.append((self.path, dict(self.headers)))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(web.status)
                if web.location:
                    self.send_header("Location", web.location)
                self.send_header("Content-Length", str(len(web.text)))
                self.end_headers()
                self.wfile.write(web.text)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server


@pytest.fixture
def serve() -> Iterator[Callable[..., Web]]:
    servers = []

    def start(**changes: Any) -> Web:
        web = Web(**changes)
        servers.append(web.start())
        return web

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the proxies of the environment, and give every host a login in ~/.netrc."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    (tmp_path / "netrc").write_text("default login stranger password stolen\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def at_times(*seconds):
    return Deliveries(clock=itertools.chain(seconds, itertools.repeat(seconds[-1])).__next__)


@pytest.mark.parametrize(
    ("failures", "seconds", "expected"),
    [
        (
            [("a", "first"), ("a", "second")],
            (100.0, 110.0, 140.0),
            "2 messages wait since 40 s: 403 Forbidden (json://a)",
        ),
        ([("a", "first"), ("b", "first")], (0.0,), "1 message waits since 0 s: 403 Forbidden (json://b)"),
        ([("a", "first"), ("a", "first")], (0.0, 30.0), "1 message waits since 30 s: 403 Forbidden (json://a)"),
    ],
    ids=["two messages", "two receivers", "two failures"],
)
def test_waiting_messages_are_named_with_the_latest_reason_until_delivery(failures, seconds, expected):
    deliveries = at_times(*seconds)
    for (receiver, key), reason in zip(failures, ("timed out", "403 Forbidden"), strict=True):
        deliveries.failed(f"json://{receiver}", key, reason, is_last=False)
    waiting = deliveries.trouble()
    for receiver, key in failures:
        deliveries.delivered(f"json://{receiver}", key)

    assert (expected, None) == (waiting, deliveries.trouble())


def test_lost_messages_are_named_until_their_receiver_gets_one():
    deliveries = at_times(0.0, 90.0)
    for key in ("first", "second"):
        deliveries.failed("json://a", key, "403 Forbidden", is_last=False)
        deliveries.failed("json://a", key, "403 Forbidden", is_last=True)
    lost = deliveries.trouble()
    deliveries.delivered("json://b", "third")
    still_lost = deliveries.trouble()
    deliveries.delivered("json://a", "third")

    assert "2 messages were not delivered, the first 90 s ago: 403 Forbidden (json://a)" == lost == still_lost
    assert None is deliveries.trouble()


def test_each_attempt_is_counted():
    counted: Counter[tuple[str, str]] = Counter()
    deliveries = Deliveries(lambda spec, outcome: counted.update([(spec.name, outcome)]))
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.failed("json://a", "first", "timed out", is_last=False)
    deliveries.delivered("json://a", "first")

    attempts = "rankscope_ingest_notification_attempts_total"
    assert {(attempts, "failed"): 2, (attempts, "sent"): 1} == counted


async def test_failed_deliveries_are_logged_and_on_all_pages(serve, start_service, fake_rank, eventually, caplog):
    receiver = serve(status=403, text=b"channel is archived")
    url = f"json://127.0.0.1:{receiver.port}/tok3n"
    changes = {"notify.urls": [url], "notify.group_wait_seconds": 0.0}
    async with start_service(**changes) as service, fake_rank() as rank:
        rank.publish(events=[{"type": "anomaly", "severity": "critical", "rule": "AnomalyNan", "tensor": "w"}])
        await rank.register(service.url)

        async def failed() -> str | None:
            found: str | None = json.loads((await service.get("/api/v1/status"))[1])["notifications"]
            return found

        text = await eventually(failed)
        pages = [(await service.get(path))[1] for path in ("/service", "/", "/metrics")]
        receiver.status = 200

    assert text.startswith("1 message waits since ")
    assert text.endswith(f" s: 403 Forbidden: channel is archived (json://127.0.0.1:{receiver.port})")
    assert all("403 Forbidden: channel is archived" in page for page in pages[:2])
    assert "notification failed: 403 Forbidden: channel is archived (json://127.0.0.1:" in caplog.text
    assert 'rankscope_ingest_notification_attempts_total{outcome="failed"}' in pages[2]
    assert not any("tok3n" in page for page in pages)


# Ranks, service and commands reach each other without a proxy, and without the login of ~/.netrc.


def by_service(url: str) -> None:
    async def request() -> None:
        networks = [ipaddress.ip_network("127.0.0.0/8")]
        async with HttpClient(networks=networks) as client, client.request("GET", url, headers={}, timeout_seconds=5.0):
            pass

    asyncio.run(request())


def by_deployment(url: str) -> None:
    with tempfile.NamedTemporaryFile("w") as token:
        token.write("glsa_token")
        token.flush()
        server = _server(url, Path(token.name), None)
    with pytest.raises(GrafanaError, match="it is not Grafana"):
        server.check()


@pytest.mark.parametrize(
    "send",
    [by_service, by_deployment, request, lambda url: ServiceClient(url, None).poke("incarnation")],
    ids=["service", "deployment to Grafana", "command", "rank"],
)
def test_request_to_loopback_uses_neither_proxy_nor_netrc(serve, monkeypatch, send):
    receiver, proxy = serve(text=b"{}"), serve(status=502)
    for name in PROXIES[:3]:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    send(f"http://127.0.0.1:{receiver.port}")
    ((_, headers),) = receiver.requests

    assert [] == proxy.requests
    assert "Authorization" not in headers


def test_deployment_reaches_another_machine_through_the_proxy(serve, monkeypatch):
    proxy = serve(text=b"{}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    by_deployment("http://grafana.invalid:3000")
    ((path, headers),) = proxy.requests

    assert "http://grafana.invalid:3000/api/health" == path
    assert "Authorization" not in headers


# Texts about an address contain none of its secrets.

SECRETS = Secrets(["json://bob:p%40ss%2Fword@hooks.example:8080/path1/tok3n?+X-Key=abc%20def&tls=no"])


@pytest.mark.parametrize(
    "secret",
    [
        *("bob", "p%40ss%2Fword", "p@ss/word", "P@SS/WORD", "Ym9iOnBAc3Mvd29yZA=="),
        *("path1", "tok3n", "abc def", "abc+def", "abc%20def"),
    ],
)
def test_a_secret_is_masked_in_every_form(secret):
    assert "bad value …, no more" == SECRETS.removed_from(f"bad value {secret}, no more")


def test_short_secrets_are_masked_only_as_words():
    assert "… in abcd" == Secrets(["json://a@host/"]).removed_from("a in abcd")
    assert "… in …" == Secrets(["json://abc:abc.def@host/"]).removed_from("abc.def in abc")


def test_urls_are_shown_without_user_path_and_query():
    text = "no route to https://x:y@chat.example:443/services/T0/B0?key=1, and http://[::1]:8/z"

    assert "no route to https://chat.example:443/… and http://[::1]:8/…" == SECRETS.removed_from(text)


def test_a_text_becomes_one_short_line():
    shown = SECRETS.removed_from("first\n\tsecond\x1b[31m" + "x" * 1000)

    assert shown.startswith("first second [31mxxx")
    assert MAX_CHARACTERS == len(shown)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("json://bob:pw@hooks.example:8080/token?key=1", "json://hooks.example:8080"),
        ("mailto://me:pw@mail.example?to=a@b.example", "mailto://mail.example"),
        ("feishu://0123456789abcdef", "feishu://…"),
        ("ntfy://my-secret-topic", "ntfy://…"),
        ("ntfys://tk_login@my-secret-topic", "ntfys://…"),
        ("ntfy://ntfy.example:8080/my-secret-topic", "ntfy://ntfy.example:8080"),
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "slack://…"),
        ("discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", "discord://…"),
    ],
)
def test_label_shows_the_host_only_if_it_is_no_secret(url, label):
    (notifier,) = make_notifiers([url], timeout_seconds=1)

    assert label == notifier.label


def test_several_addresses_in_one_text_are_separate_receivers():
    """As in apprise: separated by spaces or commas. A list within one address remains."""
    text = "json://a.example/tok3n, mailto://me:pw@mail.example?to=a@b.example, c@d.example\njson://a.example/other"
    notifiers = make_notifiers([text, "ntfy://topic1", "ntfy://topic2"], timeout_seconds=1)

    assert [
        *("json://a.example, address 1", "mailto://mail.example", "json://a.example, address 2"),
        *("ntfy://…, address 1", "ntfy://…, address 2"),
    ] == receiver_names(notifiers)


def test_one_invalid_address_of_several_is_refused():
    with pytest.raises(ConfigError, match=r"notify.urls\[0\] \(nosuch://…\) is not a supported"):
        make_notifiers(["json://a.example/tok3n nosuch://user:s3cret@host"], timeout_seconds=1)


@pytest.mark.parametrize("proxy", ["http://proxy.example:3128", "environment"])
def test_receivers_that_the_proxy_of_the_settings_does_not_reach_are_logged(caplog, proxy):
    make_notifiers(["json://a.example/x", "mailto://me:pw@mail.example"], timeout_seconds=1, proxy=proxy)

    expected = ["notify.proxy does not apply to mailto://mail.example, which is not reached by HTTP"]
    found = [record.getMessage() for record in caplog.records if record.name.startswith("rankscope")]
    assert (expected if "proxy.example" in proxy else []) == found


# The reason of a failure, proxies, and the login of ~/.netrc.

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
    controller = Controller(handler, hostname="127.0.0.1", port=port, **options)
    controller.start()
    try:
        yield
    finally:
        controller.stop()


async def test_one_file_adds_a_notification_service(monkeypatch, tmp_path):
    (tmp_path / "pager.py").write_text(
        "from apprise.decorators import notify\n"
        "@notify(on='pager')\n"
        "def send(body, title, notify_type, **_):\n"
        f"    open({str(tmp_path / 'sent')!r}, 'w').write(f'{{title}}: {{body}}')\n"
    )
    monkeypatch.setattr("rankscope_ingest.notify.apprise_notifier.PLUGINS", tmp_path)
    await make_notifiers(["pager://room"], timeout_seconds=10.0)[0].send(MESSAGE)

    assert "title: body" == (tmp_path / "sent").read_text()
