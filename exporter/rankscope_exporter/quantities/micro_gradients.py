"""Gradients of single micro-batches: each backward pass by itself, never the running sum that `.grad` holds."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch

from rankscope_contract.kinds import Kind
from rankscope_exporter.quantities.base import Gate, Hooking, Quantity, QuantityOptions, Subject, Table
from rankscope_exporter.quantities.handles import hook_gradient


class MicroGradients(Quantity):
    """`grad_unreduced` with a `micro_step`: what one backward pass adds to `.grad`, before anything is reduced.

    Read in a hook on the parameter, which sees the gradient before it is accumulated: with bucket views too. Where a
    framework runs several micro-batches at once, the n-th gradient that a parameter gets in a step is micro-batch n.
    """

    name: ClassVar[str] = "micro_gradients"

    def __init__(self, subject: Subject, options: QuantityOptions | None = None) -> None:
        super().__init__(subject, options)
        self._interleaved = subject.framework.interleaves_micro_batches
        self._rows: dict[tuple[int, int], range | None] = {}
        self._passes = [0] * len(self.subject.parameters)
        self._hooked: set[int] = set()
        self._hooking: Hooking | None = None
        self._gate: Gate | None = None

    def install(self, hooking: Hooking, gate: Gate) -> None:
        """Hook every parameter that takes gradients."""
        self._hooking, self._gate = hooking, gate
        self._hook_parameters(hooking, gate)

    def step_begins(self, table: Table) -> None:  # noqa: ARG002 - the signature of every moment
        """Count from the first micro-batch; a parameter may have been thawed since."""
        self._passes = [0] * len(self.subject.parameters)
        if self._hooking is not None and self._gate is not None:
            self._hook_parameters(self._hooking, self._gate)

    def _hook_parameters(self, hooking: Hooking, gate: Gate) -> None:
        for index, parameter in enumerate(self.subject.tensors()):
            if parameter is not None and parameter.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                read = functools.partial(self._read, index)
                hook = hooking.guarded("a micro-batch's gradient", read, gate)
                hook_gradient(hooking, self.subject, index, hook)

    def _read(self, index: int, gradient: torch.Tensor) -> None:
        assert self._hooking is not None
        assert self._gate is not None  # both are set before any hook exists
        self._hooking.gradient_arrives()
        if not self._gate.is_open:
            return
        micro_step = self._passes[index] if self._interleaved else self._hooking.micro_step
        self._passes[index] += 1
        table = self._gate.table
        key = index, micro_step
        if key not in self._rows:
            entry = self.parameter_entry(Kind.GRAD_UNREDUCED, index, local=True, micro_step=micro_step)
            self._rows[key] = table.add([entry], [self.subject.owners()[index]])
        rows = self._rows[key]
        if rows is not None:
            table.measure([gradient], rows)
