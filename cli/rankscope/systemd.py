"""Telling systemd how the service is (`sd_notify`): one datagram to the socket it names. Without systemd, nothing."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
"""To be repeated: where the unit has a watchdog, silence means that the service hangs."""


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send `state`; a systemd that cannot be told is no reason to stop serving."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.connect("\0" + address[1:] if address.startswith("@") else address)
            told.send(state.encode("utf-8", "replace"))
    except OSError as error:
        log.warning("systemd cannot be told %s: %s", state.partition("=")[0], error)
