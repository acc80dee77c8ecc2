"""Tests of the sum over micro-batches whose gradients are reduced separately: its conditions, memory and notices."""

from typing import Any

import pytest
import torch
from tests.exporter.parts import config_of, published, session_of
from torch import nn

from rankscope_exporter import Monitor
from rankscope_exporter.adapters import Framework
from rankscope_exporter.adapters.base import FrameworkTraits
from rankscope_exporter.measure.quantities import gradients
from rankscope_exporter.measure.quantities.gradients import free_bytes, host_bytes

ABUNDANT = 1 << 40
SIZE = 4 * (3 * 2 + 2)  # float32 weight and bias


class Reducing(Framework):
    """Reduces the gradients of each backward pass, as DDP does without `no_sync()`. Here it multiplies by a factor."""

    traits = FrameworkTraits(reduces=True, reduces_each_micro_batch=None)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return False

    def reduces_in_backward(self) -> bool:
        return True


class Run:
    def __init__(self, *, every: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = config_of("gradients", every=every, options={"gradients": options}, statistics="torch")
        self.monitor = Monitor(config).attach(Reducing(self.model), self.optimizer)
        self.owned: list[float] = []
        self.notices: list[str] = []

    @property
    def sums(self) -> Any:
        return session_of(self.monitor).active_quantities.quantity("gradients")._sums

    def step(self, micros: int, *, updates: bool = True) -> None:
        own = torch.zeros(2, 3)
        for micro in range(micros):
            before = None if self.model.weight.grad is None else self.model.weight.grad.clone()
            self.model(torch.full((4, 3), float(micro + 1))).square().mean().backward()
            gradient = self.model.weight.grad
            own += gradient if before is None else gradient - before
            gradient.mul_(0.5)  # the result of the reduction
        self.owned.append(float(own.norm()))
        if updates:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def ends(self) -> dict[int, float | None]:
        """Detach, and return the norm of the weight's own gradient by step; the notices are in `notices`."""
        found = published(self.monitor)
        norms: dict[int, float | None] = {r.step: None for r in found.records if r.statistics is not None}
        norms |= {step: norm for (step, name), norm in found.norms("grad_unreduced").items() if name == "weight"}
        self.notices = [event.message for event in found.events if event.message.startswith("gradients:")]
        self.monitor.detach()
        assert 0 == self.monitor.faults
        return norms


@pytest.fixture(autouse=True)
def abundant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: ABUNDANT)


TAKES = "the sum of this rank's own gradients takes 32 B of memory at sampled steps"


@pytest.mark.parametrize(
    ("options", "free", "micros", "kept", "notice"),
    [
        ({}, ABUNDANT, 3, [False, True, True], TAKES),  # after the first accumulation
        ({}, 4 * SIZE, 2, [False, True, True], TAKES),
        ({}, 4 * SIZE - 1, 2, [False, False, False], "set sum_micro_batches = true to keep the sum"),
        ({}, ABUNDANT, 1, [True, True, True], None),  # the gradient itself
        ({"sum_micro_batches": True}, 0, 2, [True, True, True], TAKES),
        ({"sum_micro_batches": False}, ABUNDANT, 2, [False, False, False], None),
    ],
    ids=["abundant", "a quarter of free memory", "more than a quarter", "one micro-batch", "requested", "declined"],
)
def test_sum_is_kept_if_it_is_requested_or_memory_is_abundant(options, free, micros, kept, notice, monkeypatch):
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: free)
    run = Run(**options)
    for _ in range(3):
        run.step(micros=micros)
    norms = run.ends()

    owned = [pytest.approx(own) if is_kept else None for own, is_kept in zip(run.owned, kept, strict=True)]
    assert owned == [norms[step] for step in (1, 2, 3)]
    assert (0 if notice is None else 1) == len(run.notices)
    assert notice is None or notice in run.notices[0]


def test_parameter_may_be_frozen_and_unfrozen_between_sampled_steps():
    run = Run(sum_micro_batches=True, every=2)
    for step in range(1, 6):
        run.model.bias.requires_grad_(step not in (3, 4))
        run.step(micros=2)
    norms = run.ends()

    assert {1, 3, 5} == norms.keys()
    assert [run.owned[step - 1] for step in norms] == pytest.approx([*norms.values()])


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


# Free memory of a host and of the control groups of a process.

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    500 kB\n"
NESTED = {"job/memory.max": "300000", "job/memory.current": "100000"}
NESTED |= {"job/step/memory.max": "max", "job/step/memory.current": "90000"}
VERSION_1 = {"memory/job/memory.limit_in_bytes": "1000", "memory/job/memory.usage_in_bytes": "1200"}


@pytest.mark.parametrize(
    ("meminfo", "own_groups", "groups", "free"),
    [
        *((MEMINFO, "", {}, 500 * 1024), (MEMINFO, "0::/job/step\n", NESTED, 200_000)),
        *((MEMINFO, "5:cpu:/job\n4:memory:/job\n", VERSION_1, 0), ("", "", {}, 0), ("MemAvailable:\n", "", {}, 0)),
        ("MemAvailable: much kB\n", "", {}, 0),
    ],
)
def test_least_free_memory_of_system_and_control_groups_counts(meminfo, own_groups, groups, free, tmp_path):
    """Unknown free memory is zero."""
    files = {"meminfo": meminfo, "self/cgroup": own_groups, **{f"groups/{name}": text for name, text in groups.items()}}
    for name, text in files.items():
        if text:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    assert free == host_bytes(tmp_path, tmp_path / "groups")


def test_ranks_of_one_host_share_the_free_memory(monkeypatch):
    monkeypatch.setattr(gradients, "host_bytes", lambda: 1000)
    found = []
    for ranks in ("1", "4", "0", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(free_bytes(torch.device("cpu")))

    assert [1000, 250, 1000, 1000] == found
    assert 0 == free_bytes(torch.device("meta"))
