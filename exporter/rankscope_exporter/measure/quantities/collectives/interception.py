"""Interception of functions of `torch.distributed`, and of asynchronous calls until the script has waited for them.

A function is replaced by one object, which calls any number of listeners. If interception ends and starts again, the
same object is used, because other code may have imported it by name in between. If other code replaces this object by a
wrapper, the wrapper remains in place when interception ends. Calls of the wrapper then still reach the object, which
passes them on to the original function.

The outputs of an asynchronous call are kept until the script has waited for its work object or freed it.

Input and output tensors of a collective on this rank. The module reads no element of a tensor and sends nothing.

A buffer is left out if its content has no meaning on this rank. Examples are the buffer of a broadcast on a receiving
rank before the call, and the result of a reduction on ranks that are not its destination.

Call sites of collectives: the innermost line of code outside of torch and Rankscope, and the stack of this line.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType, MethodType
from typing import Any, Final

import torch
import torch.distributed as dist

from rankscope_exporter.adapters.parameter_hooks import CallbackHandle
from rankscope_exporter.adapters.pytree import Slot
from rankscope_exporter.adapters.torch_private import coalescing_groups
from rankscope_exporter.adapters.tracing import is_dynamo_compiling
from rankscope_exporter.measure.quantities.base import SamplingGate
from rankscope_exporter.measure.table import Slots
from rankscope_exporter.monitors.flight_recorder.poller import NOT_SCRIPT_CODE, script_frames, short_file

MAX_FRAMES: Final = 128
_MOST_STACKS: Final = 4096
"""Largest number of cached call stacks.

Recursion can produce any number of different stacks. Without the limit, they could fill the memory.
"""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the script that calls a collective.

    `label` consists of the file, with the folders of its package, and of the line number: `loss.py[23]`.
    """

    label: str
    stack: tuple[str, ...]
    """The call stack of the collective, outermost first: for each frame, the label of its line and the function."""
    is_chosen: bool


class CallSites:
    """The call sites of a script, and the selection of call sites by regular expressions.

    A call site is chosen if one of `expressions` is found in its stack. If there are no expressions, all call sites are
    chosen. An expression is searched in a text with one line per frame of the call stack, outermost first. A line has
    the form `/whole/path/loss.py[23] function`.
    """

    def __init__(self, expressions: Sequence[str] = ()) -> None:
        self._expressions = [re.compile(expression, re.DOTALL) for expression in expressions]
        self._of_stack = functools.lru_cache(_MOST_STACKS)(self._site)

    def of(self, caller: FrameType) -> CallSite | None:
        """Return the call site of the frame `caller`; None if the code of the frame is that of torch or Rankscope."""
        if caller.f_code.co_filename.startswith(NOT_SCRIPT_CODE):
            return None
        codes = ((frame.f_code, frame.f_lineno) for frame in script_frames(caller, MAX_FRAMES))
        return self._of_stack(*((code.co_filename, line, code.co_qualname) for code, line in codes))

    def of_record(self, frames: Iterable[Mapping[str, Any]]) -> CallSite:
        """Return the call site of a collective call in torch's flight record.

        `frames` are the frames of the call stack in the flight record, innermost first.
        """
        named = ((str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames)
        return self._site(*(frame for frame in named if not frame[0].startswith(NOT_SCRIPT_CODE)))

    def _site(self, *frames: tuple[str, int, str]) -> CallSite:
        """Return a call site, given file, line and function of each frame of the script, innermost first."""
        labels = [f"{short_file(file)}[{line}]" for file, line, _ in frames]
        stack = tuple(f"{label} {name}" for label, (*_, name) in zip(labels, frames, strict=True))[::-1]
        text = "\n".join(f"{file}[{line}] {name}" for file, line, name in reversed(frames))
        is_chosen = not self._expressions or any(expression.search(text) for expression in self._expressions)
        return CallSite(labels[0] if labels else NO_PLACE, stack, is_chosen)


NO_PLACE: Final = "torch"
"""Name of the call site of a collective if its stack has no Python code of the script, as on a thread of torch."""

BATCH: Final = "batch_isend_irecv"
_ISEND: Final = "isend"
_SENDS: Final = ("send", _ISEND)
_RECEIVES: Final = ("recv", "irecv")
OPERATIONS: Final = (
    *(*_SENDS, *_RECEIVES, BATCH),
    *("broadcast", "all_reduce", "reduce", "scatter", "gather", "all_to_all", "all_to_all_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"),
)
"""Names of the functions of torch.distributed that this module supports."""

_INPUTS: Final = ("input", "input_tensor", "input_list", "input_tensor_list", "scatter_list")
_OUTPUTS: Final = ("output", "output_tensor", "output_tensor_list", "tensor_list", "gather_list")
"""Names of parameters of these functions for inputs and for outputs. A function without one has them in `tensor`."""


@dataclass(frozen=True, slots=True)
class CallTensors:
    """The input and output tensors of a collective call on this rank, and its process group.

    The index of a tensor is its position in a list of tensors; None for a single tensor.
    """

    inputs: Sequence[Slot] = ()
    outputs: Sequence[Slot] = ()
    group: Any = None


def call_tensors_of(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTensors | None:
    """Return the tensors of a call of the function `op`.

    Return None if the call will fail because of its arguments, or if this rank is not in the group of the call.
    """
    if not dist.is_initialized():
        return None
    if op == BATCH:
        return _of_batch(args[0] if args else kwargs.get("p2p_op_list"))
    parameters = _signature(op).parameters
    try:
        given = _signature(op).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will raise it
        return None
    group = given.get("group")
    if not _is_member(group):
        return None
    sent, received = (next((name for name in names if name in parameters), "tensor") for names in (_INPUTS, _OUTPUTS))
    # The `dst` of a send and the `src` of a receive are the other rank.
    sends = op in _SENDS or (op not in _RECEIVES and _is_here("src", op, given, group))
    receives = op in _RECEIVES or (op not in _SENDS and _is_here("dst", op, given, group))
    return CallTensors(_parts(given.get(sent)) if sends else (), _parts(given.get(received)) if receives else (), group)


def is_coalescing(group: Any) -> bool:
    """Return whether torch now collects the calls for the process group `group`, to execute them together later."""
    return (dist.group.WORLD if group is None else group) in coalescing_groups()


def group_text(group: Any) -> str:
    """Return name and size of a process group as text."""
    group = dist.group.WORLD if group is None else group
    display_name = getattr(group, "group_desc", "") or getattr(group, "group_name", "")
    return f"group {display_name or '?'} of {dist.get_world_size(group)} ranks"


def _of_batch(operations: Any) -> CallTensors | None:
    if not isinstance(operations, list) or not all(isinstance(item, dist.P2POp) for item in operations):
        return None
    inputs: list[Slot] = []
    outputs: list[Slot] = []
    for position, item in enumerate(operations):
        side = inputs if getattr(item.op, "__name__", "") == _ISEND else outputs
        side.append(Slot(position, "", item.tensor))
    return CallTensors(inputs, outputs, operations[0].group if operations else None)


def _parts(value: Any) -> Sequence[Slot]:
    if isinstance(value, torch.Tensor):
        return (Slot(None, "", value),)
    if isinstance(value, list | tuple):
        return [Slot(position, "", item) for position, item in enumerate(value) if isinstance(item, torch.Tensor)]
    return ()


def _is_member(group: Any) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):  # not a group of torch
        return False


def _is_here(name: str, op: str, given: Mapping[str, Any], group: Any) -> bool:
    """Return whether a call of `op` concerns this rank, which is so for every rank without a parameter `name`.

    `name` is the parameter with the rank in the world ("dst"; in the group, if prefixed by `group_`).
    """
    if name not in _signature(op).parameters:
        return True
    of_group = given.get(f"group_{name}")
    if of_group is not None:
        return bool(dist.get_rank(group) == of_group)
    return bool(dist.get_rank() == (given.get(name) or 0))  # 0 where torch has a default


@cache
def _signature(op: str) -> inspect.Signature:
    # The function in torch.distributed itself may be a replacement of other code.
    return inspect.signature(getattr(dist.distributed_c10d, op))


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
        self._sends = name == _ISEND

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.original(*args, **kwargs)
        if self._sends and "group_src" in kwargs:
            # A batch treats a P2POp as a receive unless its function is, by identity, the original isend.
            kwargs["group_dst"] = kwargs.pop("group_src")
        caller = sys._getframe(1)  # noqa: SLF001 - the only cheap way to the caller
        open_ones = filter(lambda listener: listener.gate.is_open, self.listeners)
        calls = [(listener, CollectiveCall(self.name, args, kwargs, caller)) for listener in open_ones]
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


def intercept(listener: Listener, names: Iterable[str]) -> CallbackHandle:
    """Intercept several functions of torch.distributed for one listener, until the handle is removed."""
    with _lock:
        found = [_interception_of(dist, name, _FunctionInterception) for name in names]
        found.append(_interception_of(getattr(dist, "Work", None), WAIT, _WaitInterception))
        interceptions = [item for item in found if item is not None]
        for item in interceptions:
            item.join(listener)

    def remove() -> None:
        with _lock:
            for item in interceptions:
                item.leave(listener)

    return CallbackHandle(remove)


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
    """An output tensor of the call `name`, with the slot of this tensor in the table.

    `index` is the position of the tensor if the output is a list, otherwise None.
    """

    name: str
    slot: Slots
    tensor: torch.Tensor
    index: int | None


@dataclass(slots=True)
class _Awaited:
    """Outputs of an asynchronous call that belong to the same work objects.

    The outputs are complete when the script has waited for all these work objects. `works` is the number of these work
    objects that the script has not waited for yet.
    """

    outputs: Sequence[Output]
    works: int


class PendingWork:
    """The asynchronous calls of one step that the script has not waited for yet."""

    def __init__(self) -> None:
        self._awaited: dict[int, tuple[weakref.ref[Any], _Awaited]] = {}  # by the identity of the work
        self._lost: list[str] = []

    def expect(self, works: Sequence[Any], outputs: Sequence[Output], tensors: int) -> None:
        """Keep the `outputs` of an asynchronous call until the script has waited for all of its `works`.

        `tensors` is the number of tensors that the call sends and receives. A batch of calls has one work object per
        tensor, or one for all tensors.
        """
        if len(works) == tensors > 1:
            for output in outputs:
                self._await(works[output.index or 0], _Awaited((output,), 1))
        else:
            together = _Awaited(outputs, len(works))
            for work in works:
                self._await(work, together)

    def waited(self, work: Any) -> Sequence[Output]:
        """Return the outputs that are complete now that the script has waited for `work`."""
        known, awaited = self._awaited.get(id(work), (None, None))
        if known is None or awaited is None or known() is not work:
            return ()
        del self._awaited[id(work)]
        awaited.works -= 1
        return () if awaited.works else awaited.outputs

    def release_tensors(self) -> None:
        """Release the outputs of all calls. Keep only the names of the calls that the script has not waited for."""
        self._lost += [awaited.outputs[0].name for _, awaited in [*self._awaited.values()]]
        self._awaited.clear()

    def missed(self) -> list[str]:
        """Return the names of the calls that the script has not waited for."""
        self.release_tensors()
        return self._lost

    def _await(self, work: Any, awaited: _Awaited) -> None:
        key = id(work)

        def gone(_work: Any) -> None:  # called by the garbage collector at any time, on any thread
            if self._awaited.pop(key, None) is not None:
                self._lost.append(awaited.outputs[0].name)

        self._awaited[key] = weakref.ref(work, gone), awaited
