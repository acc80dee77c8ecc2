"""TFLOP/s of this rank's device and their share of its peak, for each step that was timed; off the training thread.

What a step costs is what one token, sample or forward costs, times how many the step had. Recomputed activations do not
count: this is MFU, not the use of the hardware. Nothing is published where an amount, or a peak, is not known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from rankscope_exporter.drafts import Draft
from rankscope_exporter.frameworks import Framework
from rankscope_exporter.frameworks.base import Hooking
from rankscope_exporter.logged import Pending
from rankscope_exporter.moments import Cause, Follower
from rankscope_exporter.record import Scalar
from rankscope_exporter.throughput.captured import Inputs
from rankscope_exporter.throughput.config import ThroughputConfig
from rankscope_exporter.throughput.costs import Cost, Costs
from rankscope_exporter.throughput.parameters import Parallel, compute_dtype, multiplies_in_tf32
from rankscope_exporter.throughput.peaks import peak_tflops

GIVEN: Final = "given"


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of this rank went through: forwards that were seen, and numbers that were logged."""

    forwards: int
    logged: Sequence[Pending]

    def amount(self, name: str) -> float | None:
        """Return what was logged under `name`, in all its parts; waits for a tensor's copy. None for nothing."""
        parts = [item.scalar().value for item in self.logged if item.name == name]
        return sum(parts) if parts else None


class Throughput(Follower):
    """Watches the first training forward, then makes scalars of each step's duration and amounts."""

    def __init__(
        self,
        framework: Framework,
        config: ThroughputConfig,
        parallel: Parallel,
        *,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self._framework = framework
        self._config = config
        self._parallel = replace(parallel, ranks=config.model_parallel or parallel.ranks)
        self._device = device
        self._tell = tell
        self._inputs: Inputs | None = None
        self._unseen = "no training forward of the whole model was seen"
        self._costs: Costs | None = None
        self._peak: float | None = config.peak_tflops
        self._peak_is_known = self._peak is not None
        self.cpu_seconds = 0.0
        """CPU time of counting, which has a thread of its own."""
        self._forwards = 0
        self._work = Work(0, ())

    def install(self, hooking: Hooking) -> None:
        """Have a look at the arguments of the first training forward."""
        if self._config.method == "off" or self._framework.announced is not None:
            return

        def look(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self._framework.module.training and torch.is_grad_enabled():
                handle.remove()
                self._see(args, kwargs)

        hook = hooking.always("the shapes of a forward", look)
        handle = self._framework.model.register_forward_pre_hook(hook, with_kwargs=True)
        hooking.keep(handle)

    def _see(self, args: Any, kwargs: Any) -> None:
        try:
            self._inputs = Inputs.of(args, kwargs, _autocast(self._device))
        except ValueError as error:
            self._unseen = str(error)

    # On the training thread.

    def forward_begins(self) -> None:
        """One forward more."""
        self._forwards += 1

    def step_ends(self, draft: Draft) -> None:
        """What the step went through is known, its duration not always."""
        self._work, self._forwards = Work(self._forwards, draft.pending), 0

    def step_timed(self, draft: Draft, cause: Cause) -> None:  # noqa: ARG002 - whatever ended it
        """Have the scalars made on the publisher's thread."""
        if self._config.method != "off":
            seconds = next((item.value for item in draft.pending if item.name == "step_seconds"), 0.0)
            if isinstance(seconds, float) and seconds > 0:
                draft.later.append(functools.partial(self._scalars, self._work, seconds))

    # On the publisher's thread.

    def _scalars(self, work: Work, seconds: float) -> list[Scalar]:
        found = self._flops(work)
        if found is None:
            return []
        flops, method = found
        if not 0 < flops < math.inf:  # as when no token or NaN was logged
            return []
        tflops, peak = flops / seconds / 1e12, self._known_peak()
        scalars = [Scalar("tflops_per_gpu", tflops, "TFLOP/s", {"method": method})]
        if peak is not None:
            scalars.append(Scalar("mfu", tflops / peak, "ratio", {"method": method}))
        return scalars

    def _flops(self, work: Work) -> tuple[float, str] | None:
        """Return the FLOPs of the step on this rank's device, and by which method; None where they are not known."""
        config, ranks = self._config, self._parallel.ranks
        logged, tokens, samples = (work.amount(name) for name in ("flops", "tokens", "samples"))
        if logged is not None:
            return logged, GIVEN
        if config.flops_per_token is not None and tokens is not None:
            return config.flops_per_token * tokens / ranks, GIVEN
        if config.flops_per_sample is not None and samples is not None:
            return config.flops_per_sample * samples / ranks, GIVEN
        if config.method == GIVEN or (tokens is None and samples is None and not work.forwards):
            return None
        costs = self._known_costs()
        flops = None if costs.cost is None else _flops_of(costs.cost, work.forwards, tokens, samples)
        if costs.cost is None or flops is None:
            return None
        if costs.remark and (tokens is not None or samples is not None):  # to whoever has asked by logging an amount
            self._costs = replace(costs, remark=None)
            self._tell(costs.remark)
        return flops, costs.cost.method

    def _known_costs(self) -> Costs:
        if self._costs is None:
            self._costs = Costs.of(
                self._framework,
                self._parallel,
                self._unseen if self._inputs is None else self._inputs,
                method=self._config.method,
                spent=self._count_took,
            )
        return self._costs

    def _count_took(self, cpu_seconds: float) -> None:
        self.cpu_seconds += cpu_seconds

    def _known_peak(self) -> float | None:
        if not self._peak_is_known:
            self._peak_is_known = True
            name = device_name(self._device)
            if name is not None:
                dtype = compute_dtype(self._framework, None if self._inputs is None else self._inputs.dtype)
                self._peak = peak_tflops(name, dtype, tf32=multiplies_in_tf32())
                if self._peak is None:
                    self._tell(f"no peak FLOP/s of {name!r} in {dtype} is known, so no MFU: set throughput.peak_tflops")
        return self._peak


def _flops_of(cost: Cost, forwards: int, tokens: float | None, samples: float | None) -> float | None:
    if tokens is not None and cost.per_token is not None:
        return cost.per_token * tokens
    if samples is not None and cost.per_sample is not None:
        return cost.per_sample * samples
    return cost.per_forward * forwards if cost.per_forward is not None and forwards else None


def device_name(device: torch.device) -> str | None:
    """Return what torch calls an accelerator; None for a CPU, and for one that does not say."""
    if device.type == "cpu":
        return None
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if ask is None else str(ask(device))


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
