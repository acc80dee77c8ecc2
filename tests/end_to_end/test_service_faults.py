"""A service with few files and many half-open connections, and a service whose store is away for some seconds."""

import json
import socket
import urllib.error
from pathlib import Path

import pytest

from rankscope_storage.connection import connect

TRAINING = Path(__file__).with_name("small_training.py")
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from rankscope.__main__ import main
main()
"""


@pytest.mark.thorough
def test_half_open_connections_do_not_lock_out_others(service, tmp_path):
    service.program = tmp_path / "limited.py"
    service.program.write_text(LIMITED)
    service.start()
    held = []
    try:
        for _ in range(320):
            held.append(socket.create_connection(("127.0.0.1", service.port), timeout=1))
            held[-1].send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
    except OSError:
        pass

    assert len(held) >= 128
    assert service.wait_for(lambda: service.get("/healthz"), 60)
    for connection in held:
        connection.close()


@pytest.mark.thorough
def test_store_that_is_away_for_some_seconds_loses_no_row(service, start_job, tmp_path):
    def number(name):
        return json.loads(service.get("/api/v1/status"))[name]

    def is_degraded():
        try:
            service.get("/healthz")
        except urllib.error.HTTPError as error:
            return 503 == error.code

    service.start()
    training = start_job(TRAINING, tmp_path, 300, 0.05, RANKSCOPE_RUN="away")
    service.wait_for(lambda: number("rows_committed"))
    service.store.rename(tmp_path / "elsewhere")
    service.wait_for(is_degraded, 15)
    pending = number("rows_pending")
    service.wait_for(lambda: number("rows_pending") > pending + 200)

    assert not service.store.exists()
    (tmp_path / "elsewhere").rename(service.store)
    assert 0 == training.wait(80)
    assert 0 == service.stop()
    with connect(service.store) as connection:
        losses = "SELECT count(DISTINCT step), max(step) FROM scalars WHERE name = 'loss'"
        assert [(300, 300)] == connection.execute(losses).fetchall()
