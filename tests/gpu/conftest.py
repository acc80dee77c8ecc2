"""Fixtures of the tests on a GPU. `make test-gpu` runs them; a missing GPU is an error there."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.gpu.trainings import Device

# Read by cuBLAS when it is initialized. Without it, equal trainings may have different bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STAND_IN = os.environ.get("RANKSCOPE_GPU_STAND_IN")


@pytest.fixture(scope="session", autouse=True)
def device() -> Device:
    """Return the tested device; skip all tests if they are not requested."""
    if STAND_IN:
        return Device(torch.device(STAND_IN))
    if not os.environ.get("RANKSCOPE_GPU"):
        pytest.skip("make test-gpu")
    if not torch.cuda.is_available():
        pytest.fail("torch has no CUDA device: run make test-gpu on a machine with a GPU")
    return Device(torch.device("cuda", 0))


@pytest.fixture
def cuda(device: Device) -> torch.device:
    if not device.is_cuda:
        pytest.skip("make test-gpu")
    return device.name


@pytest.fixture(scope="session")
def group(device: Device) -> Iterator[None]:
    backend = "nccl" if device.is_cuda else "gloo"
    on = device.name if device.is_cuda else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=on)
    yield
    dist.destroy_process_group()
