"""Open the rank's server where its settings allow: the first free port of a range, with TLS where it is asked for."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from rankscope_exporter.errors import ServeError
from rankscope_exporter.serving.addresses import Address
from rankscope_exporter.serving.config import ServeConfig
from rankscope_exporter.serving.http_server import Application, HttpServer
from rankscope_exporter.serving.meter import CpuMeter
from rankscope_exporter.serving.tls import server_tls


def open_server(
    config: ServeConfig,
    application: Application,
    *,
    on_fault: Callable[[str, BaseException], None],
    meter: CpuMeter,
) -> HttpServer:
    """Return a server that listens but does not serve yet. Raises ServeError naming the setting to change."""
    tls = None if config.web_config is None else server_tls(Path(config.web_config))
    return first_free(
        config.address, lambda address: HttpServer(address, application, on_fault=on_fault, meter=meter, tls=tls)
    )


def first_free(addresses: Address, listen: Callable[[Address], HttpServer]) -> HttpServer:
    """Return what `listen` makes of the first port that nobody has; ranks and jobs of a node share a range this way."""
    for address in addresses.each():
        try:
            return listen(address)
        except ServeError as error:
            if addresses.last_port is None or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise ServeError(
        f"cannot listen on {addresses}: all {len(addresses.ports)} ports are in use; give a longer range in"
        " RANKSCOPE_LISTEN, or port 0 for any free port"
    )
