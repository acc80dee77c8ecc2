"""Notifiers: each file here that defines `NOTIFIER` is one kind of delivery.

A file's `NOTIFIER` is a class that follows the protocol in `base`; the first one that handles a URL gets it, the most
particular ones (lowest `priority`) first.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from rankscope_ingest.base.errors import ConfigError
from rankscope_ingest.notify.notifiers.base import Message, Notifier, NotifyError

__all__ = ["Message", "Notifier", "NotifyError", "make_notifiers", "notifier_classes"]


def notifier_classes() -> list[type[Notifier]]:
    """Return the notifier of every module in this package, in order of priority."""
    found: list[type[Notifier]] = []
    for module in pkgutil.iter_modules(__path__):
        notifier = getattr(importlib.import_module(f"{__name__}.{module.name}"), "NOTIFIER", None)
        if notifier is not None:
            found.append(notifier)
    return sorted(found, key=lambda cls: cls.priority)


def make_notifiers(urls: Iterable[str], *, timeout_seconds: float) -> list[Notifier]:
    """Return one notifier per URL. Raises ConfigError for one that none understands, without repeating its secrets."""
    listed = list(urls)
    classes = notifier_classes() if listed else []  # apprise alone takes half a second to load
    notifiers = []
    for number, url in enumerate(listed):
        for notifier_class in classes:
            if notifier_class.handles(url):
                notifiers.append(notifier_class(url, timeout_seconds=timeout_seconds))
                break
        else:
            scheme = url.partition("://")[0]
            raise ConfigError(f"notify.urls[{number}] ({scheme}://…) is no address that a notifier understands")
    return notifiers
