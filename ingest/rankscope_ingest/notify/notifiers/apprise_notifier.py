"""Everything apprise speaks: mail, chat, webhooks (`json://`, `mailto://`, `slack://`, … some hundred services)."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

import apprise

from rankscope_contract.model.events import Severity
from rankscope_ingest.notify.notifiers.base import Message, NotifyError

_TYPES: Final = {
    Severity.CRITICAL: apprise.NotifyType.FAILURE,
    Severity.WARNING: apprise.NotifyType.WARNING,
}


class AppriseNotifier:
    """One apprise URL."""

    priority: ClassVar[int] = 100  # it handles nearly everything, so it is asked last

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        # Bodies hold names of tensors and runs: no markup or escapes of theirs may be read as ours.
        asset = apprise.AppriseAsset(interpret_escapes=False, interpret_emojis=False)
        self._apprise = apprise.Apprise(asset=asset)
        self._apprise.add(url)

    @classmethod
    def handles(cls, url: str) -> bool:
        """Return whether apprise can make sense of `url`."""
        return apprise.Apprise.instantiate(url, suppress_exceptions=True) is not None

    @property
    def label(self) -> str:
        """Return the URL as apprise shows it, secrets hidden."""
        return str(self._apprise.urls(privacy=True))

    async def send(self, message: Message) -> None:
        """Deliver through apprise, in a thread of its own: it blocks on the network."""
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
            raise NotifyError(f"{self.label} did not take the message within {self._timeout_seconds:g} s") from error
        if not delivered:
            raise NotifyError(f"{self.label} did not take the message; apprise's own log says why")


NOTIFIER = AppriseNotifier
