"""Lets code of the user's run on a thread of ours without a trace in training: what would leave one is refused.

Everything here is of this thread alone. Random numbers are the process's: neither Python's, nor numpy's, nor torch's
generators may be drawn from or set. Nothing may be communicated or compiled. The live model must not be called: its
hooks are not ours to run.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn

MOST_SECONDS: Final = 20.0
"""CPU time after which a computation is given up."""

_MOST_BYTES: Final = 1 << 26
"""Of an array that a copy of the model may have; tensors are copied without their numbers."""

_READS: Final = frozenset({"get_state", "getstate", "initial_seed", "clone_state"})
_META: Final = torch.device("meta")
_RANDOM: Final = "its forward uses the random numbers of the process"


_OURS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Where an error out of time would leave something half done, such as a mode that is pushed and never popped."""


class RefusedError(BaseException):
    """Code of the user's was about to do something that training would notice; `except Exception` lets it pass."""


@contextlib.contextmanager
def isolated(live: nn.Module, most_seconds: float = MOST_SECONDS) -> Iterator[None]:
    """Refuse, on this thread, what training would notice, and calls of modules of `live`. Raises RefusedError.

    What operations do is refused by `refuse_operation`, which a dispatch mode must ask.
    """
    importlib.import_module("torch._dynamo")  # a dispatch mode asks for it, and what it imports makes generators
    before = sys.getprofile()
    sys.setprofile(_watch({id(module) for module in live.modules()}, time.thread_time() + most_seconds))
    try:
        # Activation checkpointing runs its forward again, and sets the random generators back for it.
        with torch.autograd.graph.disable_saved_tensors_hooks("it changes what the backward pass keeps"):
            yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let code of torch's own run at its speed, within `isolated`: what meta tensors need is written in Python."""
    watch = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)


def refuse_operation(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise RefusedError for one that communicates, or draws random numbers anywhere but on the meta device."""
    if "c10d" in operation.namespace:
        raise RefusedError("its forward communicates")
    if torch.Tag.nondeterministic_seeded in operation.tags and _devices(args, kwargs) != {_META}:
        raise RefusedError(_RANDOM)


def _devices(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[torch.device]:
    found = {value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
    named = kwargs.get("device")
    return found or {torch.device("cpu") if named is None else torch.device(named)}


def _watch(live: set[int], deadline: float) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function: what it raises keeps the call from being made.

    It is called for all that Python does on the thread, mostly torch's own code for meta tensors: that passes fast.
    """
    calls = {nn.Module.__call__.__code__, nn.Module._call_impl.__code__}  # noqa: SLF001 - where every call of a module begins
    of_user: dict[CodeType, bool] = {}

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            is_of_user = of_user.get(code)
            if is_of_user is None:
                _refuse_function(frame)
                is_of_user = of_user[code] = not code.co_filename.startswith(_OURS)
            if code in calls and id(frame.f_locals.get("self")) in live:
                raise RefusedError("its code calls the model that is trained, not the copy")
        elif event == "c_call":
            is_of_user = of_user.get(frame.f_code, False)
            if _changes_generator(argument):
                raise RefusedError(_RANDOM)
            if argument.__name__ == "__deepcopy__" and getattr(argument.__self__, "nbytes", 0) > _MOST_BYTES:
                raise RefusedError("it holds a large array that is no tensor")
        else:
            return
        if is_of_user and time.thread_time() > deadline:
            raise RefusedError("it takes too long")

    return look


def _changes_generator(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, random.Random | torch.Generator) and function.__name__ not in _READS


def _refuse_function(frame: FrameType) -> None:
    code = frame.f_code
    if code.co_name == "compile_wrapper" and "_dynamo" in code.co_filename:
        raise RefusedError("a function of it is compiled")
    # numpy's functions are no functions of C's or Python's, so no call of one is seen: names must do.
    numpy = sys.modules.get("numpy")
    if numpy is not None and "random" in code.co_names and numpy in map(frame.f_globals.get, code.co_names):
        raise RefusedError(_RANDOM)
    if any(_is_of_numpy_random(frame.f_globals.get(name)) for name in code.co_names):
        raise RefusedError(_RANDOM)


def _is_of_numpy_random(value: Any) -> bool:
    if value is sys.modules.get("numpy.random"):
        return value is not None
    owner = (
        getattr(value, "__self__", value) if type(value).__name__.endswith(("function_or_method", "method")) else value
    )
    return type(owner).__module__.startswith("numpy.random")
