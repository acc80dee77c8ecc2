"""Deliver messages with the library apprise: mail, chat, webhooks and about a hundred services.

Examples of URLs are `json://…`, `mailto://…` and `slack://…`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

import apprise

from rankscope_contract.model.events import Severity
from rankscope_ingest.notify.notifiers import Message, NotifyError

_TYPES: Final = {
    Severity.CRITICAL: apprise.NotifyType.FAILURE,
    Severity.WARNING: apprise.NotifyType.WARNING,
}


class AppriseNotifier:
    """Delivers messages to one URL that apprise supports."""

    priority: ClassVar[int] = 100  # last, because it handles nearly all URLs

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        # Bodies contain names of tensors and runs, which must not be interpreted as escapes or emojis.
        asset = apprise.AppriseAsset(interpret_escapes=False, interpret_emojis=False)
        self._apprise = apprise.Apprise(asset=asset)
        self._apprise.add(url)

    @classmethod
    def handles(cls, url: str) -> bool:
        """Return whether apprise supports `url`."""
        return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None

    @property
    def label(self) -> str:
        """Return the URL with secrets masked, for log messages."""
        return str(self._apprise.urls(privacy=True))

    async def send(self, message: Message) -> None:
        """Deliver `message` in a thread, because apprise blocks during network I/O.

        Raises NotifyError if the delivery fails.
        """
        notice_type = _TYPES.get(Severity(message.severity), apprise.NotifyType.INFO)
        delivery = asyncio.to_thread(
            self._apprise.notify,
            body=message.body,
            title=message.title,
            notify_type=notice_type,
            body_format=apprise.NotifyFormat.TEXT,
        )
        try:
            async with asyncio.timeout(self._timeout_seconds):
                delivered = await delivery
        except TimeoutError as error:
            raise NotifyError(f"{self.label} timed out after {self._timeout_seconds:g} s") from error
        if not delivered:
            raise NotifyError(f"{self.label} did not accept the message: see the log messages of apprise")


NOTIFIER = AppriseNotifier
