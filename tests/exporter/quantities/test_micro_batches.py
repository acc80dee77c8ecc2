"""Tests of the sum over micro-batches whose gradients are reduced separately: its conditions, memory and notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.exporter.parts import session_of
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.adapters.base import FrameworkTraits
from rankscope_exporter.adapters.ddp import Plain
from rankscope_exporter.base.errors import ConfigError
from rankscope_exporter.quantities import gradients

ABUNDANT = 1 << 40
SIZE = 4 * (3 * 2 + 2)  # float32 weight and bias


class Reducing(Plain):
    """Reduces the gradients of each backward pass, as DDP does without `no_sync()`. Here it multiplies by a factor."""

    traits = FrameworkTraits(reduces=True, reduces_each_micro_batch=None)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return False

    def reduces_in_backward(self) -> bool:
        return True


class Run:
    """A model with gradients that the test reduces, and its measurements."""

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = MonitorConfig(
            console=False,
            exit_wait_seconds=0,
            every=every,
            quantities=("gradients",),
            options={"gradients": options},
            statistics="torch",
        )
        self.monitor = Monitor(config).attach(Reducing(self.model), self.optimizer)
        self.owned: list[torch.Tensor] = []
        self.notices: list[str] = []

    @property
    def session(self) -> Any:
        return session_of(self.monitor)

    @property
    def sums(self) -> Any:
        return self.session.active_quantities.quantity("gradients")._sums

    def step(self, micros: int, *, updates: bool = True) -> None:
        own = torch.zeros(2, 3)
        for micro in range(micros):
            before = None if self.model.weight.grad is None else self.model.weight.grad.clone()
            self.model(torch.full((4, 3), float(micro + 1))).square().mean().backward()
            gradient = self.model.weight.grad
            own += gradient if before is None else gradient - before
            gradient.mul_(0.5)  # the result of the reduction
        self.owned.append(own)
        if updates:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def norms(self) -> dict[int, float | None]:
        """Return the norm of the weight's own gradient by step."""
        self.monitor.end_step()
        self.session.publisher.stop(30.0)
        found: dict[int, float | None] = {}
        for record in self.session.channel.ring.after(-1, 1 << 30).records:
            if record.statistics is not None:
                entries = record.statistics.plan.plan.entries
                place = next(
                    i for i, item in enumerate(entries) if (item.kind, item.tensor) == ("grad_unreduced", "weight")
                )
                found[record.step] = record.statistics.values.to_pylist()[place]
        return found

    def _messages(self) -> list[str]:
        records = self.session.channel.ring.after(-1, 1 << 30).records
        messages = [event.message for record in records for event in record.events]
        return [message for message in messages if message.startswith("gradients:")]

    def ends(self) -> dict[int, float | None]:
        """Detach, and return the norms; the notices are in `notices`."""
        norms = self.norms()
        self.notices = self._messages()
        self.monitor.detach()
        assert 0 == self.monitor.faults
        return norms


@pytest.fixture(autouse=True)
def abundant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: ABUNDANT)


def test_sum_is_kept_from_the_step_after_the_first_accumulation():
    run = Run()
    for _ in range(3):
        run.step(micros=3)
    norms = run.ends()

    assert norms[1] is None
    assert [float(own.norm()) for own in run.owned[1:]] == [pytest.approx(norms[step]) for step in (2, 3)]
    assert ["gradients: the sum of this rank's own gradients takes 32 bytes of memory at sampled steps"] == run.notices


def test_requested_sum_is_kept_from_the_first_step():
    run = Run(sum_micro_batches=True)
    run.step(micros=2)

    assert float(run.owned[0].norm()) == pytest.approx(run.ends()[1])


def test_parameter_may_be_frozen_and_unfrozen_between_sampled_steps():
    run = Run(sum_micro_batches=True, every=2)
    for step in range(1, 6):
        run.model.bias.requires_grad_(step not in (3, 4))
        run.step(micros=2)
    norms = run.ends()

    assert {1, 3, 5} == norms.keys()
    assert [float(run.owned[step - 1].norm()) for step in norms] == [pytest.approx(norm) for norm in norms.values()]


def test_without_accumulation_no_sum_is_kept_and_no_hook_registered():
    run = Run()
    for _ in range(2):
        run.step(micros=1)

    assert set() == run.sums.hooks.hooked
    norms = run.ends()
    assert [float(own.norm()) for own in run.owned] == [pytest.approx(norms[step]) for step in (1, 2)]
    assert [] == run.notices


def test_declined_sum_is_absent_without_a_notice():
    run = Run(sum_micro_batches=False)
    for _ in range(3):
        run.step(micros=2)

    assert {1: None, 2: None, 3: None} == run.ends()
    assert [] == run.notices


@pytest.mark.parametrize(("free", "kept"), [(4 * SIZE, True), (4 * SIZE - 1, False)])
def test_automatic_sum_takes_at_most_a_quarter_of_free_memory(free, kept, monkeypatch):
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: free)
    run = Run()
    for _ in range(3):
        run.step(micros=2)
    norms = run.ends()

    assert kept == (norms[3] is not None)
    assert kept or "set sum_micro_batches = true to keep the sum" in run.notices[0]
    assert 1 == len(run.notices)


def test_requested_sum_is_kept_with_little_free_memory(monkeypatch):
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: 0)
    run = Run(sum_micro_batches=True)
    run.step(micros=2)

    assert run.ends()[1] is not None


@pytest.mark.parametrize("updates", [True, False])
def test_sum_is_released_when_the_step_ends(updates):
    """After a step that a gradient scaler skips, the next forward pass releases the sum."""
    run = Run(sum_micro_batches=True, every=2)
    run.step(micros=2, updates=updates)
    if not updates:
        run.model(torch.ones(4, 3))

    assert {} == run.sums._sums
    run.monitor.detach()


def test_out_of_memory_releases_the_sum_and_is_reported_once(monkeypatch):
    run = Run(sum_micro_batches=True)
    run.step(micros=2)
    first = run.sums
    assert first.are_kept is False
    whole = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("copy"):
            raise torch.OutOfMemoryError
        return whole(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    for _ in range(2):
        run.step(micros=2)
    monkeypatch.undo()
    norms = run.ends()

    assert ([True, False, False], {}) == ([norms[step] is not None for step in (1, 2, 3)], first._sums)
    assert ["gradients: out of memory while micro-batches were summed: grad_unreduced is absent from now on"] == [
        message for message in run.notices if "out of memory" in message
    ]


def test_invalid_sum_micro_batches_is_rejected():
    with pytest.raises(ConfigError, match="sum_micro_batches must be true, false or null, not 'yes'"):
        MonitorConfig(options={"gradients": {"sum_micro_batches": "yes"}})
