"""The object that is freed when the script has dropped both the monitor and its model."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from rankscope_exporter.reactions.anomaly_callback import OnAnomaly


class Owner:
    """An object that only a monitor and the hooks of its model hold.

    It also holds `on_anomaly`, because this function may refer to the model. The threads of the monitor must not keep
    the model alive.
    """

    def __init__(self, on_anomaly: OnAnomaly | None) -> None:
        self.on_anomaly = on_anomaly
        self.callback = Callback(self)
        self.dropped: Callable[[OnAnomaly | None], None] | None = None
        """Function that is called with `on_anomaly` at the end of this object, on whatever thread frees it."""

    def __del__(self) -> None:
        # A weak reference with a callback is not sufficient: the last anomalies of the run still need `on_anomaly`.
        if self.dropped is not None:
            self.dropped(self.on_anomaly)


class Callback:
    """A function that returns `on_anomaly` of an owner without keeping the owner alive."""

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self.last: OnAnomaly | None = None
        """The function `on_anomaly` of an owner that was freed, while the last records of the run are published."""

    def __call__(self) -> OnAnomaly | None:
        """Return `on_anomaly`; None without one."""
        owner = self._owner()
        return self.last if owner is None else owner.on_anomaly
