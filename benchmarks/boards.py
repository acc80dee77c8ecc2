"""Boards on a real Grafana in Chromium: seconds until all panels have their data, with 1,000 tensors on two ranks.

RANKSCOPE_GRAFANA_URL and RANKSCOPE_GRAFANA_TOKEN_FILE name a server for this benchmark alone: all objects of Rankscope
are deleted from it. The ranks make a step per second for RANKSCOPE_BENCH_SECONDS (300) before the boards are opened.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

sys.path.append(str(Path(__file__).parents[1]))

from _rows import Row
from tests.dashboards.grafana.conftest import complete, real_server
from tests.dashboards.grafana.drawn_page import LOADED, Requests
from tests.dashboards.grafana.watched import Watched, watched
from tests.programs import Started, start_script

from rankscope.up.machine import free_port
from rankscope_dashboards.deploy.prometheus import LIVE_SOURCE

RUN, RANKS, ROUNDS = "wide", 2, 3
SCRAPE_SECONDS = 5.0  # the default of `rankscope up`
RANGES = {"15 min": 900, "6 h": 21_600, "24 h": 86_400}
TRAINING = """
import time, torch
import torch.distributed as dist
from torch import nn
import rankscope

dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(500))))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
with rankscope.Monitor({"console": False}).attach(net, optimizer) as monitor:
    while True:
        loss = net(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, tokens=128)
        time.sleep(1.0)
"""


def run() -> list[Row]:
    """Return the rows of this benchmark; none without a Grafana server."""
    if "RANKSCOPE_GRAFANA_URL" not in os.environ:
        return []
    servers = [shutil.which(name) or name for name in ("prometheus", "prometheus-alertmanager")]
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), list[Started]()
        script = folder / "training.py"
        script.write_text(TRAINING, encoding="utf-8")
        how: dict[str, Any] = {"add_route": False, "scrape_seconds": SCRAPE_SECONDS}
        with watched(real_server(folder, complete()), folder, servers, **how) as programs:
            group = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            group |= {"RANKSCOPE_RUN": RUN, "RANKSCOPE_INGEST_URL": programs.programs.urls["service"]}
            try:
                ranks += [
                    start_script(script, log=folder / rank, RANK=rank, LOCAL_RANK=rank, **group)
                    for rank in map(str, range(RANKS))
                ]
                time.sleep(float(os.environ.get("RANKSCOPE_BENCH_SECONDS", "300")))
                with closing(Requests(shutil.which("chromium") or "chromium", folder / "chromium")) as chromium:
                    return list(_rows(programs, chromium))
            finally:
                for process in ranks:
                    process.kill()
                    process.wait(10)


def _rows(programs: Watched, chromium: Requests) -> Iterator[Row]:
    chromium.log_in(programs.grafana.credentials)
    chromium.look(1440, 4200, "light")
    for board in complete().boards:
        for text, seconds in RANGES.items():
            took = []
            for _ in range(ROUNDS):
                end = int(time.time())
                view = {"var-datasource": LIVE_SOURCE, "var-run": RUN, "refresh": "", "orgId": 1}
                view |= {"from": str((end - seconds) * 1000), "to": str(end * 1000)}
                chromium.forget()
                chromium.open(f"{programs.grafana.url}/d/{board['uid']}?{urlencode(view)}&kiosk")
                chromium.wait(LOADED, 120)
                chromium.drain(0.5)
                chromium.wait(LOADED, 120)
                took.append(chromium.seconds()[0])
            chromium.run("document.body.remove()")
            time.sleep(1.0)
            prometheus = programs.programs.urls["prometheus"]
            alone = [statistics.median(query.ask(prometheus)[0] for _ in range(ROUNDS)) for query in chromium.queries()]
            note = f"{len(alone)} queries; the slowest alone {max(alone):.2f} s"
            yield Row(f"{board['title']}, {text}", statistics.median(took), "s", note)


if __name__ == "__main__":
    print(*run(), sep="\n")
