"""Shared parts of the alert tests: service, Prometheus and Alertmanager of `rankscope up`, and the receivers."""

import email
import email.message
import email.policy
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller

from rankscope.demo.receiver import Alert, AlertReceiver, Sender
from rankscope.up.machine import StateDir, free_port
from rankscope.up.plan import ServiceOptions, UpOptions, files, programs, receivers
from rankscope.up.supervisor import StopSignals, Supervisor

SCRAPE_SECONDS = 1.0
GROUP_WAIT_SECONDS = 1.0
EVENT_SECONDS = 5.0

CONFIG = """
[store]
path = "history"
[ingest]
poll_seconds = 2.0
flush_after_seconds = 1.0
[runs]
heartbeat_seconds = 1.0
refused_after_seconds = 3.0
failed_after_seconds = 8.0
stalled_after_seconds = {stalled}
[notify]
urls = ["{url}"]
"""


class Postbox:
    """A mailbox: an SMTP server that keeps the received messages."""

    def __init__(self) -> None:
        self.mails: list[email.message.EmailMessage] = []

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802 - aiosmtpd's name
        self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 taken"

    def subjects(self) -> list[str]:
        return [str(mail["Subject"]) for mail in self.mails]


@dataclass
class Ranks:
    """A `faulty_rank.py` process, and the faults and exits that it reported for each run."""

    process: subprocess.Popen[str]
    bad: dict[str, list[tuple[int, float]]]
    exits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, run: str, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{run} {command}\n")
        self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, run, *numbers = line.split()
            if word == "bad":
                self.bad[run].append((int(numbers[0]), float(numbers[1])))
            else:
                self.exits[run] = int(numbers[0])


@dataclass
class Alerting:
    """All running programs, with functions to cause faults and to read the received notifications."""

    folder: Path
    urls: dict[str, str]
    receiver: AlertReceiver
    postbox: Postbox
    start_ranks: Callable[..., Ranks]

    def notifications(self, sender: Sender, run: str, status: str = "firing", rule: str = "AnomalyNan") -> list[Alert]:
        """Return the notifications about a run from one sender, in order of arrival."""
        return [
            alert
            for alert in list(self.receiver.alerts)
            if alert.sender is sender and self._is_of(alert, run, status, rule)
        ]

    def _is_of(self, alert: Alert, run: str, status: str, rule: str) -> bool:
        if alert.sender is Sender.EMBEDDED:
            return f"run: {run} (attempt 0)" in alert.text.splitlines() and rule in alert.title
        return f"[{status}] {rule} in run {run}:" in alert.title

    def wait_for(self, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.02)
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.rglob("*.log"))
        raise AssertionError(f"not within {seconds} s; arrived: {self.receiver.alerts}\n{logs}")


@contextmanager
def alerting(
    folder: Path,
    prometheus: str,
    alertmanager: str,
    *,
    scrape_seconds: float = SCRAPE_SECONDS,
    stalled_after_seconds: float = 300.0,
) -> Iterator[Alerting]:
    """Run the three programs in `folder`. One receiver gets all notifications, a mailbox those of Alertmanager."""
    postbox = Postbox()
    mail = Controller(postbox, hostname="127.0.0.1", port=free_port())
    with ExitStack() as stack:
        receiver = stack.enter_context(AlertReceiver())
        mail.start()
        stack.callback(mail.stop)
        config = folder / "service.toml"
        config.write_text(CONFIG.format(url=receiver.notify_url, stalled=stalled_after_seconds))
        smtp = f"smtp://127.0.0.1:{mail.port}?to=oncall@example.invalid&tls=no"
        options = UpOptions(
            service=ServiceOptions(config=config, store=str(folder / "history"), host="127.0.0.1"),
            ports={name: free_port() for name in ("service", "prometheus", "alertmanager")},
            prometheus=Path(prometheus),
            alertmanager=Path(alertmanager),
            receivers=receivers([receiver.webhook_url, smtp])[0],
            scrape_seconds=scrape_seconds,
            group_wait_seconds=GROUP_WAIT_SECONDS,
            group_interval_seconds=1.0,
            event_window=f"{EVENT_SECONDS:g}s",
            keep_firing_for="2s",
        )
        state = StateDir(folder / "live")
        state.create()
        state.write(files(options, state))
        supervisor = Supervisor(programs(options, state), state, print_line=print, stop_signals=StopSignals())
        stack.callback(supervisor.stop)
        supervisor.start()
        urls = {program.name: program.url for program in programs(options, state)}
        yield Alerting(folder, urls, receiver, postbox, _ranks(stack, folder, urls["service"]))


def _ranks(stack: ExitStack, folder: Path, service_url: str) -> Callable[..., Ranks]:
    def start(*runs: str) -> Ranks:
        environment = {"RANKSCOPE_INGEST_URL": service_url, "OMP_NUM_THREADS": "1"}
        log = stack.enter_context((folder / "ranks.log").open("wb"))
        command = [sys.executable, str(Path(__file__).with_name("faulty_rank.py")), *runs]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(
            command, **pipes, text=True, env={**os.environ, **environment}, start_new_session=True
        )
        stack.callback(_end, process)
        return Ranks(process, {run: [] for run in runs})

    return start


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def live_runs(service_url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{service_url}/api/v1/runs", timeout=30) as answer:
        return {run["run"]: run["step"] or 0 for run in json.load(answer)}
