"""A 64-bit hash of the exact bits of tensors, computed on their device without a copy or host synchronisation.

The bytes of a tensor in row-major order, padded with zeros, are little-endian words w[0] … w[n-1] of 64 bits. With
`mix` the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014),
and `size` the number of bytes of the tensor,

    hash = mix(size) + sum over i of mix(w[i] + (i + 1) * 0x9E3779B97F4A7C15)      (mod 2^64)

`mix` is a bijection, so a change within one word always changes the hash. Any other change is missed with a probability
of 2^-64. The order of the sum is irrelevant, and integers wrap in the same way on every device, so equal bits have
equal hashes everywhere. The hash depends on bits, not on values: 0.0 and -0.0 differ, and so do two NaNs with different
bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch

from rankscope_exporter.adapters.torch_private import foreach_copy
from rankscope_exporter.measure.kernels.tensor_access import is_freed, why_not_measurable

_GOLDEN: Final = 0x9E3779B97F4A7C15
_ROUNDS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31
_WORD: Final = 8

_WORDS: Final = {"cpu": 1 << 15}
"""Number of 64-bit words that are hashed at the same time: they fit into the second-level cache."""
_WORDS_ELSEWHERE: Final = 1 << 20


def hashable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be hashed: not freed, sparse, nested, packed or on the meta device."""
    return why_not_measurable(tensor) is None and tensor.layout is torch.strided and not is_freed(tensor)


def finished(partial: int, size_bytes: int) -> int:
    """Return the hash of a tensor, computed on the host, as a signed 64-bit integer, from its `partial` sum."""
    return _signed(partial + _mix(size_bytes))


class Hasher:
    """Computation of hashes on one device. The memory is allocated once. An object must be used by one thread only."""

    def __init__(self, device: torch.device, words: int | None = None) -> None:
        size = words or _WORDS.get(device.type, _WORDS_ELSEWHERE)
        with torch.inference_mode(False):
            self._mixed = torch.empty(size, dtype=torch.int64, device=device)
            self._shifted = torch.empty_like(self._mixed)
            self._packed = torch.zeros_like(self._mixed)
            counted = torch.arange(1, size + 1, dtype=torch.int64, device=device)
            self._positions = counted.mul_(_signed(_GOLDEN))

    def partials(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return int64 [len(tensors)] on the device: for each tensor, the sum of the mixed values of its 64-bit words.

        `finished` computes the hash from this sum.
        """
        flat = [_bytes(tensor) for tensor in tensors]
        sums = torch.zeros(len(flat), dtype=torch.int64, device=self._mixed.device)
        small: list[int] = []
        held = 0
        for index, item in enumerate(flat):
            words = -(-item.numel() // _WORD)
            if words > len(self._mixed) // 2:
                self._add_large(item, sums[index])
                continue
            if held + words > len(self._mixed):
                self._add_small(flat, small, sums)
                small, held = [], 0
            small.append(index)
            held += words
        self._add_small(flat, small, sums)
        return sums

    def _add_large(self, item: torch.Tensor, total: torch.Tensor) -> None:
        whole, size = item.numel() // _WORD * _WORD, len(self._mixed) * _WORD
        is_aligned = item.storage_offset() % _WORD == 0 and item.data_ptr() % _WORD == 0
        for first in range(0, whole, size):
            part = item[first : min(first + size, whole)]
            words = (part if is_aligned else part.clone()).view(torch.int64)
            total.add_(self._mix(words, self._positions[: len(words)], first // _WORD).sum())
        if item.numel() > whole:
            last = self._packed[:1].zero_()
            last.view(torch.uint8)[: item.numel() - whole].copy_(item[whole:])
            total.add_(self._mix(last, self._positions[:1], whole // _WORD).sum())

    def _add_small(self, flat: Sequence[torch.Tensor], indices: Sequence[int], sums: torch.Tensor) -> None:
        """Hash several tensors together. Each tensor begins at a new 64-bit word, and its words are numbered from 0."""
        indices = [index for index in indices if flat[index].numel()]
        if not indices:
            return
        sizes = [flat[index].numel() for index in indices]
        spans = [*itertools.pairwise(itertools.accumulate((-(-size // _WORD) for size in sizes), initial=0))]
        packed = self._packed[: spans[-1][1]].zero_()
        places = [packed[first:end].view(torch.uint8)[:size] for (first, end), size in zip(spans, sizes, strict=True)]
        foreach_copy(places, [flat[index] for index in indices])
        mixed = self._mix(packed, torch.cat([self._positions[: end - first] for first, end in spans]), 0)
        for index, (first, end) in zip(indices, spans, strict=True):
            sums[index].add_(mixed[first:end].sum())

    def _mix(self, words: torch.Tensor, positions: torch.Tensor, first: int) -> torch.Tensor:
        """Return the number that each of `words` adds to the hash of its tensor.

        The first word has the position `first` within the tensor.
        """
        mixed, shifted = self._mixed[: len(words)], self._shifted[: len(words)]
        torch.add(words, positions, out=mixed)
        if first:
            mixed.add_(_signed(first * _GOLDEN))
        for shift, factor in _ROUNDS:
            _fold(mixed, shifted, shift)
            mixed.mul_(_signed(factor))
        _fold(mixed, shifted, _LAST_SHIFT)
        return mixed


def _fold(mixed: torch.Tensor, shifted: torch.Tensor, shift: int) -> None:
    """Exclusive-or `mixed` with itself, logically shifted right: torch's shift repeats the sign, which is cleared."""
    torch.bitwise_right_shift(mixed, shift, out=shifted)
    shifted.bitwise_and_((1 << (64 - shift)) - 1)
    mixed.bitwise_xor_(shifted)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor` in row-major order, copied only if its memory has another order."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return whole.view(torch.uint8)


def _mix(number: int) -> int:
    for shift, factor in _ROUNDS:
        number = (number ^ (number >> shift)) * factor & _ALL
    return number ^ (number >> _LAST_SHIFT)


_ALL: Final = (1 << 64) - 1


def _signed(number: int) -> int:
    number &= _ALL
    return number - (1 << 64) if number >> 63 else number
