"""Computes TFLOP/s of this rank's device, and the share of the device's peak (MFU), for steps with a known duration.

The publisher thread computes both values.

The FLOPs of a step are those that the script logs, or those of a token or sample times the number that the script logs.
No code of the user runs to count them. Recomputed activations do not count: the result is the model FLOPs utilization
(MFU), not the hardware FLOPs utilization. What is unknown is not published.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

import torch

from rankscope_exporter.adapters import Framework
from rankscope_exporter.monitors.throughput.costs import (
    NoFormulaError,
    Parallel,
    ThroughputConfig,
    compute_dtype,
    multiplies_in_tf32,
    peak_tflops,
    six_n,
)
from rankscope_exporter.records.record import Cause, Pending, Scalar, StepObserver, StepRecord, Transfer

GIVEN: Final = "given"

SIX_N: Final = "6n"

_AMOUNTS: Final = ("flops", "tokens", "samples")
"""Names of logged numbers from which the FLOPs of a step follow."""


@dataclass(eq=False)
class Throughput(StepObserver):
    """Computes TFLOP/s and MFU from the duration and the amount of work of each step."""

    framework: Framework
    config: ThroughputConfig
    parallel: Parallel
    _: KW_ONLY
    device: torch.device
    report: Callable[[str], None]
    """Function that publishes its text as an event and as a console line."""
    is_first: bool = True
    """True on rank 0."""

    def __post_init__(self) -> None:
        self.parallel = replace(self.parallel, ranks=self.config.model_parallel or self.parallel.ranks)
        # Without a pipeline, all ranks have the same reason.
        self._reports_absence = self.is_first or self.parallel.pipeline > 1
        self._flops_per_token: float | None = None
        self._is_known = False
        self._absence = "the steps log no tokens; call monitor.log(tokens=…)"
        self._has_reported = False
        self._peak: float | None = self.config.peak_tflops
        self._peak_is_known = self._peak is not None
        self._autocast: torch.dtype | None = None

    # On the training thread.

    def on_forward_begin(self) -> None:
        if self._autocast is None and torch.is_autocast_enabled(self.device.type):
            self._autocast = torch.get_autocast_dtype(self.device.type)

    def on_step_timed(self, record: StepRecord, cause: Cause, logged: Sequence[Pending]) -> None:
        if self.config.method != "off" and cause != "end":
            record.later.append(functools.partial(self._scalars, logged, record.pending))

    # On the publisher's thread.

    def _scalars(self, logged: Sequence[Pending], timed: Sequence[Pending]) -> list[Scalar]:
        """Return TFLOP/s and MFU of a step. Waits for copies of logged tensors to the host."""
        seconds: float | Transfer = 0.0
        for item in timed:
            if item.name == "step_seconds":
                seconds = item.value
                break
        if not isinstance(seconds, float) or seconds <= 0 or (found := self._flops(logged)) is None:
            return []
        flops, method = found
        if not 0 < flops < math.inf:  # for example 0 tokens or NaN was logged
            return []
        if not self._peak_is_known:
            self._find_peak()
        tflops = flops / seconds / 1e12
        scalars = [Scalar("tflops_per_gpu", tflops, "TFLOP/s", {"method": method})]
        if self._peak is not None:
            scalars.append(Scalar("mfu", tflops / self._peak, "ratio", {"method": method}))
        return scalars

    def _flops(self, logged: Sequence[Pending]) -> tuple[float, str] | None:
        """Return the FLOPs of the step on this rank's device, and the method that computed this number.

        Return None if the FLOPs are unknown.
        """
        config, ranks = self.config, self.parallel.ranks
        amounts: dict[str, float] = {}
        for item in logged:
            if item.name in _AMOUNTS:
                amounts[item.name] = amounts.get(item.name, 0.0) + item.scalar().value
        tokens, samples = amounts.get("tokens"), amounts.get("samples")
        if "flops" in amounts:
            return amounts["flops"], GIVEN
        if config.flops_per_token is not None and tokens is not None:
            return config.flops_per_token * tokens / ranks, GIVEN
        if config.flops_per_sample is not None and samples is not None:
            return config.flops_per_sample * samples / ranks, GIVEN
        if config.method == GIVEN:
            return None
        try:
            if tokens is not None and not self._is_known:
                self._find_flops_per_token()
        except ReferenceError:  # the script has deleted its model
            return None
        if tokens is None or self._flops_per_token is None:
            self._report_absence(is_expected=tokens is not None)
            return None
        return self._flops_per_token * tokens, SIX_N

    def _find_flops_per_token(self) -> None:
        self._is_known = True
        try:
            self._flops_per_token = six_n(self.framework, self.parallel)
        except NoFormulaError as error:
            self._absence = f"{error}; use rankscope.count_flops()"

    def _report_absence(self, *, is_expected: bool) -> None:
        """Report once why TFLOP/s and MFU are not published, if the user probably expects them.

        This is so if the script logs tokens, or if a throughput setting is not the default.
        """
        if self._has_reported or not self._reports_absence:
            return
        self._has_reported = True
        if is_expected or self.config != ThroughputConfig():
            self.report(f"TFLOP/s and MFU are absent: {self._absence}")

    def _find_peak(self) -> None:
        self._peak_is_known = True
        name = device_name(self.device)
        if name is not None:
            dtype = compute_dtype(self.framework, self._autocast)
            self._peak = peak_tflops(name, dtype, tf32=multiplies_in_tf32())
            if self._peak is None:
                self.report(f"the peak FLOP/s of {name!r} in {dtype} is unknown: set throughput.peak_tflops for MFU")


def device_name(device: torch.device) -> str | None:
    """Return torch's name of an accelerator; None for a CPU, or if torch has no names for this type of device."""
    if device.type == "cpu":
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if name is None else str(name(device))
