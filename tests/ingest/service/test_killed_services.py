"""Services that are killed, stopped and continued, with real ranks: each row is stored once. `make test-crashes`."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.end_to_end.lives import until
from tests.ingest.pipeline.test_exactly_once import (
    TENSORS,
    ServiceProcess,
    finish,
    open_channel,
    open_channels,
    step_record,
)
from tests.storage.crashes.killing import compiled

from rankscope_storage.maintenance.check import check

pytestmark = [
    pytest.mark.skipif(not os.environ.get("RANKSCOPE_CRASHES"), reason="make test-crashes"),
    pytest.mark.timeout(1800),
]

open_channels = open_channels  # noqa: PLW0127 - a fixture

LIVES = 24  # Services that are killed one after the other, each at a later system call


class Service(ServiceProcess):
    """A service that can be configured to kill itself at the n-th call that changes its store."""

    def begin(self, *, at: int | None = None, library: Path | None = None, module: str = "rankscope_ingest") -> None:
        """Start the process and return immediately."""
        armed = {"LD_PRELOAD": str(library), "RANKSCOPE_KILL_FOLDER": str(self.store), "RANKSCOPE_KILL_AT": str(at)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(self._config)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | (armed if at else {}),
            )


def check_stored(service, incarnations, records):
    key = "incarnation, seq, kind, tensor"
    found = service.rows(
        f"SELECT incarnation, count(*) AS n, count(DISTINCT ({key})) AS keys, max(seq) AS last FROM tensor_stats"
        " GROUP BY 1 ORDER BY 1"
    )
    expected = records * TENSORS

    assert [
        {"incarnation": name, "n": expected, "keys": expected, "last": records - 1} for name in incarnations
    ] == found
    assert [{"n": records * len(incarnations)}] == service.rows("SELECT count(*) AS n FROM scalars WHERE name = 'loss'")
    assert [] == service.rows("SELECT * FROM events WHERE type = 'gap'")


def test_service_killed_at_any_call_stores_each_row_once(tmp_path, open_channels, require_server, free_port):
    """Kills happen during flushes, commits, compactions, checkpoints and vacuums. The operation is printed."""
    require_server("gcc", "g++")
    library = compiled(tmp_path)
    service = Service(tmp_path, free_port)
    service.start()
    service.kill()
    channels = open_channels(service)
    over = threading.Event()
    published = [0]
    met = []

    def train():
        while not over.is_set():
            if published[0] - min(channel.ring.committed for channel in channels) < 200:  # the ring has 256 records
                for channel in channels:
                    channel.publish(step_record(published[0]))
                published[0] += 1
            time.sleep(0.02)

    training = threading.Thread(target=train)
    training.start()
    try:
        for life in range(LIVES):
            service.begin(at=1 + life * 10, library=library, module="tests.ingest.service.eager_service")
            assert -signal.SIGKILL == service.process.wait(120), service.log()[-2000:]
            met.append(
                re.findall(r"^(?:create|write|sync|link|unlink|rename|mkdir) \S*$", service.log(), re.MULTILINE)[-1]
            )
    finally:
        over.set()
        training.join()
    service.start()
    left = finish(channels, published[0])
    assert ([0, 0], 0) == (left, service.terminate())

    print(f"{published[0]} records of each rank, killed at", *met, sep="\n")
    assert {"_delta_log", "_staging"} <= {call.partition("/")[2].partition("/")[0] for call in met}
    assert check(service.store, deep=True).is_intact
    check_stored(service, ["launch-0", "launch-1"], published[0] + 1)


def test_continued_service_ends_if_another_one_owns_the_shard(tmp_path, free_port, another_port):
    """A hypervisor stops the service, and another machine, which does not see its lock, takes over the shard."""
    (tmp_path / "other").mkdir()
    zombie, successor = Service(tmp_path, free_port), Service(tmp_path / "other", another_port)
    (tmp_path / "other" / "store").symlink_to(tmp_path / "store")
    zombie.start()
    first = open_channel(zombie, 0, world_size=1)
    try:
        for step in range(30):
            first.publish(step_record(step))
        until(lambda: first.ring.committed >= 10)
        zombie.process.send_signal(signal.SIGSTOP)
        for lock in (zombie.store / "_shards").iterdir():
            lock.unlink()
        for step in range(30, 60):
            first.publish(step_record(step))
        successor.start()
        second = open_channel(successor, 0, world_size=1, launch_id="second")
        for step in range(30):
            second.publish(step_record(step))
        until(lambda: second.ring.committed >= 29)
        zombie.process.send_signal(signal.SIGCONT)
        assert 3 == zombie.process.wait(60)
        assert f"taken over by process {successor.process.pid} on {socket.gethostname()}" in zombie.log()
        assert "this service must stop" in zombie.log()
        assert [0] == finish([second], 30)
        assert 0 == successor.terminate()
        zombie.start()
        assert [0] == finish([first], 60)
        assert 0 == zombie.terminate()
    finally:
        first.close()
        for service in (zombie, successor):
            if service.process is not None and service.process.poll() is None:
                service.kill()
    found = zombie.rows(
        "SELECT incarnation, count(*) AS n, count(DISTINCT (seq, tensor)) AS keys FROM tensor_stats"
        " GROUP BY 1 ORDER BY 1"
    )

    assert [
        {"incarnation": "launch-0", "n": 61 * TENSORS, "keys": 61 * TENSORS},
        {"incarnation": "second-0", "n": 31 * TENSORS, "keys": 31 * TENSORS},
    ] == found
    assert check(zombie.store, deep=True).is_intact


@pytest.mark.parametrize("number", range(5))
def test_one_of_two_services_on_one_store_continues(tmp_path, number, free_port, another_port):
    """Both start at the same time. One ends with an error that names the other, which stores the rows."""
    (tmp_path / "other").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "other" / "store").symlink_to(tmp_path / "store")
    rivals = [Service(tmp_path, free_port), Service(tmp_path / "other", another_port)]
    for rival in rivals:
        rival.begin()
    try:
        until(lambda: any(rival.process.poll() is not None for rival in rivals), 60)
        loser, winner = sorted(rivals, key=lambda rival: rival.process.poll() is None)
        assert winner.url == winner.process.stdout.readline().decode().strip()
        channel = open_channel(winner, 0, world_size=1)
        channel.publish(step_record(0))

        assert 1 == loser.process.returncode
        assert f"process {winner.process.pid}" in loser.log()
        assert [0] == finish([channel], 1)
        assert 0 == winner.terminate()
    finally:
        for rival in rivals:
            if rival.process.poll() is None:
                rival.kill()
    assert [{"n": 2 * TENSORS}] == winner.rows("SELECT count(*) AS n FROM tensor_stats")
