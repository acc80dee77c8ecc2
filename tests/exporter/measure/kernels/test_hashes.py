"""The hash of a tensor's bits, compared with its formula in plain integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exporter.measure.kernels.conftest import CPU, normal
from tests.properties import examples

from rankscope_exporter.measure.kernels.hashes import Hasher, finished, hashable
from rankscope_exporter.measure.kernels.tensor_access import MEASURABLE

DTYPES = sorted(MEASURABLE, key=str)
SMALL = Hasher(CPU, words=16)
USUAL = Hasher(CPU)


def mix(number: int) -> int:
    """Return the finalizer of SplitMix64, as its authors published it."""
    number &= 2**64 - 1
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def reference(data: bytes) -> int:
    padded = data + b"\0" * (-len(data) % 8)
    words = [int.from_bytes(padded[first : first + 8], "little") for first in range(0, len(padded), 8)]
    total = mix(len(data)) + sum(mix(word + (i + 1) * 0x9E3779B97F4A7C15) for i, word in enumerate(words))
    return int.from_bytes((total % 2**64).to_bytes(8, "little"), "little", signed=True)


def bits(tensor: torch.Tensor) -> bytes:
    return b"".join(bytes(element.clone().view(1).view(torch.uint8).tolist()) for element in tensor.flatten().unbind())


def hashed(tensor: torch.Tensor, hasher: Hasher = USUAL) -> int:
    (partial,) = hasher.partials([tensor]).tolist()
    return finished(partial, tensor.numel() * tensor.element_size())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor with any bits, of any dtype and shape, which may be transposed."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte % 2 for byte in data)
    tensor = torch.empty(shape, dtype=dtype)
    if data:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


@given(tensors())
@settings(max_examples=examples(120), deadline=None)
def test_hash_equals_the_formula_for_every_dtype_and_shape(tensor: torch.Tensor) -> None:
    """The formula also holds for a hasher that processes only 16 words at a time."""
    assert [reference(bits(tensor))] * 2 == [hashed(tensor, hasher) for hasher in (SMALL, USUAL)]


@given(st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=examples(40), deadline=None)
def test_tensors_hashed_together_have_independent_hashes(sizes: list[int]) -> None:
    values = [torch.arange(size, dtype=torch.float32).sin() for size in sizes]
    found = [finished(n, 4 * size) for n, size in zip(SMALL.partials(values).tolist(), sizes, strict=True)]

    assert [reference(bits(value)) for value in values] == found


@pytest.mark.parametrize("offset", range(9))
def test_part_of_a_flat_tensor_may_begin_at_any_offset(offset: int) -> None:
    """The views of the flat parameter of FSDP are such parts."""
    part = normal(400).to(torch.bfloat16)[offset : offset + 201]

    assert reference(bits(part)) == hashed(part, SMALL)


@given(st.integers(0, 32 * 37 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_one_flipped_bit_changes_the_hash(bit: int) -> None:
    before = normal(37, seed=1)
    after = before.clone()
    after.view(torch.int32)[bit // 32] ^= 1 << (bit % 32) if bit % 32 < 31 else -(1 << 31)

    assert hashed(before) != hashed(after)


def test_hash_depends_on_order_size_and_sign_of_zero() -> None:
    """The others have swapped elements of one word, swapped words, another sign, and other sizes."""
    base = [1.0, 2.0, 0.0, 0.0]
    others = [[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0], [1.0, 2.0, -0.0, 0.0], [1.0, 2.0, 0.0], [*base, 0.0]]

    assert len(others) + 1 == len({hashed(torch.tensor(item)) for item in (base, *others)})


def test_hashes_of_two_sign_flips_do_not_cancel() -> None:
    """In a sum of products with odd factors, two changes of the highest bit would cancel."""
    base = normal(40, seed=2).double()
    found = {hashed(base)}
    for one in range(40):
        for other in range(one):
            signs = torch.ones(40, dtype=torch.float64)
            signs[[one, other]] = -1
            found.add(hashed(base * signs))

    assert 1 + 40 * 39 // 2 == len(found)


def test_tensor_without_memory_is_not_hashable() -> None:
    there, absent = torch.ones(2), (torch.ones(2, device="meta"), torch.ones(2).to_sparse())

    assert [True, True, False, False] == [hashable(one) for one in (there, torch.empty(0), *absent)]
