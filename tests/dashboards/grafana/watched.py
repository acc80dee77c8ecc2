"""A complete deployment on a real Grafana server: service, Prometheus, ranks, our boards and rules, and a receiver."""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode

import psutil
from tests.dashboards.grafana.conftest import Grafana, same_policies, save_policies
from tests.end_to_end.alerting import SCRAPE_SECONDS, Alerting, Ranks, alerting, live_runs

from rankscope_dashboards.deploy.prometheus import HISTORY_SOURCE, LIVE_SOURCE
from rankscope_dashboards.grafana.contact_points import read_contact_points

RECEIVER: Final = "rankscope-test"
ARGUMENTS: Final = {"service": "rankscope serve", "prometheus": "--storage.tsdb.path"}
"""Part of the command line of each program that can be suspended."""

POINTS: Final = """\
apiVersion: 1
contactPoints:
- name: {name}
  receivers:
  - type: webhook
    settings:
      url: $HOOK_URL
"""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of Grafana to a webhook. `at` is in seconds since the epoch."""

    at: float
    document: dict[str, Any]

    def alerts(self, status: str = "firing") -> Iterator[dict[str, Any]]:
        yield from (alert for alert in self.document["alerts"] if alert["status"] == status)


class Hook:
    """A webhook that keeps all messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.messages.append(Message(time.time(), json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's signature
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def about(self, run: str) -> list[Message]:
        every = [(message, message.document["alerts"]) for message in list(self.messages)]
        return [message for message, alerts in every if any(one["labels"].get("run") == run for one in alerts)]

    def alerts(self, name: str, status: str = "firing", **labels: str) -> list[tuple[float, dict[str, Any]]]:
        """Return the alerts of all messages that have this name and these labels, with the times of the messages."""
        wanted = labels | {"alertname": name}
        return [
            (message.at, alert)
            for message in list(self.messages)
            for alert in message.alerts(status)
            if wanted.items() <= alert["labels"].items()
        ]


@dataclass
class Watched:
    """All programs with a deployment that notifies `hook`."""

    grafana: Grafana
    programs: Alerting
    hook: Hook
    ranks: dict[str, Ranks] = field(default_factory=dict)

    def start(self, *runs: str) -> None:
        ranks = self.programs.start_ranks(*runs)
        self.ranks |= dict.fromkeys(runs, ranks)
        self.wait_for(lambda: all(live_runs(self.programs.urls["service"]).get(run, 0) > 5 for run in runs))
        self.wait_for(lambda: {series["metric"]["run"] for series in self.query("rankscope_step")} >= set(runs))

    def send(self, run: str, command: str) -> None:
        self.ranks[run].send(run, command)

    def seconds_until_message(self, run: str, command: str, alert: str) -> float:
        """Send a command, and return the time from the faulty step to the first message about the run."""
        earlier = len(self.ranks[run].bad[run])
        self.send(run, command)
        ((at, _), *_) = self.wait_for(lambda: self.hook.alerts(alert, run=run))
        _, bad = self.ranks[run].bad[run][earlier]
        print(f"{alert} in run {run}: message after {at - bad:.1f} s")
        return at - bad

    def query(self, expression: str) -> list[dict[str, Any]]:
        query = urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.programs.urls['prometheus']}/api/v1/query?{query}", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def wait_for_result(self, expression: str) -> None:
        self.wait_for(lambda: self.query(expression))

    def wait_for(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Return the value of `condition` as soon as it is true."""
        until = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < until, [message.document["title"] for message in self.hook.messages]
            time.sleep(0.1)
        return value

    @contextmanager
    def away(self, program: str) -> Iterator[float]:
        """Suspend a program in the context, and yield the time since when it has not responded."""
        children = psutil.Process().children(recursive=True)
        (process,) = (one for one in children if ARGUMENTS[program] in " ".join(one.cmdline()))
        process.send_signal(signal.SIGSTOP)
        try:
            yield time.time()
        finally:
            process.send_signal(signal.SIGCONT)


@contextmanager
def watched(
    grafana: Grafana,
    folder: Path,
    servers: Sequence[str],
    *,
    add_route: bool = True,
    stalled_after_seconds: float = 300.0,
    scrape_seconds: float = SCRAPE_SECONDS,
) -> Iterator[Watched]:
    """Run all programs in the context. `servers` are the paths of Prometheus and Alertmanager."""
    # Our rules have a separate route, or the default policy notifies the receiver.
    points = folder / "points.yaml"
    points.write_text(POINTS.format(name=RECEIVER), encoding="utf-8")
    times = {"stalled_after_seconds": stalled_after_seconds, "scrape_seconds": scrape_seconds}
    with alerting(folder, *servers, **times) as programs, Hook() as hook:
        grafana.undeploy(force=True)
        grafana.deploy(
            urls=dict.fromkeys((LIVE_SOURCE, HISTORY_SOURCE), programs.urls["prometheus"]),
            contact_points=read_contact_points(points, {"HOOK_URL": hook.url}),
            receiver=RECEIVER if add_route else None,
            add_route=add_route,
        )
        try:
            with same_policies(grafana.user):
                if not add_route:
                    policy = {"receiver": RECEIVER, "group_by": ["grafana_folder", "alertname"]}
                    save_policies(grafana.user, policy)
                yield Watched(grafana, programs, hook)
        finally:
            grafana.undeploy(force=True)
