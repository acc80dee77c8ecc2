"""Computes TFLOP/s of this rank's device, and the share of the device's peak (MFU), for steps with a known duration.

The publisher thread computes both values.

A unit of work is a token, a sample or a forward pass. The FLOPs of a step are the FLOPs of one unit, multiplied by the
number of units in the step. The FLOPs of one unit come from the settings or from a formula. No code of the user runs to
count them. Recomputed activations do not count: the result is the model FLOPs utilization (MFU), not the hardware FLOPs
utilization. If the number of units, the FLOPs of one unit or the peak is unknown, nothing is published.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from rankscope_exporter.adapters import Framework
from rankscope_exporter.adapters.base import Hooking
from rankscope_exporter.observers.throughput.costs import (
    Cost,
    Inputs,
    NoFormulaError,
    Parallel,
    ThroughputConfig,
    compute_dtype,
    cost_of,
    multiplies_in_tf32,
    peak_tflops,
)
from rankscope_exporter.records.pending_step import Cause, Pending, PendingStep, StepObserver
from rankscope_exporter.records.step_record import Scalar

GIVEN: Final = "given"

_COUNT: Final = "use rankscope.count_flops()"
_LOG_GIVEN: Final = "call monitor.log(tokens=…) or monitor.log(samples=…)"


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work of one step on this rank: the number of forward passes, and the scalars that the script logged."""

    forwards: int
    logged: Sequence[Pending]

    def amount(self, name: str) -> float | None:
        """Return the sum of the scalars that the script logged as `name` in this step; None if it logged none.

        Waits until a logged tensor was copied to the host.
        """
        parts = [item.scalar().value for item in self.logged if item.name == name]
        return sum(parts) if parts else None


class Throughput(StepObserver):
    """Computes TFLOP/s and MFU from the duration and the amount of work of each step.

    A hook on the first training forward reads the shapes of the arguments of this forward pass.
    """

    def __init__(
        self,
        framework: Framework,
        config: ThroughputConfig,
        parallel: Parallel,
        *,
        device: torch.device,
        report: Callable[[str], None],
        is_first: bool = True,
    ) -> None:
        """Store the function `report`, which publishes its text as an event and as a console line.

        `is_first` is true on rank 0.
        """
        self._framework = framework
        self._config = config
        self._parallel = replace(parallel, ranks=config.model_parallel or parallel.ranks)
        self._device = device
        self._report = report
        self._reports_absence = is_first or parallel.pipeline > 1  # without pipeline, all ranks have the same reason
        self._inputs: Inputs | None = None
        self._cost: Cost | None = None
        self._cost_is_known = False
        self._absence = "the steps log no tokens; call monitor.log(tokens=…)"
        self._has_reported = False
        self._peak: float | None = config.peak_tflops
        self._peak_is_known = self._peak is not None
        self._forwards = 0
        self._work = Work(0, ())

    def install(self, hooking: Hooking) -> None:
        """Install the hook that reads the shapes of the arguments of the first training forward."""
        if self._config.method == "off" or self._framework.announced is not None:
            return

        def look(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self._framework.module.training and torch.is_grad_enabled():
                handle.remove()
                self._inputs = Inputs.of(args, kwargs, _autocast(self._device))

        hook = hooking.always("reading the shapes of the arguments of a forward pass", look)
        handle = self._framework.model.register_forward_pre_hook(hook, with_kwargs=True)
        hooking.keep(handle)

    # On the training thread.

    def on_forward_begin(self) -> None:
        """Add a forward pass to the count of the current step."""
        self._forwards += 1

    def on_forward_failed(self) -> None:
        """Subtract a forward pass that raised an error from the count of the current step."""
        self._forwards -= 1

    def on_step_end(self, pending_step: PendingStep) -> None:
        """Store the number of forward passes and the logged scalars of the step. The step's duration may be unknown."""
        self._work, self._forwards = Work(self._forwards, pending_step.pending), 0

    def on_step_timed(self, pending_step: PendingStep, cause: Cause) -> None:
        """Schedule the computation of TFLOP/s and MFU on the publisher thread."""
        if self._config.method != "off" and cause != "end":
            seconds = next((item.value for item in pending_step.pending if item.name == "step_seconds"), 0.0)
            if isinstance(seconds, float) and seconds > 0:
                pending_step.later.append(functools.partial(self._scalars, self._work, seconds))

    # On the publisher's thread.

    def _scalars(self, work: Work, seconds: float) -> list[Scalar]:
        found = self._flops(work)
        if found is None:
            return []
        flops, method = found
        if not 0 < flops < math.inf:  # for example 0 tokens or NaN was logged
            return []
        tflops, peak = flops / seconds / 1e12, self._known_peak()
        scalars = [Scalar("tflops_per_gpu", tflops, "TFLOP/s", {"method": method})]
        if peak is not None:
            scalars.append(Scalar("mfu", tflops / peak, "ratio", {"method": method}))
        return scalars

    def _flops(self, work: Work) -> tuple[float, str] | None:
        """Return the FLOPs of the step on this rank's device, and the method that computed this number.

        Return None if the FLOPs are unknown.
        """
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
        try:
            self._find_cost()
        except ReferenceError:  # the script has deleted its model
            return None
        flops = None if self._cost is None else _flops_of(self._cost, work.forwards, tokens, samples)
        if self._cost is None or flops is None:
            takes_tokens = self._inputs is None or self._inputs.tokens or self._inputs.are_embeddings
            self._report_absence(is_expected=tokens is not None and bool(takes_tokens))
            return None
        return flops, self._cost.method

    def _find_cost(self) -> None:
        if self._cost_is_known:
            return
        self._cost_is_known = True
        try:
            self._cost = cost_of(self._framework, self._parallel, self._inputs, self._config.method)
        except NoFormulaError as error:
            given = self._config.flops_per_token or self._config.flops_per_sample
            self._absence = f"{error}; {_LOG_GIVEN if given else _COUNT}"

    def _report_absence(self, *, is_expected: bool) -> None:
        """Report once why TFLOP/s and MFU are not published, if the user probably expects them.

        This is so if the script logs the tokens that its model takes, or if a throughput setting is not the default.
        """
        if self._has_reported or not self._reports_absence:
            return
        self._has_reported = True
        if is_expected or self._config != ThroughputConfig():
            self._report(f"TFLOP/s and MFU are absent: {self._absence}")

    def _known_peak(self) -> float | None:
        if not self._peak_is_known:
            self._peak_is_known = True
            name = device_name(self._device)
            if name is not None:
                dtype = compute_dtype(self._framework, None if self._inputs is None else self._inputs.dtype)
                self._peak = peak_tflops(name, dtype, tf32=multiplies_in_tf32())
                if self._peak is None:
                    self._report(
                        f"the peak FLOP/s of {name!r} in {dtype} is unknown: set throughput.peak_tflops for MFU"
                    )
        return self._peak


def _flops_of(cost: Cost, forwards: int, tokens: float | None, samples: float | None) -> float | None:
    if tokens is not None and cost.per_token is not None:
        return cost.per_token * tokens
    if samples is not None and cost.per_sample is not None:
        return cost.per_sample * samples
    return cost.per_forward * forwards if cost.per_forward is not None and forwards else None


def device_name(device: torch.device) -> str | None:
    """Return torch's name of an accelerator; None for a CPU, or if torch has no names for this type of device."""
    if device.type == "cpu":
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if name is None else str(name(device))


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
