"""From the bad step to the receiver, by both ways: through the service itself, and through Prometheus and Alertmanager.

Everything is real: a rank that trains, `rankscope serve`, Prometheus, Alertmanager, an HTTP receiver. Every measurement
is a process of its own run name that spoils one gradient, so each is the first alert of its group.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from _rows import Row, print_rows

from rankscope.demo.receiver import Way
from rankscope.up.executables import ALERTMANAGER, PROMETHEUS, required

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "end_to_end"))
from alerting import GROUP_WAIT_SECONDS, Alerting, alerting, live_runs

RUNS = 8
SCRAPE_SECONDS = 1.0
PROMISED = {Way.EMBEDDED: 2.0, Way.ALERTMANAGER: 2 * SCRAPE_SECONDS + GROUP_WAIT_SECONDS}


def run() -> list[Row]:
    found = required(dict.fromkeys((PROMETHEUS, ALERTMANAGER), "another benchmark"))
    programs = [str(found[program]) for program in (PROMETHEUS, ALERTMANAGER)]
    with (
        tempfile.TemporaryDirectory() as folder,
        alerting(Path(folder), *programs, scrape_seconds=SCRAPE_SECONDS) as running,
    ):
        delays = measured(running)
    rows = []
    for way, seconds in delays.items():
        note = f"{len(seconds)} runs; promised {PROMISED[way]:g} s"
        if way is Way.ALERTMANAGER:
            note += f": scrape {SCRAPE_SECONDS:g} + evaluation {SCRAPE_SECONDS:g} + gathering {GROUP_WAIT_SECONDS:g}"
        rows += [Row(f"{way}, median", statistics.median(seconds), "s", note), Row(f"{way}, worst", max(seconds), "s")]
    return rows


def measured(running: Alerting) -> dict[Way, list[float]]:
    """Return how long each way took, run by run."""
    delays: dict[Way, list[float]] = {way: [] for way in PROMISED}
    names = [f"run-{number}" for number in range(RUNS)]
    ranks = running.start_ranks(*names)
    running.wait_for(lambda: all(step > 5 for step in live_runs(running.urls["service"]).values()))
    for number, name in enumerate(names):
        time.sleep(0.37 * (number % 3))  # at every moment between two scrapes
        ranks.order(name, "nan")
        running.wait_for(lambda name=name: ranks.bad[name])
        ((_, at),) = ranks.bad[name]
        for way, seconds in delays.items():
            seconds.append(running.wait_for(lambda way=way, name=name: running.told(way, name))[0].at - at)
    return delays


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
