"""The agreement of the signs of two tensors: the compiled kernel gives the sums of torch operations."""

import pytest
import torch

from rankscope_exporter.measure.kernels.c_kernel import CODES
from rankscope_exporter.measure.kernels.measure_group import sums_of_signs

SIZES = (0, 1, 7, 4097, 70_000)


def signs(size, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-7])[:size]
    return torch.cat([special.to(dtype), values[: max(0, size - len(special))]])


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_exact_for_all_dtypes_and_layouts(threads):
    pairs = [(signs(size, a), signs(size, b).flip(0)) for a in CODES for b in CODES for size in SIZES]
    whole = signs(4000, torch.float32).view(80, 50)
    pairs += [(whole.t(), whole.t().neg()), (whole.t(), whole.view(50, 80)), (whole[:, :7], whole[:, 7:14])]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = sums_of_signs(pairs)
    finally:
        torch.set_num_threads(before)

    assert torch.int64 == found.dtype
    assert sums_of_signs(pairs, compiled=False).tolist() == found.tolist()
