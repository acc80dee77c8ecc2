"""The life cycle of a rank server: start, drain, close, fork."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rankscope_exporter.serving import http_server
from rankscope_exporter.serving.config import ServeError


@pytest.fixture
def own_threads():
    """Return a function that lists the threads of Rankscope that the test has started."""
    before = set(threading.enumerate())

    def since() -> list[str]:
        return [item.name for item in set(threading.enumerate()) - before if item.name.startswith("rankscope")]

    return since


def test_server_has_no_socket_and_no_thread_before_start(own_threads, new_rank):
    rank = new_rank(started=False)

    assert ([0], None, []) == (rank.fill(1), rank.channel.url, own_threads())

    rank.channel.start()
    assert [0] == rank.records(-1).seqs
    with pytest.raises(ServeError, match="create a new one"):
        rank.channel.start()


def test_records_of_several_threads_get_distinct_sequence_numbers(rank):
    """The watchdog and the HTTP server publish in parallel with the publisher."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda begin: rank.fill(200, begin), range(0, 4000, 1000)))
    steps = [row["step"] for row in rank.records(-1).rows]

    assert sorted(begin + n for begin in range(0, 4000, 1000) for n in range(200)) == sorted(steps)
    for thousand in range(4):
        ours = [step for step in steps if step // 1000 == thousand]
        assert ours == sorted(ours)


def test_used_port_is_refused_and_leaves_nothing_open(new_rank, rank):
    second = new_rank(started=False, listen=f"127.0.0.1:{rank.port}")
    with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{rank.port}"):
        second.channel.start()
    second.channel.close()

    assert 200 == rank.get("/healthz").status


def test_close_frees_the_port_and_ends_the_threads_immediately(own_threads, new_rank, service, until, monkeypatch):
    monkeypatch.setattr(http_server, "_SWEEP_SECONDS", 60.0)
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease)
    begun = time.monotonic()
    rank.channel.close()
    rank.channel.close()
    with socket.create_server(("127.0.0.1", rank.port)):
        pass

    assert time.monotonic() - begun < 10.0
    assert [] == own_threads()


@pytest.mark.parametrize("with_service", [False, True])
def test_drain_does_not_wait_without_a_reachable_service(new_rank, free_port, with_service):
    rank = new_rank(ingest_url=f"http://127.0.0.1:{free_port}" if with_service else None)
    rank.fill(1)
    begun = time.monotonic()
    left = rank.channel.drain(30.0)

    assert 1 == left
    assert time.monotonic() - begun < 10.0


def test_drain_registers_as_draining_and_waits_for_the_commit(leased, service, until):
    leased.fill(3)

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


@pytest.mark.parametrize("is_registered", [True, False])
def test_drain_ends_by_the_committed_value_of_the_reply(new_rank, service, until, is_registered):
    """The run may be shorter than its registration."""
    if not is_registered:
        service.hold.clear()
    rank = new_rank(ingest_url=service.url)
    until(lambda: rank.channel.state.lease or not is_registered)
    rank.fill(1)
    service.committed = 0
    threading.Timer(0.2, service.hold.set).start()

    assert 0 == rank.channel.drain(10.0)


def test_drain_returns_the_uncommitted_number_after_its_timeout(leased):
    leased.fill(1)
    begun = time.monotonic()
    left = leased.channel.drain(0.2)

    assert 1 == left
    assert time.monotonic() - begun < 10.0


def test_forked_child_has_no_sockets_of_the_rank(rank):
    """The child has neither the listening socket nor the connections; the parent still serves and can close."""
    rank.fill(1)
    (report_in, report), (go_in, go), port = os.pipe(), os.pipe(), rank.port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as reader:
        reader.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        received = b""
        while b"head" not in received:
            received += reader.recv(10_000)
        child = os.fork()
        if child == 0:
            try:
                rank.channel.abandon_after_fork()
                inert = rank.fill(1), rank.channel.drain(5), rank.channel.close(), rank.channel.set_phase("x")
                ports = {one.laddr.port for one in psutil.Process().net_connections() if one.laddr}
                os.write(report, repr((inert, port in ports)).encode())
                os.read(go_in, 1)
            finally:
                os._exit(0)
        os.close(report)
        in_child, status = os.read(report_in, 1000), rank.get("/healthz").status
        rank.channel.close()
        while reader.recv(1000):
            pass
    socket.create_server(("127.0.0.1", port)).close()  # while the child is still running
    os.write(go, b"!")
    os.waitpid(child, 0)
    for end in (report_in, go_in, go):
        os.close(end)

    assert (b"(([-1], 0, None, None), False)", 200, []) == (in_child, status, rank.faults)
