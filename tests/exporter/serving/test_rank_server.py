"""The life cycle of a rank server: start, drain, close, fork."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rankscope_exporter.serving import http_server
from rankscope_exporter.serving.config import ServeError


@pytest.fixture
def leased(new_rank, service, until):
    """Return a rank that the service double has registered."""
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    return rank


@pytest.fixture
def own_threads():
    """Return a function that lists the threads of Rankscope that the test has started."""
    before = set(threading.enumerate())

    def since() -> list[str]:
        return [item.name for item in threading.enumerate() if item not in before and item.name.startswith("rankscope")]

    return since


def test_server_has_no_socket_and_no_thread_before_start(own_threads, new_rank, record):
    rank = new_rank(started=False)
    seq = rank.channel.publish(record(0))

    assert (0, None, []) == (seq, rank.channel.url, own_threads())


def test_record_published_before_start_is_served(new_rank, record):
    rank = new_rank(started=False)
    rank.channel.publish(record(0))
    rank.channel.start()

    assert [0] == rank.records(-1).seqs


def test_used_port_is_refused_and_leaves_nothing_open(new_rank, rank):
    second = new_rank(started=False, listen=f"127.0.0.1:{rank.port}")
    with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{rank.port}"):
        second.channel.start()
    second.channel.close()

    assert 200 == rank.get("/healthz").status


def test_second_start_is_refused(rank):
    with pytest.raises(ServeError, match="create a new one"):
        rank.channel.start()


def test_close_frees_the_port_and_ends_the_threads(own_threads, leased):
    leased.channel.close()
    leased.channel.close()
    with socket.create_server(("127.0.0.1", leased.port)):
        pass

    assert [] == own_threads()


def test_close_does_not_wait_for_the_poll_interval(new_rank, monkeypatch):
    monkeypatch.setattr(http_server, "_SWEEP_SECONDS", 60.0)
    rank = new_rank()
    begun = time.monotonic()
    rank.channel.close()

    assert time.monotonic() - begun < 10.0


def test_drain_returns_immediately_without_a_service(rank, record):
    rank.channel.publish(record(0))
    begun = time.monotonic()
    left = rank.channel.drain(30.0)

    assert 1 == left
    assert time.monotonic() - begun < 10.0


def test_drain_does_not_wait_for_an_unreachable_service(new_rank, record, free_port):
    rank = new_rank(ingest_url=f"http://127.0.0.1:{free_port}")
    rank.channel.publish(record(0))
    begun = time.monotonic()
    left = rank.channel.drain(30.0)

    assert 1 == left
    assert time.monotonic() - begun < 10.0


def test_drain_registers_as_draining_and_waits_for_the_commit(leased, service, record, until):
    for step in range(3):
        leased.channel.publish(record(step))

    def serve():
        until(lambda: service.pokes)
        leased.records(-1, Rankscope_Lease=service.lease)
        leased.records(2, committed=2, Rankscope_Lease=service.lease)

    puller = threading.Thread(target=serve)
    puller.start()
    left = leased.channel.drain(10.0)
    puller.join()

    assert 0 == left
    assert "draining" == service.registrations[-1]["state"]


def test_drain_ends_by_the_committed_value_of_the_reply(leased, service, record):
    leased.channel.publish(record(0))
    service.committed = 0

    assert 0 == leased.channel.drain(10.0)


def test_run_shorter_than_its_registration_drains(new_rank, service, record):
    service.hold.clear()
    rank = new_rank(ingest_url=service.url)
    rank.channel.publish(record(0))
    service.committed = 0
    threading.Timer(0.2, service.hold.set).start()

    assert 0 == rank.channel.drain(10.0)


def test_drain_returns_the_uncommitted_number_after_its_timeout(leased, record):
    leased.channel.publish(record(0))
    begun = time.monotonic()
    left = leased.channel.drain(0.2)

    assert 1 == left
    assert time.monotonic() - begun < 10.0


FORK = """
    import os, socket, sys, urllib.request
    import psutil
    from rankscope_contract.model.identity import Identity
    from rankscope_exporter.records.step_record import StepRecord
    from rankscope_exporter.serving.rank_server import RankServer
    from rankscope_exporter.serving.config import ServeConfig

    def quiet(*_):
        raise SystemExit("a fault was reported")

    channel = RankServer(
        Identity(run="r", launch_id="l", incarnation="i"), ServeConfig(spool_dir=None),
        rules=(), settings={}, planned_steps=None,
        on_fault=quiet, overhead=dict, dropped=dict, faults=int,
    )
    url = channel.start()
    port = int(url.rpartition(":")[2])
    channel.publish(StepRecord(ts=0))
    reader = socket.create_connection(("127.0.0.1", port))
    reader.sendall(b"GET /healthz HTTP/1.1\\r\\n\\r\\n")
    received = b""
    while b"head" not in received:
        received += reader.recv(10000)

    report_in, report_out = os.pipe()
    go_in, go_out = os.pipe()
    child = os.fork()
    if child == 0:
        channel.abandon_after_fork()
        inert = channel.publish(StepRecord(ts=0)), channel.drain(5), channel.close(), channel.set_phase("x")
        open_here = [c.status for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == port]
        os.write(report_out, repr((inert, open_here)).encode())
        os.read(go_in, 1)
        os._exit(0)
    print(os.read(report_in, 1000).decode())
    print(urllib.request.urlopen(url + "/healthz").status)
    channel.close()
    while reader.recv(1000):
        pass
    socket.create_server(("127.0.0.1", port)).close()
    print("bound again")
    os.write(go_out, b"x")
    os.waitpid(child, 0)
"""


@pytest.mark.thorough
def test_forked_child_has_no_sockets_of_the_rank():
    """The child has neither the listening socket nor the connections; the parent still serves and can close."""
    script = textwrap.dedent(FORK)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert "" == ran.stderr
    assert ["((-1, 0, None, None), [])", "200", "bound again"] == ran.stdout.splitlines()
