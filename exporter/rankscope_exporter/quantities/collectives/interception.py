"""Interception of functions of `torch.distributed`, and of asynchronous calls until the script has waited for them.

A function is replaced by one object, which calls any number of listeners. If interception ends and starts again, the
same object is used, because other code may have imported it by name in between. If other code replaces this object by a
wrapper, the wrapper remains in place when interception ends. Calls of the wrapper then still reach the object, which
passes them on to the original function.

The outputs of an asynchronous call are kept until the script has waited for its work object or freed it.
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
from typing import Any, Final

import torch
import torch.distributed as dist

from rankscope_exporter.base.tracing import is_dynamo_compiling
from rankscope_exporter.quantities.base import SamplingGate


class CollectiveCall:
    """One call of an intercepted function while it runs.

    A receiver of the call may store any object in the attribute `note`.
    """

    __slots__ = ("args", "caller", "kwargs", "note", "op")

    def __init__(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], caller: FrameType) -> None:
        self.op, self.args, self.kwargs, self.caller = op, args, kwargs, caller
        self.note: Any = None


@dataclass(frozen=True, slots=True)
class Listener:
    """The receiver of intercepted calls. Its functions must not raise errors."""

    gate: SamplingGate
    """The receiver gets calls only while this gate is open (at sampled steps). The gate is read at every call."""
    begins: Callable[[CollectiveCall], None]
    """Function that is called before the intercepted function runs."""
    ended: Callable[[CollectiveCall, Any], None]
    """Function that is called with the result after the intercepted function has returned."""
    waited: Callable[[Any], None]
    """Function that is called with a work object after the script has waited for this work."""


WAIT: Final = "wait"


class _Interception:
    """The object that replaces the attribute `name` of `owner`; a call of it calls the original function."""

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
    """The object that replaces a function of torch.distributed.

    In comparisons, copies and pickles, it behaves like the original function.
    """

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        super().__init__(owner, name, original)
        # Without its attributes: a wrapper of other code may have copied those of an earlier replacement.
        functools.update_wrapper(self, original, updated=())
        self._sends = name == "isend"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.original(*args, **kwargs)
        if self._sends and "group_src" in kwargs:
            # A batch treats a P2POp as a receive unless its function is, by identity, the original isend.
            kwargs["group_dst"] = kwargs.pop("group_src")
        for listener in self.listeners:
            if listener.gate.is_open:
                return self._report(args, kwargs, sys._getframe(1))  # noqa: SLF001 - the only cheap way to the caller
        return self.original(*args, **kwargs)

    def _report(self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        calls = [
            (listener, CollectiveCall(self.name, args, kwargs, caller))
            for listener in self.listeners
            if listener.gate.is_open
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
    """The object that replaces the method `wait` of torch.distributed's class `Work`."""

    def __get__(self, work: Any, owner: type | None = None) -> Any:
        return self if work is None else MethodType(self, work)

    def __call__(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.original(work, *args, **kwargs)
        for listener in self.listeners:
            if listener.gate.is_open:
                listener.waited(work)
        return result


class Interceptor:
    """Intercepts several functions of torch.distributed for one listener, until `remove` is called."""

    def __init__(self, listener: Listener, names: Iterable[str]) -> None:
        self._listener = listener
        with _lock:
            found = [_interception_of(dist, name, _FunctionInterception) for name in names]
            found.append(_interception_of(getattr(dist, "Work", None), WAIT, _WaitInterception))
            self._interceptions = [item for item in found if item is not None]
            for item in self._interceptions:
                item.join(listener)

    def remove(self) -> None:
        """Stop the interception for the listener of this object."""
        with _lock:
            for item in self._interceptions:
                item.leave(self._listener)
        self._interceptions = []


_lock = threading.Lock()
_known: dict[str, _Interception] = {}


def _interception_of(owner: Any, name: str, make: type[_Interception]) -> _Interception | None:
    """Return the object that replaces `owner.name`; create it if there is none yet.

    Return None if `owner` has no such attribute.
    """
    current = None if owner is None else vars(owner).get(name)
    if current is None:  # another release of torch, or a torch without collectives
        return None
    known = _known.get(name)
    if known is None or not (current is known or current is known.original):
        known = _known[name] = make(owner, name, current)
    return known


@dataclass(frozen=True, slots=True)
class Output:
    """An output tensor of the call `name`, with the row of this tensor in the table of statistics.

    `index` is the position of the tensor if the output is a list, otherwise None.
    """

    name: str
    row: range
    tensor: torch.Tensor
    index: int | None


@dataclass(slots=True)
class _Awaited:
    """Outputs of an asynchronous call that belong to the same work objects.

    The outputs are complete when the script has waited for all these work objects. `works` is the number of these work
    objects that the script has not waited for yet.
    """

    name: str
    outputs: Sequence[Output]
    works: int


class PendingWork:
    """The asynchronous calls of one step that the script has not waited for yet."""

    def __init__(self) -> None:
        self._awaited: dict[int, tuple[weakref.ref[Any], _Awaited]] = {}  # by the identity of the work
        self._lost: list[str] = []

    def expect(self, name: str, works: Sequence[Any], outputs: Sequence[Output], tensors: int) -> None:
        """Keep the `outputs` of an asynchronous call until the script has waited for all of its `works`.

        `tensors` is the number of tensors that the call sends and receives. A batch of calls has one work object per
        tensor, or one for all tensors.
        """
        if len(works) == tensors > 1:
            for output in outputs:
                self._await(works[output.index or 0], _Awaited(name, (output,), 1))
        else:
            together = _Awaited(name, outputs, len(works))
            for work in works:
                self._await(work, together)

    def waited(self, work: Any) -> Sequence[Output]:
        """Return the outputs that are complete now that the script has waited for `work`."""
        work_and_awaited = self._awaited.get(id(work))
        if work_and_awaited is None or work_and_awaited[0]() is not work:
            return ()
        del self._awaited[id(work)]
        awaited = work_and_awaited[1]
        awaited.works -= 1
        return () if awaited.works else awaited.outputs

    def release_tensors(self) -> None:
        """Release the outputs of all calls. Keep only the names of the calls that the script has not waited for."""
        self._lost += [awaited.name for _, awaited in self._awaited.values()]
        self._awaited.clear()

    def missed(self) -> list[str]:
        """Return the names of the calls that the script has not waited for."""
        return [*self._lost, *(awaited.name for _, awaited in [*self._awaited.values()])]

    def _await(self, work: Any, awaited: _Awaited) -> None:
        key = id(work)

        def gone(_work: Any) -> None:  # called by the garbage collector at any time, on any thread
            if self._awaited.pop(key, None) is not None:
                self._lost.append(awaited.name)

        self._awaited[key] = weakref.ref(work, gone), awaited


def stream_of(device: torch.device) -> int | None:
    """Return the id of the current stream of `device` on this thread; None for a device without streams."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        return int(torch.accelerator.current_stream(device).stream_id)
    except RuntimeError:  # a device without streams
        return None


def pending_work_of(result: Any) -> list[Any]:
    """Return the work objects of asynchronous calls among the results of a call."""
    found = result if isinstance(result, list) else [result]
    return [item for item in found if isinstance(item, dist.Work)]
