"""Asynchronous calls that have not been waited for: what they will give back is kept until then, or until they die."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


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


class Works:
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


def works_of(result: Any) -> list[Any]:
    """Return the works among what a call returned."""
    found = result if isinstance(result, list) else [result]
    return [item for item in found if isinstance(item, dist.Work)]
