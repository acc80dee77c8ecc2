"""Two real trainings compared in the store; the expected result is computed from the tensors at each step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect
from rankscope_storage.diff.diff import DiffSelection, DiffSide, Divergence, Tolerance, divergence

STEPS = 5
QUANTITIES = ("parameters", "gradients", "optimizer_state", "activations", "hashes")
HASHES = {"hashes": {"of": "all", "every": 1}}
CHANGED_AT = 3

Change = Callable[[int, nn.Sequential], None]
Seen = dict[tuple[int, str, str], torch.Tensor]


def nothing(_step: int, _net: nn.Sequential) -> None:
    """Change nothing."""


def one_bit(step: int, net: nn.Sequential) -> None:
    """Change one weight of the third layer to the next representable number, before a step."""
    if step == CHANGED_AT:
        flat = net[2].weight.data.view(-1)
        flat[5] = torch.nextafter(flat[5], torch.tensor(torch.inf))


def scaled(step: int, net: nn.Sequential) -> None:
    """Multiply a layer by 1.1, before a step."""
    if step == CHANGED_AT:
        net[2].weight.data.mul_(1.1)


def train(store: Path, run: str, change: Change = nothing, *, steps: int = STEPS, width: int = 8) -> Seen:
    """Train and store `run`; return the tensors, which the test records itself."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    config = MonitorConfig(
        quantities=QUANTITIES, options=HASHES, console=False, exit_wait_seconds=0, statistics="torch"
    )
    seen: Seen = {}
    with Monitor(config).attach(net, optimizer) as monitor:
        assert monitor.address is not None
        read = Reader(monitor.address)
        for step in range(1, steps + 1):
            change(step, net)
            data = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            loss = net(data).square().mean()
            monitor.log(loss=loss)
            loss.backward()
            note(seen, step, "param_before", net, lambda parameter: parameter)
            note(seen, step, "grad_reduced", net, lambda parameter: parameter.grad)
            for name, layer in net.named_children():
                data = copy.deepcopy(layer)(data).detach()
                seen[step, "act_out", name] = data
            optimizer.step()
            note(seen, step, "param_after", net, lambda parameter: parameter)
            optimizer.zero_grad()
        monitor.end_step()
        wait_until(lambda: {row.step for row in read.rows()} == set(range(1, steps + 1)))
        tables = tables_of(read, run, run)
    with Store.open(store, create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={run: 1000}))
    return seen


def note(seen: Seen, step: int, kind: str, net: nn.Module, of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    for name, parameter in net.named_parameters():
        value = of(parameter)
        assert value is not None
        seen[step, kind, name] = value.detach().clone()


def compared(store: Path, a: str, b: str, tolerance: Tolerance | None = None, **selected: object) -> Divergence:
    with connect(store) as connection:
        return divergence(
            connection,
            DiffSide(run=a),
            DiffSide(run=b),
            tolerance,
            DiffSelection(**selected),
            top=1000,
            window_rows=600,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Seen]]:
    store = tmp_path_factory.mktemp("diff") / "store"
    runs = {
        "first": train(store, "first"),
        "again": train(store, "again"),
        "bit": train(store, "bit", one_bit),
        "scaled": train(store, "scaled", scaled),
        "wide": train(store, "wide", steps=2, width=9),
    }
    return store, runs


def test_equal_trainings_have_no_difference(stored: tuple[Path, dict[str, Seen]]) -> None:
    store, seen = stored
    found = compared(store, "first", "again")

    assert all(torch.equal(value, seen["again"][key]) for key, value in seen["first"].items())
    assert (None, (), STEPS) == (found.first, found.steps, found.steps_compared)
    assert found.rows_compared > STEPS * 40
    assert ((), ()) == (found.only_in_a, found.steps_only_in_a)


@pytest.mark.parametrize("other", ["bit", "scaled"])
def test_first_tensor_is_the_causally_first_difference(stored: tuple[Path, dict[str, Seen]], other: str) -> None:
    store, seen = stored
    found = compared(store, "first", other)
    differing = {key for key, value in seen["first"].items() if not torch.equal(value, seen[other][key])}

    assert CHANGED_AT == min(step for step, *_ in differing)
    assert found.first is not None
    assert CHANGED_AT == found.first.step
    reported = {(point.step, point.kind, point.tensor) for point in found.points}
    assert {key for key in reported if key in seen["first"]} <= differing
    if other == "scaled":
        assert (CHANGED_AT, "param_before", "2.weight") == next(iter(told_in_order(found)))
        assert {key for key in differing if key[0] == CHANGED_AT} <= reported
    else:
        # One bit of one weight changes no statistic, but changes the hash.
        after = {key for key in differing if key[:2] == (CHANGED_AT, "param_after")}
        assert after == {(point.step, point.kind, point.tensor) for point in found.points if point.op == "hash"}


def told_in_order(found: Divergence) -> list[tuple[int, str, str]]:
    return [(point.step, point.kind, point.tensor) for point in found.points]


@pytest.mark.thorough
def test_later_differences_are_listed_in_causal_order(stored: tuple[Path, dict[str, Seen]]) -> None:
    """The forward pass layer by layer, the backward pass in reverse, then optimizer state and update."""
    found = compared(stored[0], "first", "scaled")
    kinds = ("param_before", "act_out", "act_grad_out", "grad_reduced", "exp_avg", "param_after")
    order = [(point.kind, point.tensor) for point in found.points if point.kind in kinds]
    firsts = list(dict.fromkeys(order))

    outputs = ["2", "3", "4", ""]
    backward = [name for kind, name in firsts if kind == "grad_reduced"]
    assert [("param_before", "2.weight"), *(("act_out", name) for name in outputs)] == [
        pair for pair in firsts if pair[0] in ("param_before", "act_out")
    ]
    assert ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"] == backward
    places = [kinds.index(kind) for kind, _ in firsts]
    assert sorted(places) == places


@pytest.mark.thorough
def test_tolerance_hides_smaller_differences(stored: tuple[Path, dict[str, Seen]]) -> None:
    store, seen = stored
    tight, wide = (compared(store, "first", "scaled", Tolerance(relative=value)) for value in (0.09, 0.11))
    weights = [seen[run][CHANGED_AT, "param_before", "2.weight"].norm().item() for run in ("first", "scaled")]

    assert tight.first is not None
    assert ("param_before", "2.weight", "norm") == (tight.first.kind, tight.first.tensor, tight.first.op)
    assert weights == pytest.approx([tight.first.a, tight.first.b], rel=1e-6)
    assert tight.first.relative == pytest.approx(0.1 / 1.1, rel=1e-5)
    assert "param_before" not in {point.kind for point in wide.points if point.tensor == "2.weight"}
    assert compared(store, "first", "bit", Tolerance(relative=1e-4, absolute=1e-6)).first is None


def test_growth_of_the_difference_is_listed_by_step(stored: tuple[Path, dict[str, Seen]]) -> None:
    found = compared(stored[0], "first", "scaled", kinds=("param_after",))

    assert list(range(CHANGED_AT, STEPS + 1)) == [step.step for step in found.steps]
    assert all(0 < step.apart <= step.compared == 12 and step.worst for step in found.steps)


def test_runs_of_different_length_and_shape(stored: tuple[Path, dict[str, Seen]]) -> None:
    found = compared(stored[0], "first", "wide")

    assert (2, (3, 4, 5), ()) == (found.steps_compared, found.steps_only_in_a, found.steps_only_in_b)
    assert found.first is not None
    assert (1, "param_before", "0.weight") == (found.first.step, found.first.kind, found.first.tensor)
    assert (32, 36) == next((point.a, point.b) for point in found.points if point.op == "numel")
