"""Definition of every statistic, for every dtype and shape, with both backends."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.properties import examples

from rankscope_contract.model.kinds import COUNT_OPS, VALUE_OPS

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHERS = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
SIZES = [0, 1, 2, 15, 17, 1000, 4095, 4096, 4097, 100_003]
NAN, INF = math.nan, math.inf


def numbers(size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_statistics_for_every_size_and_dtype(dtype, measured, check):
    tensors = [numbers(size, dtype, scale=50.0) for size in SIZES]
    finished = measured(tensors)
    for entry, tensor in enumerate(tensors):
        check(finished, entry, tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_non_finite_elements_are_counted_and_excluded(dtype, measured, check):
    tensors = []
    for size in SIZES[1:]:
        for kind in (NAN, -NAN, INF, -INF):
            tensor = numbers(size, dtype)
            tensor[size // 2] = kind
            tensors.append(tensor)
        tensor = numbers(size, dtype)
        tensor[::3], tensor[1::5], tensor[::7] = NAN, -INF, 0.0
        tensors.append(tensor)
    finished = measured(tensors)
    for entry, tensor in enumerate(tensors):
        check(finished, entry, tensor)


@pytest.mark.parametrize(
    ("dtype", "has_infs"),
    [
        (torch.float8_e4m3fn, False),
        (torch.float8_e5m2, True),
        (torch.float8_e4m3fnuz, False),
        (torch.float8_e5m2fnuz, False),
    ],
    ids=str,
)
def test_non_finite_elements_of_eight_bits(dtype, has_infs, measured, check):
    """Most of these dtypes have no Inf and one NaN; too large numbers become this NaN."""
    tensor = torch.tensor([1.0, NAN, -INF if has_infs else NAN, 0.0, -2.0]).to(dtype)
    finished = measured([tensor])

    check(finished, 0, tensor)
    assert [2 - has_infs, int(has_infs), 1, 5] == finished.counts[:, 0].tolist()


def test_float8_e8m0fnu_has_no_zero_and_no_sign(measured, check):
    """float8_e8m0fnu, the scales of microscaling formats, whose smallest number is 2^-127."""
    tensor = torch.tensor([1.0, 4.0, 2.0**-127, NAN]).to(torch.float8_e8m0fnu)
    finished = measured([tensor])

    check(finished, 0, tensor)
    assert [1, 0, 0, 4] == finished.counts[:, 0].tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_a_finite_element_there_is_no_value(dtype, measured, check):
    tensors = [torch.full((size,), kind, dtype=dtype) for size in (1, 5, 5000) for kind in (NAN, INF, -INF)]
    finished = measured(tensors)
    for entry, tensor in enumerate(tensors):
        check(finished, entry, tensor)

    assert np.isnan(finished.values).all()
    assert finished.present.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-13, 1e-6, 1e6, 1e14, 1e18, 1e25, 1e37])
def test_magnitudes_from_1e_38_to_1e37(dtype, scale, measured, check):
    """The sum of squares of such numbers overflows or underflows float32."""
    tensors = [numbers(size, dtype, scale) for size in (1, 1000, 50_000)]
    mixed = numbers(20_000, dtype)
    mixed[10_000:] *= scale
    finished = measured([*tensors, mixed])
    for entry, tensor in enumerate([*tensors, mixed]):
        check(finished, entry, tensor)


@pytest.mark.usual(10)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.1, 0.7, -1e-3, 3.0])
def test_equal_numbers_do_not_accumulate_rounding_errors(dtype, value, measured, check):
    """Rounding errors of equal terms all have one sign: the worst case of a float32 sum."""
    tensor = torch.full((3_000_017,), value, dtype=dtype)

    check(measured([tensor]), 0, tensor)


def test_norm_beyond_float32_is_infinite_and_its_elements_are_not(measured):
    finished = measured([torch.full((4096,), 3e38), torch.full((3,), 1e200, dtype=torch.float64)])

    assert [INF, INF] == finished.values[VALUE_OPS.index("norm")].tolist()
    assert float(np.float32(3e38)) == float(finished.values[VALUE_OPS.index("max"), 0])
    assert [0, 0] == finished.counts[COUNT_OPS.index("infs")].tolist()


def test_zeros_of_either_sign_are_zeros(measured, check):
    tensors = [torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, NAN], dtype=dtype) for dtype in FLOATS]
    finished = measured(tensors)
    for entry, tensor in enumerate(tensors):
        check(finished, entry, tensor)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("zero_below", [1e-45, 1e-8, 0.1, 0.25, 1.0, 1.5, 1e39, INF])
def test_zeros_count_elements_below_the_bound(dtype, zero_below, measured, check):
    """The bound is not rounded to the tensor's dtype: 0.1 is between two bfloat16 numbers."""
    near = [0.1, 0.25, 1.0, 1.5, -0.1, -0.25, -1.5, 0.0, -0.0, 0.0999, 0.2500001, -1.0, 1.4, 400.0]
    tensor = torch.tensor(near * 3, dtype=torch.float64).to(dtype)
    if dtype in FLOATS:
        tensor[-1], tensor[-2] = NAN, -INF

    check(measured([tensor], zero_below=zero_below), 0, tensor, zero_below)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.floats(width=32), max_size=60),
    repeats=st.sampled_from([1, 1, 80]),
    zero_below=st.sampled_from([0.0, 0.0, 1e-3, 2.0]),
)
def test_statistics_of_arbitrary_float32_numbers(values, repeats, zero_below, measured, check):
    """Float32 numbers of any size, subnormal and non-finite ones among them."""
    tensor = torch.tensor(values, dtype=torch.float32).repeat(repeats)

    check(measured([tensor], zero_below=zero_below), 0, tensor, zero_below)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_fifty_million_elements(dtype, measured, check):
    """More than 2^24 elements, which float32 counters cannot count."""
    tensor = torch.randn(50_000_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[:20_000_000] = 0.0
    tensor[30_000_000], tensor[30_000_001] = NAN, INF

    check(measured([tensor]), 0, tensor)


def test_complex_numbers_count_as_their_modulus(measured, check):
    tensors = [torch.randn(1000, dtype=dtype) for dtype in (torch.complex64, torch.complex128)]
    tensors[0][3], tensors[0][4], tensors[1][5] = complex(NAN, 1.0), complex(NAN, INF), 0
    finished = measured(tensors)
    for entry, tensor in enumerate(tensors):
        check(finished, entry, np.abs(tensor.to(torch.complex128).numpy()))

    assert [1, 1, 0] == finished.counts[:3, 0].tolist()


def test_statistics_of_half_precision_complex_numbers(measured, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that ComplexHalf is experimental
        tensor = torch.randn(500, dtype=torch.complex64).to(torch.complex32)
        finished = measured([tensor])
        numbers = np.abs(tensor.to(torch.complex128).numpy())

    check(finished, 0, numbers)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.complex64, torch.float8_e5m2, torch.float16], ids=str)
@pytest.mark.parametrize("zero_below", [0.0, 1e-8, 1.0, 2.0])
def test_zeros_below_the_bound_in_eight_bit_types(dtype, zero_below, measured, check):
    tensor = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).to(dtype)

    check(measured([tensor], zero_below=zero_below), 0, tensor, zero_below)


def views() -> dict[str, torch.Tensor]:
    base = numbers(24_000, torch.float32)
    return {
        "scalar": torch.tensor(3.0),
        "transposed": base.view(100, 240).t(),
        "channels last": base.view(10, 10, 12, 20).to(memory_format=torch.channels_last),
        "every second": base[::2],
        "a column": base.view(100, 240)[:, 7],
        "expanded": base[:10].view(10, 1).expand(10, 70),
        "offset": base[17:5000],
        "empty rows": base.view(100, 240)[:0].t(),
        "overlapping": base.as_strided((50, 50), (1, 1)),
        "negated": torch.view_as_complex(base.view(-1, 2)).conj().imag,
        "dense and negated": torch._neg_view(base),
        "a parameter": torch.nn.Parameter(base.clone()),
        "in an autograd graph": (base.clone().requires_grad_() * 2).relu(),
    }


@pytest.mark.parametrize("name", views())
def test_statistics_of_every_kind_of_view(name, measured, check):
    tensor = views()[name]

    check(measured([tensor]), 0, tensor)


def embedding_gradient() -> torch.Tensor:
    """Return a sparse gradient that contains row 1 twice, as torch makes it."""
    table = torch.nn.Embedding(8, 3, sparse=True)
    table(torch.tensor([1, 5, 1])).pow(2).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


def test_sparse_gradient_has_the_statistics_of_the_dense_gradient(measured, check):
    gradient = embedding_gradient()
    assert not gradient.is_coalesced()
    dense = torch.zeros(8, 3)
    dense[0] = -5.0
    dense[7] = 2.0
    positive = dense.abs().to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that CSR is in beta
        rows = dense.to_sparse_csr()
    finished = measured([gradient, numbers(10, torch.float32), positive, rows])

    check(finished, 0, gradient.to_dense())
    check(finished, 2, positive.to_dense())
    check(finished, 3, dense)


class Shard:
    """Wraps a tensor as a DTensor does."""

    def __init__(self, local: torch.Tensor) -> None:
        self.local = local

    def to_local(self) -> torch.Tensor:
        return self.local


def freed(*, offset: int = 0, step: int = 1) -> torch.Tensor:
    """Return a tensor whose memory was released, such as a parameter of FSDP between its uses."""
    tensor = torch.ones(100)[offset::step]
    tensor.untyped_storage().resize_(0)
    return tensor


def test_nothing_to_measure_leaves_the_entry_absent(measured):
    nothing = [
        None,
        torch.empty(5, device="meta"),
        torch.nn.UninitializedParameter(),
        freed(),
        freed(offset=60),
        freed(step=2),
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        Shard(torch.empty(5, device="meta")),
    ]
    finished = measured([*nothing, torch.ones(3)])
    absent = len(nothing)
    del nothing  # printing freed memory would end the test run

    assert [False] * absent + [True] == finished.present.tolist()
    assert np.isnan(finished.values[:, :-1]).all()
    assert 0 == int(np.abs(finished.counts[:, :-1]).sum())


def test_empty_tensor_is_present_without_values(measured):
    finished = measured([torch.empty(0)])

    assert finished.present.tolist() == [True]
    assert [0, 0, 0, 0] == finished.counts[:, 0].tolist()
    assert np.isnan(finished.values).all()


def test_dtypes_can_be_mixed_in_one_group(measured, check):
    tensors = [numbers(size, dtype) for dtype in (*FLOATS, torch.int32) for size in (0, 3, 5000)]
    tensors.insert(4, embedding_gradient())
    tensors.insert(9, None)
    finished = measured(tensors)
    for entry, tensor in enumerate(tensors):
        if tensor is not None:
            check(finished, entry, tensor.to_dense())
