"""Run Prometheus and Alertmanager for the demo service, as a second sender of alerts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rankscope.up.executables import ALERTMANAGER, PROMETHEUS
from rankscope.up.ports import free_port
from rankscope.up.programs import SERVICE, ServiceOptions, UpOptions, files, programs
from rankscope.up.state_dir import StateDir
from rankscope.up.supervisor import StopSignals, Supervisor
from rankscope_dashboards.deploy.alertmanager import Receiver, Webhook

SCRAPE_SECONDS: Final = 1.0
GROUP_WAIT_SECONDS: Final = 2.0  # ranks are scraped at different times; one message should name all of them


def missing_executables() -> list[str]:
    """Return a list with one line per missing executable: the command that installs it."""
    return [executable.remedy for executable in (PROMETHEUS, ALERTMANAGER) if executable.find() is None]


@contextlib.contextmanager
def run_prometheus(folder: Path, store: Path, service_url: str, webhook_url: str) -> Iterator[dict[str, str]]:
    """Run Prometheus and Alertmanager for the service at `service_url`; yield their URLs by name.

    Alertmanager sends the alerts to `webhook_url`.
    """
    state = StateDir(folder)
    state.create()
    options = _options(store, service_url, webhook_url)
    state.write(files(options, state))
    monitoring = [program for program in programs(options, state) if program.name != SERVICE]
    supervisor = Supervisor(monitoring, print_line=lambda _: None, stop_signals=StopSignals())
    try:
        supervisor.start()
        yield {program.name: program.url for program in monitoring}
    finally:
        supervisor.stop()


def _options(store: Path, service_url: str, webhook_url: str) -> UpOptions:
    address = urlsplit(service_url)
    ports = {SERVICE: address.port or 0, "prometheus": free_port(), "alertmanager": free_port()}
    return UpOptions(
        service=ServiceOptions(config=None, store=str(store), host=address.hostname or ""),
        ports=ports,
        prometheus=PROMETHEUS.find(),
        alertmanager=ALERTMANAGER.find(),
        receivers=[Receiver(name="demo", integrations=(Webhook(url=webhook_url),))],
        scrape_seconds=SCRAPE_SECONDS,
        group_wait_seconds=GROUP_WAIT_SECONDS,
        group_interval_seconds=5.0,
    )
