"""Isolation of tensors without computable statistics, so that one such tensor costs only its own rows.

Tensors are measured in batches. If a batch raises, its halves are measured separately, down to the single tensors that
raise. A tensor that raises at each sampled step is left out of the batches for some time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rankscope_exporter.process.errors import error_text

FAILURES_IN_A_ROW: Final = 3
"""Number of sampled steps in a row at which a tensor must raise the same error, before it is left out."""

LEFT_OUT_STEPS: Final = 1000
"""Number of steps for which a tensor is left out, unless its class, dtype or device changes."""

NAMES_SHOWN: Final = 3


def is_out_of_memory(error: Exception) -> bool:
    """Return whether `error` reports a lack of memory on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


_OUT_OF_MEMORY: Final = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(slots=True)
class _Failure:
    """The latest error of one tensor, and the number of sampled steps in a row with this error."""

    of: tuple[object, ...]  # class, dtype and device of the tensor, and the type of the error
    sample: int
    step: int
    in_a_row: int = 1


class Isolation:
    """Measures batches of tensors, and finds the tensors of a batch that raise.

    The function `tell` publishes a notice. Each tensor is named once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._named: set[str] = set()
        self.failures: dict[Hashable, dict[int, _Failure]] = {}
        """The tensors of each batch that have raised, and may have to be left out."""
        self.sample = self.step = 0
        """The number of the present step, among sampled steps and among all steps."""

    def run(
        self,
        scope: Hashable,
        tensors: Sequence[torch.Tensor | None],
        compute: Callable[[Sequence[int]], None],
        *,
        what: Callable[[], str],
        name: Callable[[int], str],
        undo: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        """Call `compute` with the positions of all elements of `tensors` that are measured.

        If `compute` raises, call `undo` with the same positions, and then `compute` with each half of the positions.
        Report the single tensors for which it raises. `scope` identifies the batch at later steps. For the report,
        `what` returns a description of the result of `compute`, and `name` the name of the tensor at a position.
        """
        positions: Sequence[int] = range(len(tensors))
        if failures := self.failures.get(scope):
            positions = [
                position
                for position in positions
                if position not in failures or not self._is_left_out(failures[position], tensors[position])
            ]
        failed = dict(_failing(positions, compute, undo)) if positions else {}
        if failed:
            self._note(scope, tensors, failed)
            self._report(what(), {name(position): error for position, error in failed.items()})

    def _is_left_out(self, failure: _Failure, tensor: torch.Tensor | None) -> bool:
        if tensor is None or failure.in_a_row < FAILURES_IN_A_ROW:
            return False
        return _description(tensor) == failure.of[:-1] and self.step - failure.step < LEFT_OUT_STEPS

    def _note(self, scope: Hashable, tensors: Sequence[torch.Tensor | None], failed: dict[int, Exception]) -> None:
        failures = self.failures.setdefault(scope, {})
        for position, error in failed.items():
            tensor, known = tensors[position], failures.get(position)
            if tensor is None or is_out_of_memory(error):
                continue
            of = (*_description(tensor), type(error))
            if known is None or known.of != of or known.sample < self.sample - 1:
                failures[position] = _Failure(of, self.sample, self.step)
            elif known.sample < self.sample:
                known.sample, known.step, known.in_a_row = self.sample, self.step, known.in_a_row + 1

    def _report(self, what: str, failed: dict[str, Exception]) -> None:
        new = [name for name in failed if name not in self._named]
        self._named.update(new)
        if new:
            self._tell(f"{what} of {some_of(new)} cannot be measured and is absent: {error_text(failed[new[0]])}")


def some_of(names: Iterable[str]) -> str:
    """Return the first few of `names` as text, and the number of the remaining names."""
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _description(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device


def _failing(
    positions: Sequence[int],
    compute: Callable[[Sequence[int]], None],
    undo: Callable[[Sequence[int]], None],
) -> Iterable[tuple[int, Exception]]:
    try:
        compute(positions)
    except Exception as raised:  # noqa: BLE001 - any operation of a tensor subclass may raise any error
        error = _without_frames(raised)
    else:
        return ()
    undo(positions)
    if len(positions) == 1:
        return [(positions[0], error)]
    half = len(positions) // 2
    parts = (_failing(part, compute, undo) for part in (positions[:half], positions[half:]))
    return list(itertools.chain.from_iterable(parts))


def _without_frames(error: Exception) -> Exception:
    """Return `error` without frames, which keep tensors alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
