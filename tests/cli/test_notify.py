"""`rankscope notify test` sends a notification to real HTTP receivers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture
def receiver():
    """Return address and list of the received documents of an HTTP server that accepts everything."""
    received: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"json://127.0.0.1:{server.server_port}/", received
        server.shutdown()
        thread.join()


def test_a_notification_is_sent_to_each_address_of_the_option(rankscope, receiver):
    address, received = receiver
    done = rankscope("notify", "test", "--notify", address)

    assert 0 == done.returncode, done.stderr
    assert done.stdout.endswith(": sent\n")
    assert ["[test] Rankscope notification"] == [document["title"] for document in received]


def test_addresses_of_alertmanager_have_the_same_form_here(rankscope, receiver):
    """Each command accepts the addresses of `rankscope up`. A message of another severity is not sent."""
    address, received = receiver
    web = address.replace("json://", "http://")
    done = rankscope("notify", "test", "--notify", web, "--notify", f"info={web}", "--notify", f"critical={web}")

    assert 0 == done.returncode, done.stderr
    assert 2 == len(received)


def test_addresses_are_read_from_the_configuration_file(rankscope, receiver, tmp_path):
    address, received = receiver
    (tmp_path / "service.toml").write_text(f"[store]\npath = 'history'\n[notify]\nurls = ['{address}']\n")
    done = rankscope("notify", "test", tmp_path / "service.toml")

    assert 0 == done.returncode, done.stderr
    assert 1 == len(received)


def test_a_failure_is_printed_with_its_address_and_exits_with_1(rankscope, receiver, free_port):
    address, received = receiver
    done = rankscope("notify", "test", "--notify", address, "--notify", f"json://127.0.0.1:{free_port}/")

    assert 1 == done.returncode
    assert 1 == done.stdout.count(": failed: ")
    assert "rankscope: 1 of 2 notifications failed\n" == done.stderr
    assert 1 == len(received)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "no address: give --notify URL"), (["--notify", "nothing://x"], "nothing://…")],
)
def test_a_missing_or_unknown_address_is_named(rankscope, arguments, message):
    done = rankscope("notify", "test", *arguments)

    assert 2 == done.returncode
    assert message in done.stderr
