"""Reads torch's flight recorder, the record that torch keeps of its collectives whoever calls them.

The recorder is always on (`TORCH_FR_BUFFER_SIZE`, 2000 entries); reading it takes a copy and changes nothing. Nothing
of it has a public name, so each function is looked for, and where it is missing there is no record. It is read in two
ways: with the stack of each entry, while the interpreter lock is held; and without stacks and without the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

Raw = Mapping[str, Any]
"""An entry as torch writes it."""

_STACKS: Final = {"cpu": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}  # NCCL keeps a recorder of its own
_PLAIN: Final = {"cpu": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
_HANDLERS: Final = {"cpu": "fr_trace_json", "nccl": "dump_nccl_trace_json"}

_COMPILER: Final = "torch._dynamo"
_KNOWS_STACKS: Final = "torch._inductor.codecache"

_RELAXED: Final = 2
"""cudaStreamCaptureModeRelaxed."""


def has_groups() -> bool:
    """Return whether this process has joined a process group: without one there is nothing to tell."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def prepare_stacks() -> bool:
    """Bring in what torch imports when it first writes stacks; return whether they can be read.

    It is the part of the compiler that knows stacks of compiled code: 0.2 s where the compiler is loaded, as it is by
    the first step of any optimizer of torch's own. Into a process without it we do not bring it, for 2 s.
    """
    if _COMPILER not in sys.modules:
        return False
    with contextlib.suppress(ImportError):
        importlib.import_module(_KNOWS_STACKS)
    return True


def read_with_stacks() -> dict[str, Sequence[Raw]]:
    """Return the entries of each recorder, oldest first, each with its `frames`.

    Holds the interpreter lock for some 25 µs an entry.
    """
    with _while_others_capture():
        dumps = {name: function(True, True, False) for name, function in _functions(_STACKS).items()}
    return _entries({name: _Plain(io.BytesIO(dump)).load() for name, dump in dumps.items()})


def read_without_stacks(*, is_urgent: bool = False) -> dict[str, Sequence[Raw]]:
    """Return the same without `frames`; other threads go on while torch writes it."""
    answers = _unlocked()
    with _while_others_capture(is_urgent=is_urgent):
        dumps: dict[str, Any] = {name: _answer_of(handler) for name, handler in answers.items()}
        for name, function in _functions(_PLAIN).items():
            if not dumps.get(name, "").startswith("{"):  # not answered, or with the words of an error
                dumps[name] = function(True, False)
    return _entries({name: json.loads(dump) for name, dump in dumps.items() if dump})


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts. What asks for a class or a function is refused: none is ever called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight record holds no {module}.{name}")


def _c10d() -> Any:
    return getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001 - torch has no public name for it


def _functions(names: Mapping[str, str]) -> dict[str, Any]:
    c10d = _c10d()
    found = {name: getattr(c10d, function, None) for name, function in names.items()}
    return {name: function for name, function in found.items() if function is not None}


def _entries(documents: Mapping[str, Any]) -> dict[str, Sequence[Raw]]:
    found = {name: document.get("entries", ()) for name, document in documents.items()}
    return {name: sorted(entries, key=lambda entry: entry["record_id"]) for name, entries in found.items() if entries}


# What torch's debug server answers with: the one way to a record that does not hold the interpreter lock.


def _unlocked() -> dict[str, str]:
    c10d = _c10d()
    names = c10d._get_handler_names() if hasattr(c10d, "_get_handler_names") else ()  # noqa: SLF001 - see above
    return {name: handler for name, handler in _HANDLERS.items() if handler in names}


def _answer_of(handler: str) -> str:
    c10d = _c10d()
    given: list[str] = []
    asks = {"params": lambda _: {}, "get_param": lambda *_: "", "body": lambda _: b""}
    takes = {"set_content": lambda _, content, _type: given.append(content), "set_status": lambda *_: None}
    request = type("Request", (c10d._Request,), asks)()  # noqa: SLF001 - see above
    response = type("Response", (c10d._Response,), takes)()  # noqa: SLF001 - see above
    c10d._get_handler(handler)(request, response)  # noqa: SLF001 - see above
    return "".join(given)


@contextlib.contextmanager
def _while_others_capture(*, is_urgent: bool = False) -> Iterator[None]:
    """Let this thread ask for events of the device while another one captures a graph, which it would spoil.

    Where the device's runtime cannot be told so nothing is read, unless it is urgent: who hangs captures nothing.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange = _exchange_of_modes()
    if (exchange is None or exchange(ctypes.byref(mode)) != 0) and not is_urgent:
        raise RuntimeError("the device's runtime does not let the flight record be read beside captures of graphs")
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


def _exchange_of_modes() -> Any:
    library, prefix = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", "cuda"
    if getattr(torch.version, "hip", None):
        library, prefix = "libamdhip64.so", "hip"
    try:
        return getattr(ctypes.CDLL(library), f"{prefix}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):
        return None
