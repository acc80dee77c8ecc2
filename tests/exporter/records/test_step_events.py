"""The observers that are called at each event of a step, and plan entries that are created when they are read."""

import logging

import pytest
import torch

from rankscope_contract.model.schema import PlanEntry
from rankscope_exporter.base.errors import ErrorBoundary
from rankscope_exporter.quantities.base import Quantity
from rankscope_exporter.records.pending_step import StepEvents, StepObserver
from rankscope_exporter.records.plan_entries import Descriptions, ParameterEntries, Placed, entries_at


class Noting(StepObserver):
    """Adds the events of a step to a list that it may share with other observers."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def on_before_step(self, step: int) -> None:
        self.calls.append(f"{self.name} before {step}")

    def on_step_begin(self, step: int) -> None:
        self.calls.append(f"{self.name} begin {step}")


class Failing(StepObserver):
    def on_step_begin(self, step: int) -> None:
        raise RuntimeError(f"step {step}")


def test_observers_are_called_in_order_and_a_failing_one_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    boundary = ErrorBoundary()
    events = StepEvents(boundary, [Noting("first", calls), Failing(), Noting("next", calls)])
    with caplog.at_level(logging.ERROR, "rankscope"):
        events.on_before_step(1)
        events.on_step_begin(1)
        events.on_step_begin(2)

    steps = [("before", 1), ("begin", 1), ("begin", 2)]
    assert ([f"{name} {what} {n}" for what, n in steps for name in ("first", "next")], 2) == (calls, boundary.count)
    assert ["Failing.on_step_begin failed, training continues: RuntimeError('step 1')"] == caplog.messages


def events_of(owner: object) -> set[str]:
    return {name for name in vars(owner) if name.startswith("on_")}


def test_every_event_of_observers_and_quantities_can_be_emitted() -> None:
    assert events_of(StepObserver) == events_of(StepEvents(ErrorBoundary()))
    assert {"on_gradient_ready"} == events_of(Quantity) - events_of(StepObserver)


BOTH = Descriptions([("a.weight", 0), ("b.weight", 1)], [((3,), torch.float32), ((2, 2), torch.bfloat16)])
ENTRIES = ParameterEntries([("first", BOTH)]) + ParameterEntries([("second", BOTH)])
ALL = [PlanEntry(kind, name, index) for kind in ("first", "second") for name, index in BOTH.fields]


def test_entries_of_each_kind_are_those_of_all_parameters():
    nothing = ParameterEntries([("first", Descriptions([], []))])

    assert ALL == list(ENTRIES) == [ENTRIES[position] for position in range(4)]
    assert (ALL[-1], ALL[1:3], {"first", "second"}) == (ENTRIES[-1], ENTRIES[1:3], ENTRIES.kinds)
    assert ([], set()) == (list(nothing), nothing.kinds)


def test_specs_of_several_kinds_are_rejected():
    assert list(BOTH.specs) == list(ENTRIES.specs(range(2, 4)))
    with pytest.raises(ValueError, match="several kinds"):
        ENTRIES.specs(range(1, 3))


def test_table_rows_between_other_entries_have_their_entries():
    other, placed = PlanEntry("other", "c"), Placed(ENTRIES, 5)

    assert (other, ALL[0], ALL[3]) == entries_at([2, 5, 8], [other, placed, placed])
