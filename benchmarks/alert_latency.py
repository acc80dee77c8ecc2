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

from rankscope.demo.receiver import Sender
from rankscope.up.machine import ALERTMANAGER, PROMETHEUS, find_required

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "end_to_end"))
from alerting import GROUP_WAIT_SECONDS, Alerting, alerting, live_runs

RUNS = 8
SCRAPE_SECONDS = 1.0
PROMISED = {Sender.EMBEDDED: 2.0, Sender.ALERTMANAGER: 2 * SCRAPE_SECONDS + GROUP_WAIT_SECONDS}


def run() -> list[Row]:
    found = find_required(dict.fromkeys((PROMETHEUS, ALERTMANAGER), "another benchmark"))
    programs = [str(found[program]) for program in (PROMETHEUS, ALERTMANAGER)]
    with (
        tempfile.TemporaryDirectory() as folder,
        alerting(Path(folder), *programs, scrape_seconds=SCRAPE_SECONDS) as running,
    ):
        delays = measured(running)
    rows = []
    for sender, seconds in delays.items():
        note = f"{len(seconds)} runs; promised {PROMISED[sender]:g} s"
        if sender is Sender.ALERTMANAGER:
            note += f": scrape {SCRAPE_SECONDS:g} + evaluation {SCRAPE_SECONDS:g} + gathering {GROUP_WAIT_SECONDS:g}"
        rows += [
            Row(f"{sender}, median", statistics.median(seconds), "s", note),
            Row(f"{sender}, worst", max(seconds), "s"),
        ]
    return rows


def measured(running: Alerting) -> dict[Sender, list[float]]:
    """Return how long each way took, run by run."""
    delays: dict[Sender, list[float]] = {sender: [] for sender in PROMISED}
    names = [f"run-{number}" for number in range(RUNS)]
    ranks = running.start_ranks(*names)
    running.wait_for(lambda: all(step > 5 for step in live_runs(running.urls["service"]).values()))
    for number, name in enumerate(names):
        time.sleep(0.37 * (number % 3))  # at every moment between two scrapes
        ranks.send(name, "nan")
        running.wait_for(lambda name=name: ranks.bad[name])
        ((_, at),) = ranks.bad[name]
        for sender, seconds in delays.items():
            received = running.wait_for(lambda sender=sender, name=name: running.notifications(sender, name))
            seconds.append(received[0].at - at)
    return delays


if __name__ == "__main__":
    print_rows((__doc__ or "").splitlines()[0], run())
