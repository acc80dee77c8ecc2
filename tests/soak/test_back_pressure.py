"""Whatever the store and the service do, and for how long: stored and lost add up, nothing is stored twice.

Losses are no more than ring and spool could not hold, and are counted on the rank's page, the service's page and in the
store. Meanwhile the service keeps within its memory.
"""

from __future__ import annotations

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
PAUSE = 0.005
"""Of a rank between two records: some 150 of them a second."""
MEMORY_MB = 600.0
"""What a service may take, with all its libraries and what it catches up with: its batches are bounded by rows."""
GROWTH_MB = 64.0
"""What it may take more in the second half of a trouble than in the first."""


def value_of(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def overrun(life: Life, service: Any) -> float:
    """Return what the rank says its ring has overwritten before a store had it."""
    target = targets(service)[life.out.stem]
    with urllib.request.urlopen(f"{target['url']}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    (found,) = re.findall(r'^rankscope_dropped_total\{.*reason="ring_overrun".*\} (\S+)$', page, re.MULTILINE)
    return float(found)


def settled(life: Life, service: Any) -> None:
    """Wait until the store has all that the rank still had; the rank publishes no more."""
    service.wait_for(lambda: targets(service)[life.out.stem]["committed"] == life.published - 1, seconds=300)


def assert_it_adds_up(life: Life, service: Any, page: str) -> int:
    """Return how many records were lost, after all that is counted was compared."""
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


def test_a_store_that_is_too_slow_slows_pulls_and_what_the_ring_cannot_hold_is_counted(
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
    assert 0 < lost <= dropped  # of what was overwritten the service had fetched some, and stored it
    assert_memory_is_bounded(memory, began, ended)


@pytest.mark.parametrize("spool", [False, True], ids=["with a ring alone", "with a spool"])
def test_a_service_that_is_away_costs_no_more_than_ring_and_spool_could_not_hold(
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
    assert_memory_is_bounded(memory, back_at, ended)  # while it catches up, and after


@pytest.mark.parametrize("spool", [False, True], ids=["with a ring alone", "with a spool"])
def test_a_full_disk_under_the_store_is_told_and_waited_for(
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
