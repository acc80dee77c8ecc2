"""Replacements for the CUDA functions that Megatron-Core calls, for a training on a CPU."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch


class _Stream:
    """A stream or an event of a device without asynchronous execution."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


def put() -> None:
    """Replace CUDA by the CPU in this process."""
    cuda: Any = torch.cuda
    # A separate function for each name: torch's compiler has a table of them and rejects duplicates.
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.Stream, cuda.Event = _Stream, type("Event", (_Stream,), {})
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # noqa: PLW0108 - see above
    cuda.FloatTensor, cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, _on_processor(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.type = _type_of(torch.Tensor.type)  # type: ignore[method-assign]


def seed() -> None:
    """Seed the random number generators of parallel layers."""
    from megatron.core.tensor_parallel import random  # noqa: PLC0415 - only once `put` has been called

    if not torch.cuda.is_available():
        random._get_cuda_rng_state = torch.cuda.get_rng_state  # noqa: SLF001 - it has copies of its own
        random._set_cuda_rng_state = torch.cuda.set_rng_state  # noqa: SLF001 - see above
    random.model_parallel_cuda_manual_seed(0)


def _on_processor(make: Any) -> Any:
    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return call


def _type_of(original: Any) -> Any:
    """Megatron recognizes float types by the type names of CUDA tensors."""

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return call
