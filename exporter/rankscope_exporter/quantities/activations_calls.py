"""Which call of which module is under way: numbered within a micro-batch, and found again when it is recomputed. Pure.

Checkpointing computes a part of the forward pass a second time, inside the backward pass. Without reentrance the first
time makes the graph and the second is thrown away; with it the first runs without gradients, so that only the second
has tensors whose gradients arrive. These must get the names of the first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one module. `seq` counts the calls within a micro-batch: None is the first."""

    module: str
    micro_step: int
    seq: int | None = None
    pointer: int = 0  # where the first argument lay, which checkpointing keeps


class Calls:
    """The calls of one step, in order."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self._counts: dict[tuple[str, int], int] = {}
        self._waiting: list[Call | None] = []  # without gradients so far, in their order; None once found again
        self._next: int | None = None

    def begins(self, module: str, micro_step: int, *, with_gradients: bool, pointer: int = 0) -> Call:
        """Note a call of the forward pass."""
        self.called.add(module)
        count = self._counts.get((module, micro_step), 0)
        self._counts[module, micro_step] = count + 1
        call = Call(module, micro_step, count or None, pointer)
        if not with_gradients:
            self._waiting.append(call)
        return call

    def again(self, module: str, pointer: int) -> Call | None:
        """Return the call that is recomputed; None when it had gradients the first time.

        A part is recomputed in the order in which it ran. Which part begins is told by its first argument, whose memory
        is kept for that; where that fails it is the latest one, as backward passes go.
        """
        places = [place for place, call in enumerate(self._waiting) if call is not None and call.module == module]
        if not places:
            return None
        place = places[-1]
        if self._next in places:
            place = self._next
        else:
            kept = [place for place in places if pointer and self._pointer(place) == pointer]
            place = kept[-1] if kept else place
        call, self._waiting[place] = self._waiting[place], None
        self._next = place + 1
        return call

    def gradient_arrived(self) -> None:
        """Note that what was recomputed last has been used: another part comes next."""
        self._next = None

    def _pointer(self, place: int) -> int:
        call = self._waiting[place]
        return 0 if call is None else call.pointer
