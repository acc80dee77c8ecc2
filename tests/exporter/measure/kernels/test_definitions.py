"""Definition of every statistic, for every dtype and shape, with both backends."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exporter.measure.kernels.conftest import numbers
from tests.properties import examples

from rankscope_contract.model.kinds import VALUE_OPS

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHERS = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
SIZES = [0, 1, 2, 15, 17, 1000, 4095, 4096, 4097, 100_003]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_statistics_for_every_size_and_dtype(dtype, check_all):
    check_all([numbers(size, dtype, scale=50.0) for size in SIZES])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_non_finite_elements_are_counted_and_excluded(dtype, check_all):
    """Without a finite element there is no value."""
    tensors = [torch.full((size,), kind, dtype=dtype) for size in (1, 5, 5000) for kind in (NAN, INF, -INF)]
    for size in SIZES[1:]:
        for kind in (NAN, -NAN, INF, -INF):
            tensors.append(numbers(size, dtype))
            tensors[-1][size // 2] = kind
        tensors.append(numbers(size, dtype))
        tensors[-1][::3], tensors[-1][1::5], tensors[-1][::7] = NAN, -INF, 0.0
    check_all(tensors)


@pytest.mark.parametrize(
    ("dtype", "given", "counts"),
    [
        (torch.float8_e4m3fn, [1.0, NAN, NAN, 0.0, -2.0], [2, 0, 1, 5]),
        (torch.float8_e5m2, [1.0, NAN, -INF, 0.0, -2.0], [1, 1, 1, 5]),
        (torch.float8_e4m3fnuz, [1.0, NAN, NAN, 0.0, -2.0], [2, 0, 1, 5]),
        (torch.float8_e5m2fnuz, [1.0, NAN, NAN, 0.0, -2.0], [2, 0, 1, 5]),
        (torch.float8_e8m0fnu, [1.0, 4.0, 2.0**-127, NAN], [1, 0, 0, 4]),  # of microscaling: neither a zero nor a sign
    ],
    ids=str,
)
def test_non_finite_elements_of_eight_bits(dtype, given, counts, check_all):
    """Most of these dtypes have no Inf and one NaN; too large numbers become this NaN."""
    assert counts == check_all([torch.tensor(given).to(dtype)]).counts[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-13, 1e-6, 1e6, 1e14, 1e18, 1e25, 1e37])
def test_magnitudes_from_1e_38_to_1e37(dtype, scale, check_all):
    """The sum of squares of such numbers overflows or underflows float32."""
    mixed = numbers(20_000, dtype)
    mixed[10_000:] *= scale
    check_all([*(numbers(size, dtype, scale) for size in (1, 1000, 50_000)), mixed])


@pytest.mark.usual(10)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.1, 0.7, -1e-3, 3.0])
def test_equal_numbers_do_not_accumulate_rounding_errors(dtype, value, check_all):
    """Rounding errors of equal terms all have one sign: the worst case of a float32 sum."""
    check_all([torch.full((3_000_017,), value, dtype=dtype)])


def test_norm_beyond_float32_is_infinite_and_its_elements_are_not(check_all):
    """Also if numpy raises an error for an overflow or a NaN."""
    with np.errstate(all="raise"):
        finished = check_all([torch.full((4096,), 3e38), torch.full((2,), NAN), None])
        beyond = check_all([torch.full((3,), 1e200, dtype=torch.float64)])

    assert [INF, float(np.float32(3e38))] == finished.values[
        [VALUE_OPS.index(op) for op in ("norm", "max")], 0
    ].tolist()
    assert [INF] * 4 == beyond.values[[VALUE_OPS.index(op) for op in ("norm", "min", "max", "mean")], 0].tolist()
    assert [0, 0, 0, 3] == beyond.counts[:, 0].tolist()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8, torch.bool, torch.complex64, *OTHERS[:2]], ids=str)
def test_zeros_count_elements_below_the_bound(dtype, check_all):
    """The bound is not rounded to the tensor's dtype: 0.1 is between two bfloat16 numbers."""
    near = [0.1, 0.25, 1.0, 1.5, -0.1, -0.25, -1.5, 0.0, -0.0, 0.0999, 0.2500001, -1.0, 1.4, 100.0, 1e-45, -1e-45]
    tensor = torch.tensor(near * 3, dtype=torch.float64).to(dtype)
    if dtype in FLOATS:
        tensor[-1], tensor[-2] = NAN, -INF
    for zero_below in (0.0, 1e-45, 1e-8, 0.1, 0.25, 1.0, 1.5, 2.0, 1e39, INF):
        check_all([tensor], zero_below)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.floats(width=32), max_size=60),
    repeats=st.sampled_from([1, 1, 80]),
    zero_below=st.sampled_from([0.0, 0.0, 1e-3, 2.0]),
)
def test_statistics_of_arbitrary_float32_numbers(values, repeats, zero_below, check_all):
    """Float32 numbers of any size, subnormal and non-finite ones among them."""
    check_all([torch.tensor(values, dtype=torch.float32).repeat(repeats)], zero_below)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_fifty_million_elements(dtype, check_all):
    """More than 2^24 elements, which float32 counters cannot count."""
    tensor = torch.randn(50_000_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[:20_000_000] = 0.0
    tensor[30_000_000], tensor[30_000_001] = NAN, INF
    check_all([tensor])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_count_as_their_modulus(check_all):
    tensors = [torch.randn(1000, dtype=torch.complex128).to(dtype) for dtype in (torch.complex64, torch.complex128)]
    tensors[0][3], tensors[0][4], tensors[1][5] = complex(NAN, 1.0), complex(NAN, INF), 0
    finished = check_all([*tensors, torch.randn(500, dtype=torch.complex64).to(torch.complex32)])

    assert [1, 1, 0] == finished.counts[:3, 0].tolist()


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
def test_statistics_of_every_kind_of_view(name, check_all):
    check_all([views()[name]])


def embedding_gradient() -> torch.Tensor:
    """Return a sparse gradient that contains row 1 twice, as torch makes it."""
    table = torch.nn.Embedding(8, 3, sparse=True)
    table(torch.tensor([1, 5, 1])).pow(2).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_gradient_has_the_statistics_of_the_dense_gradient(check_all):
    gradient = embedding_gradient()
    assert not gradient.is_coalesced()
    dense = torch.zeros(8, 3)
    dense[0], dense[7] = -5.0, 2.0
    check_all([gradient, numbers(10, torch.float32), dense.abs().to_sparse(), dense.to_sparse_csr()])


class Shard:
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
        *(None, torch.empty(5, device="meta"), torch.nn.UninitializedParameter(), Shard(torch.empty(5, device="meta"))),
        *(freed(), freed(offset=60), freed(step=2), torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]
    finished = measured([*nothing, torch.ones(3)])
    absent = len(nothing)
    del nothing  # printing freed memory would end the test run

    assert [False] * absent + [True] == finished.present.tolist()
    assert np.isnan(finished.values[:, :-1]).all()
    assert 0 == int(np.abs(finished.counts[:, :-1]).sum())
    assert (np.float32, np.int64) == (finished.values.dtype, finished.counts.dtype)
