"""Any sequence of passes, updates, errors, interrupts and logged numbers, compared with a model of `docs/steps.md`."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exporter.parts import Watched
from tests.properties import examples
from torch import nn

from rankscope_exporter.publish import publisher
from rankscope_exporter.training.step_tracker import Signal, StepTracker

EARLY, LATE = "early", "late"  # names of logged numbers; the first one is logged before the training begins


@dataclass
class Step:
    passes: dict[float, bool] = field(default_factory=dict)  # whether a result, by its norm, had a backward pass
    has_forward: bool = False  # also one that raised
    gradient: float | None = None  # norm after the last backward pass; None without one, NaN if it raised
    row: float | None = None  # norm of the gradient that the monitor can read
    is_updated: bool = False
    is_failed: bool = False  # the last update raised an error
    logged: list[tuple[str, float]] = field(default_factory=list)


class Expected:
    """The steps of a sequence by the rules of `docs/steps.md`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.is_open = self.is_cleared = False
        self.early: set[str] = set()  # logged before the first step
        self.names: set[str] = set()  # logged since the last forward pass
        self.waiting: list[tuple[str, float]] = []  # numbers for the next step
        self.alone: list[tuple[int | None, str, float]] = []  # numbers for which no step began

    @property
    def now(self) -> Step:
        return self.steps[-1]

    def begin(self, *, is_over: bool) -> None:
        if not self.is_open or is_over:
            self.steps.append(Step(logged=self.waiting))
            self.waiting, self.is_open, self.names = [], True, set()

    def is_over(self) -> bool:
        if not self.is_open:
            return False
        is_left = self.now.gradient is not None and self.is_cleared
        return self.now.is_updated or self.now.is_failed or is_left

    def forward(self, norm: float | None) -> None:
        self.begin(is_over=self.is_over())
        self.now.is_failed = False
        self.add_pass(norm)

    def add_pass(self, norm: float | None) -> None:
        self.now.has_forward = True
        if norm is not None:
            self.now.passes[norm] = False
        self.names = set()

    def backward(self, gradient: float, reached: list[float]) -> None:
        is_same = self.is_open and not self.now.is_updated and self.now.has_forward and self.now.gradient is not None
        self.begin(is_over=not is_same and self.is_over())
        self.now.is_failed = False
        self.reach(gradient, reached)
        self.is_cleared = False

    def reach(self, gradient: float, reached: list[float]) -> None:
        self.now.gradient = self.now.row = gradient
        self.now.passes |= dict.fromkeys(self.now.passes.keys() & set(reached), True)

    def update(self, *, raises: bool, gradient: float | None, has_closure: bool = False) -> None:
        self.begin(is_over=self.is_open and (self.now.is_updated or (has_closure and self.now.is_failed)))
        if self.now.gradient is None and gradient is not None:
            self.now.row = gradient
        self.now.is_failed, self.now.is_updated = raises, self.now.is_updated or not raises

    def log(self, name: str, value: float) -> None:
        self.early |= set() if self.steps else {name}
        is_next = name in self.early | self.names
        if is_next and (not self.is_open or self.now.is_updated):
            if not self.is_open and name in dict(self.waiting):
                self.flush()
            self.waiting.append((name, value))
        else:
            self.now.logged.append((name, value))
            self.names.add(name)

    def flush(self) -> None:
        number = len(self.steps) or None
        self.alone += [(number, *item) for item in self.waiting]
        self.waiting = []


class Optimizer(torch.optim.SGD):
    """Its step calls that of SGD. Torch calls the hooks of both, if another optimizer is an SGD."""

    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if self.error is not None and closure is None:
            raise self.error
        return super().step(closure)


class Loop:
    """Runs a sequence with a monitor, and passes each action to the model of the rules."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = Optimizer(self.net.parameters(), lr=0.01)
        quantities = ["gradients", "activations"]
        self.watched = Watched(self.net, self.optimizer, quantities=quantities, rules=[])
        self.expected = Expected()
        self.results: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []  # results without a backward pass
        self.count = 0
        self.last = self.net[2]
        torch.optim.SGD(self.net.parameters())

    def attempt(self, action: Callable[[], Any]) -> None:
        with contextlib.suppress(ArithmeticError, KeyboardInterrupt):
            action()

    def fail(self, error: type[BaseException]) -> None:
        raise error

    def forward(self, error: type[BaseException] | None = None, *, in_closure: bool = False) -> None:
        handle = self.last.register_forward_pre_hook(lambda *_: self.fail(error) if error else None)
        norm = None
        try:
            result = self.net(torch.randn(5, 3))
            norm = float(result.detach().norm())
            self.results.append(result)
        except (ArithmeticError, KeyboardInterrupt):
            if in_closure:
                raise
        finally:
            handle.remove()
            if in_closure:
                self.expected.add_pass(norm)
            else:
                self.expected.forward(norm)

    def gradient(self) -> float | None:
        found = [item.grad for item in self.net.parameters() if item.grad is not None]
        return float(torch.stack([item.norm() for item in found]).norm()) if found else None

    def backward(self, error: type[BaseException] | None = None, *, in_closure: bool = False) -> None:
        if not self.results:
            return
        loss = sum(item.square().sum() for item in self.results)
        reached, self.results = [float(item.detach().norm()) for item in self.results], []
        handle = self.net[0].weight.register_hook(lambda _: self.fail(error) if error else None)
        try:
            loss.backward()
        except (ArithmeticError, KeyboardInterrupt):
            if in_closure:
                raise
        finally:
            handle.remove()
            gradient = math.nan if error else self.gradient()
            if in_closure:
                self.expected.reach(gradient, reached)
            else:
                self.expected.backward(gradient, reached)

    def update(self, error: type[BaseException] | None = None) -> None:
        self.expected.update(raises=error is not None, gradient=self.gradient())
        self.results = []  # their graphs need the present parameters
        self.optimizer.error = error() if error else None
        self.attempt(self.optimizer.step)

    def closure(self, error: type[BaseException] | None = None) -> None:
        self.expected.update(raises=error is not None, gradient=None, has_closure=True)

        def compute() -> None:
            self.zero()
            self.results = []
            self.forward(in_closure=True)
            self.backward(in_closure=True)
            self.expected.is_cleared = False
            if error:
                raise error

        self.attempt(lambda: self.optimizer.step(compute))

    def zero(self) -> None:
        self.optimizer.zero_grad()
        self.expected.is_cleared = True

    def drop(self, *, is_kept: bool) -> None:
        if self.results:
            result = self.results.pop()
            self.kept += [result] if is_kept else []

    def evaluate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            self.net(torch.randn(2, 3))
        self.net.train()

    def end_step(self) -> None:
        self.watched.monitor.end_step()
        self.expected.is_open = False

    def log(self, name: str) -> None:
        self.count += 1
        self.watched.monitor.log(**{name: self.count})
        self.expected.log(name, self.count)

    def compare(self) -> None:
        self.watched.finish()
        self.expected.flush()
        steps, watched = dict(enumerate(self.expected.steps, 1)), self.watched
        assert list(steps) == watched.measured()
        skipped = [number for number, step in steps.items() if step.gradient is not None and not step.is_updated]
        assert skipped == [record.step for record in watched.records if record.is_skipped]
        reached = {n: [norm for norm, is_reached in step.passes.items() if is_reached] for n, step in steps.items()}
        passes = {(n, m): norm for n, step in steps.items() for m, norm in enumerate(reached[n] or step.passes)}
        rows = [row for row in watched.rows("act_out") if row.entry.tensor == ""]
        assert pytest.approx(passes) == {(row.step, row.entry.micro_step): row.numbers["norm"] for row in rows}
        gradients = dict.fromkeys(steps, 0.0)
        for row in watched.rows("grad_reduced"):
            gradients[row.step] += row.numbers["norm"] ** 2
        known = {n: (step.row or 0) ** 2 for n, step in steps.items() if not math.isnan(step.row or 0)}
        assert pytest.approx(known, rel=1e-4) == {number: gradients[number] for number in known}
        logged = [(n, *item) for n, step in steps.items() for item in step.logged] + self.expected.alone
        assert sorted(logged, key=str) == sorted(
            ((step, name, value) for name in (EARLY, LATE) for step, value in watched.scalars(name)), key=str
        )
        assert 0 == watched.faults


ERRORS = (ArithmeticError, KeyboardInterrupt)
ACTIONS = [
    *(Loop.forward, Loop.backward, Loop.update, Loop.zero, Loop.closure, Loop.evaluate, Loop.end_step),
    *(functools.partial(Loop.log, name=name) for name in (EARLY, LATE)),
    *(functools.partial(Loop.drop, is_kept=is_kept) for is_kept in (False, True)),
    *(functools.partial(m, error=e) for m in (Loop.forward, Loop.backward, Loop.update, Loop.closure) for e in ERRORS),
]


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=20))
def test_steps_of_any_sequence_are_those_of_the_rules(actions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "IDLE_FLUSH_SECONDS", 1e6)
        loop = Loop()
        loop.log(EARLY)
        for action in actions:
            action(loop)
        loop.compare()


DIAGRAM = re.compile(r"^ +(\w+) --> (\w+): (\w+)(?: \[.*\])?( / end)?$", re.MULTILINE)
BEFORE: dict[str, list[list[Signal]]] = {
    "idle": [[]],
    "open": [[Signal.FORWARD], [Signal.UPDATE]],
    "gradients": [[Signal.BACKWARD], [Signal.FORWARD, Signal.BACKWARD], [Signal.BACKWARD, Signal.UPDATE]],
    "updated": [[Signal.UPDATE, Signal.UPDATED]],
}


def transitions() -> Iterator[tuple[str, str, str, bool]]:
    """Yield each transition of the tracker: the stages before and after it, the signal, and whether a step ends."""
    for stage, sequences in BEFORE.items():
        for sequence, signal in itertools.product(sequences, Signal):
            for cleared, again, closure in itertools.product((False, True), repeat=3):
                tracker = StepTracker(running_updates=lambda now=signal: int(now is Signal.UPDATE))
                for earlier in sequence:
                    tracker.move(earlier)
                assert stage == tracker.stage.value
                ended = tracker.move(signal, lambda it=cleared: it, repeated=again, computes_gradients=closure)
                yield stage, tracker.stage.value, signal.value, ended is not None


def test_diagram_has_the_transitions_of_the_tracker():
    found = DIAGRAM.findall(Path("docs/steps.md").read_text())
    assert set(transitions()) == {(before, after, signal, bool(end)) for before, after, signal, end in found}
