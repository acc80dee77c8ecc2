"""With slow, absent or full storage of any duration, stored and lost records add up, and none is stored twice."""

import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.lives import Host, Life, gaps, stored, targets, until
from tests.soak.conftest import SECONDS, Memory

pytestmark = pytest.mark.timeout(4 * SECONDS + 400)

RING = 1024
PAUSE = 0.005  # Pause of a rank between two records: about 150 records per second
MEMORY_MB = 600.0  # Memory limit of a service with all its libraries and its backlog: batches are limited by rows
GROWTH_MB = 64.0  # Largest increase of the memory from the first to the second half of a fault


def value_of(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def overrun(life: Life, service: Any) -> float:
    """Return the number of records that the ring overwrote before they were stored, from the page of the rank."""
    target = targets(service)[life.out.stem]
    with urllib.request.urlopen(f"{target['url']}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    (found,) = re.findall(r'^rankscope_dropped_total\{.*reason="ring_overrun".*\} (\S+)$', page, re.MULTILINE)
    return float(found)


def settled(life: Life, service: Any) -> None:
    """Wait until the store has all remaining records of a rank that publishes no more."""
    service.wait_for(lambda: targets(service)[life.out.stem]["committed"] == life.published - 1, seconds=300)


def assert_it_adds_up(life: Life, service: Any, page: str) -> int:
    """Compare all counts of lost records and return their number."""
    seqs = stored(service.store)[life.out.stem]
    lost = [seq for gap in gaps(service.store) for seq in range(gap["first"], gap["last"] + 1)]

    assert sorted(set(seqs)) == seqs
    assert list(range(life.published)) == sorted(seqs + lost)
    assert len(lost) == value_of(page, 'rankscope_ingest_lost_records_total{run="r"}')
    return len(lost)


def assert_memory_is_bounded(memory: Memory, began: float, ended: float) -> None:
    middle = (began + ended) / 2
    first, second = memory.most(began, middle), memory.most(middle, ended)
    most = memory.most(0, ended + 1e6)
    print(f"memory of the service: {first:.0f}, then {second:.0f} MiB in the trouble, {most:.0f} MiB at most")

    assert 0 < first < MEMORY_MB
    assert most < MEMORY_MB
    assert second < first + GROWTH_MB


def test_slow_store_slows_polls_and_overwritten_records_are_counted(
    service: Any, host: Host, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_FSYNC_SECONDS", "0.7")
    service.program = Path(__file__).with_name("slow_disk.py")
    service.ingest = "flush_rows = 100\nmax_pending_rows = 200"
    service.start()
    life = host.start(service, 0, "first", steps=int(SECONDS / PAUSE), pause=PAUSE, end="linger", spool=False, ring=256)
    until(lambda: life.published > 500)
    began = time.monotonic()
    until(lambda: life.published == int(SECONDS / PAUSE), seconds=4 * SECONDS + 60)
    ended = time.monotonic()
    settled(life, service)
    page, dropped = service.get("/metrics"), overrun(life, service)

    assert 0 == service.stop(), service.log()
    lost = assert_it_adds_up(life, service, page)
    assert 0 < lost <= dropped  # the service had polled and stored some of the overwritten records
    assert_memory_is_bounded(memory, began, ended)


@pytest.mark.parametrize("spool", [False, True], ids=["with a ring alone", "with a spool"])
def test_absent_service_loses_only_records_beyond_ring_and_spool(
    spool: bool, service: Any, host: Host, memory: Memory
) -> None:
    service.start()
    steps = int(1.5 * SECONDS / PAUSE)
    life = host.start(service, 0, "first", steps=steps, pause=PAUSE, end="linger", spool=spool, ring=RING)
    service.wait_for(lambda: targets(service).get("first-0", {}).get("committed", -1) > 50)
    service.kill()
    had, left_at = stored(service.store)["first-0"][-1], time.monotonic()
    until(lambda: time.monotonic() - left_at > SECONDS, seconds=SECONDS + 60)
    service.start()
    service.wait_for(lambda: targets(service).get("first-0", {}).get("cursor", -1) > had)
    at_most, back_at = max(0, life.published - RING - had), time.monotonic()
    until(lambda: life.published == steps, seconds=4 * SECONDS + 60)
    settled(life, service)
    ended = time.monotonic()
    page, dropped = service.get("/metrics"), overrun(life, service)

    assert 0 == service.stop(), service.log()
    lost = assert_it_adds_up(life, service, page)
    if spool:
        assert (0, 0) == (lost, dropped)
    else:
        assert 0 < lost <= min(at_most, dropped)
    assert_memory_is_bounded(memory, back_at, ended)  # while it reads the backlog, and later


@pytest.mark.parametrize("spool", [False, True], ids=["with a ring alone", "with a spool"])
def test_full_disk_of_the_store_is_reported_and_retried(
    spool: bool, service: Any, host: Host, memory: Memory, small_disk: Path
) -> None:
    service.place = small_disk / "history"
    service.ingest = "flush_rows = 500\nmax_pending_rows = 1000"
    service.start()
    steps = int(1.3 * SECONDS / PAUSE)
    life = host.start(service, 0, "first", steps=steps, pause=PAUSE, end="linger", spool=spool, ring=RING)
    service.wait_for(lambda: targets(service).get("first-0", {}).get("committed", -1) > 50)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    full_at = time.monotonic()
    service.wait_for(lambda: "No space left" in service.log() or "os error 28" in service.log())
    had = targets(service)["first-0"]["committed"]
    until(lambda: time.monotonic() - full_at > SECONDS, seconds=SECONDS + 60)
    ballast.unlink()
    over_at = time.monotonic()
    service.wait_for(lambda: targets(service)["first-0"]["committed"] > had)
    at_most = max(0, life.published - RING - had)
    until(lambda: life.published == steps, seconds=4 * SECONDS + 60)
    settled(life, service)
    page, dropped = service.get("/metrics"), overrun(life, service)

    assert 0 == service.stop(), service.log()
    lost = assert_it_adds_up(life, service, page)
    print(f"{lost} records lost; the ring alone could not hold {at_most}")
    if spool:
        assert (0, 0) == (lost, dropped)
    else:
        assert 0 < lost <= min(at_most, dropped)
    assert_memory_is_bounded(memory, full_at, over_at)
