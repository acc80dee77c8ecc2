"""Intercepted functions of `torch.distributed`, and asynchronous calls that have not been waited for.

One object replaces a function however many listeners there are, and it is the same one when listening begins again, for
code that has imported it by name meanwhile. A replacement that other code puts on top stays: the calls then pass
through ours without effect. The result of an asynchronous call is kept until it is waited for or freed.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from rankscope_exporter.base.tracing import is_dynamo_compiling


class CollectiveCall:
    """One call under way. `site` and `rows` are the listener's own notes."""

    __slots__ = ("args", "caller", "kwargs", "note", "op")

    def __init__(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType) -> None:
        self.op, self.args, self.kwargs, self.caller = op, args, kwargs, caller
        self.note: Any = None


class Listener(Protocol):
    """Who listens. What it is told must not raise."""

    @property
    def is_open(self) -> bool:
        """Whether calls matter now; asked at every call."""
        ...

    def begins(self, call: CollectiveCall) -> None:
        """A function was called."""
        ...

    def ended(self, call: CollectiveCall, result: Any) -> None:
        """It has returned."""
        ...

    def waited(self, work: Any) -> None:
        """Somebody has waited for `work`."""
        ...


WAIT: Final = "wait"


class _Interception:
    """Stands in the place of `owner.name` and passes everything through."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        self.owner, self.name, self.original = owner, name, original
        self.listeners: tuple[Listener, ...] = ()

    @property
    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self

    def join(self, listener: Listener) -> None:
        self.listeners = (*self.listeners, listener)
        if not self.is_in_place:
            setattr(self.owner, self.name, self)

    def leave(self, listener: Listener) -> None:
        self.listeners = tuple(other for other in self.listeners if other is not listener)
        if not self.listeners and self.is_in_place:
            setattr(self.owner, self.name, self.original)


class _FunctionInterception(_Interception):
    """A function of torch.distributed. To all who compare, copy or pickle it, it is the original."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        super().__init__(owner, name, original)
        # Without its attributes: a wrapper of somebody else may have copied those of an earlier tap of ours.
        functools.update_wrapper(self, original, updated=())
        self._sends = name == "isend"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.original(*args, **kwargs)
        if self._sends and "group_src" in kwargs:
            # A batch takes a P2POp for a receiving one when its function is not, by identity, the original isend.
            kwargs["group_dst"] = kwargs.pop("group_src")
        for listener in self.listeners:
            if listener.is_open:
                return self._heard(args, kwargs, sys._getframe(1))  # noqa: SLF001 - the only cheap way to the caller
        return self.original(*args, **kwargs)

    def _heard(self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        calls = [
            (listener, CollectiveCall(self.name, args, kwargs, caller))
            for listener in self.listeners
            if listener.is_open
        ]
        for listener, call in calls:
            listener.begins(call)
        result = self.original(*args, **kwargs)
        for listener, call in calls:
            listener.ended(call, result)
        return result

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self.original,), 0)


class _WaitInterception(_Interception):
    """The method `wait` of all works."""

    def __get__(self, work: Any, owner: type | None = None) -> Any:
        return self if work is None else MethodType(self, work)

    def __call__(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.original(work, *args, **kwargs)
        for listener in self.listeners:
            if listener.is_open:
                listener.waited(work)
        return result


class Interceptor:
    """Listens until `remove`."""

    def __init__(self, listener: Listener, names: Iterable[str]) -> None:
        self._listener = listener
        with _lock:
            taps = [_interception_of(dist, name, _FunctionInterception) for name in names]
            taps.append(_interception_of(getattr(dist, "Work", None), WAIT, _WaitInterception))
            self._taps = [tap for tap in taps if tap is not None]
            for tap in self._taps:
                tap.join(listener)

    def remove(self) -> None:
        """Listen no more."""
        with _lock:
            for tap in self._taps:
                tap.leave(self._listener)
        self._taps = []


_lock = threading.Lock()
_known: dict[str, _Interception] = {}


def _interception_of(owner: Any, name: str, make: type[_Interception]) -> _Interception | None:
    """Return what stands, or is to stand, in the place of `owner.name`; None where there is no such thing."""
    current = None if owner is None else vars(owner).get(name)
    if current is None:  # of another release of torch, or a torch without collectives
        return None
    known = _known.get(name)
    if known is None or not (current is known or current is known.original):
        known = _known[name] = make(owner, name, current)
    return known


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the call `name` gives back, with its row and its position in the list, if it is one."""

    name: str
    row: range
    tensor: torch.Tensor
    index: int | None


@dataclass(slots=True)
class _Awaited:
    """Outputs that are there once so many works have been waited for."""

    name: str
    outputs: Sequence[Output]
    works: int


class PendingWork:
    """The works of one step."""

    def __init__(self) -> None:
        self._awaited: dict[int, tuple[weakref.ref[Any], _Awaited]] = {}  # by the identity of the work
        self._lost: list[str] = []

    def expect(self, name: str, works: Sequence[Any], outputs: Sequence[Output], tensors: int) -> None:
        """Keep the `outputs` of a call of so many tensors, until all of its `works` have been waited for.

        A batch has a work for each tensor, sent or received, or one for all.
        """
        if len(works) == tensors > 1:
            for output in outputs:
                self._await(works[output.index or 0], _Awaited(name, (output,), 1))
        else:
            together = _Awaited(name, outputs, len(works))
            for work in works:
                self._await(work, together)

    def waited(self, work: Any) -> Sequence[Output]:
        """Return the outputs that are there now that somebody has waited for `work`."""
        work_and_awaited = self._awaited.get(id(work))
        if work_and_awaited is None or work_and_awaited[0]() is not work:
            return ()
        del self._awaited[id(work)]
        awaited = work_and_awaited[1]
        awaited.works -= 1
        return () if awaited.works else awaited.outputs

    def let_go(self) -> None:
        """Keep no tensor any more, only the names of the calls that were not waited for."""
        self._lost += [awaited.name for _, awaited in self._awaited.values()]
        self._awaited.clear()

    def missed(self) -> list[str]:
        """Return the names of the calls that nobody has waited for."""
        return [*self._lost, *(awaited.name for _, awaited in [*self._awaited.values()])]

    def _await(self, work: Any, awaited: _Awaited) -> None:
        key = id(work)

        def gone(_work: Any) -> None:  # whenever the collector likes, on any thread
            if self._awaited.pop(key, None) is not None:
                self._lost.append(awaited.name)

        self._awaited[key] = weakref.ref(work, gone), awaited


def stream_of(device: torch.device) -> int | None:
    """Return which stream of an accelerator is the current one on this thread; None where there are none."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return int(torch.accelerator.current_stream(device).stream_id)
    except RuntimeError:  # a device without streams
        return None


def pending_work_of(result: Any) -> list[Any]:
    """Return the works among what a call returned."""
    found = result if isinstance(result, list) else [result]
    return [item for item in found if isinstance(item, dist.Work)]
