"""Two real trainings compared in the store; the expected result is computed from the tensors at each step."""

import copy
from collections.abc import Callable

import pytest
import torch
from tests.end_to_end.stored_rows import tables_of
from tests.exporter.conftest import Reader, wait_until
from torch import nn

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_storage.api.store import Batch, Store
from rankscope_storage.connection import connect
from rankscope_storage.diff.diff import DiffSelection, DiffSide, divergence

STEPS = 5
QUANTITIES = ("parameters", "gradients", "optimizer_state", "activations", "hashes")
HASHES = {"hashes": {"of": "all", "every": 1}}
CHANGED_AT = 3

Change = Callable[[int, nn.Sequential], None]


def nothing(_step, _net):
    """Change nothing."""


def one_bit(step, net):
    """Change one weight of the third layer to the next representable number, before a step."""
    if step == CHANGED_AT:
        flat = net[2].weight.data.view(-1)
        flat[5] = torch.nextafter(flat[5], torch.tensor(torch.inf))


def scaled(step, net):
    """Multiply a layer by 1.1, before a step."""
    if step == CHANGED_AT:
        net[2].weight.data.mul_(1.1)


def train(store, run, change=nothing):
    """Train and store `run`; return the tensors, which the test records itself."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    config = MonitorConfig(
        quantities=QUANTITIES, options=HASHES, console=False, exit_wait_seconds=0, statistics="torch"
    )
    seen = {}
    with Monitor(config).attach(net, optimizer) as monitor:
        read = Reader(monitor.address)
        for step in range(1, STEPS + 1):
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
        wait_until(lambda: {row.step for row in read.rows()} == set(range(1, STEPS + 1)))
        tables = tables_of(read, run, run)
    with Store.open(store, create=True).claim(owner="test") as writer:
        writer.append(Batch(tables=tables, watermarks={run: 1000}))
    return seen


def note(seen, step, kind, net, of):
    for name, parameter in net.named_parameters():
        value = of(parameter)
        assert value is not None
        seen[step, kind, name] = value.detach().clone()


def compared(store, a, b):
    with connect(store) as connection:
        return divergence(
            connection, DiffSide(run=a), DiffSide(run=b), None, DiffSelection(), top=1000, window_rows=600
        )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    store = tmp_path_factory.mktemp("diff") / "store"
    runs = {
        "first": train(store, "first"),
        "again": train(store, "again"),
        "bit": train(store, "bit", one_bit),
        "scaled": train(store, "scaled", scaled),
    }
    return store, runs


def test_equal_trainings_have_no_difference(stored):
    store, seen = stored
    found = compared(store, "first", "again")

    assert all(torch.equal(value, seen["again"][key]) for key, value in seen["first"].items())
    assert (None, (), STEPS) == (found.first, found.steps, found.steps_compared)
    assert found.rows_compared > STEPS * 40
    assert ((), ()) == (found.only_in_a, found.steps_only_in_a)


@pytest.mark.parametrize("other", ["bit", "scaled"])
def test_first_tensor_is_the_causally_first_difference(stored, other):
    store, seen = stored
    found = compared(store, "first", other)
    differing = {key for key, value in seen["first"].items() if not torch.equal(value, seen[other][key])}

    assert CHANGED_AT == min(step for step, *_ in differing)
    assert found.first is not None
    assert CHANGED_AT == found.first.step
    reported = {(point.step, point.kind, point.tensor) for point in found.points}
    assert {key for key in reported if key in seen["first"]} <= differing
    if other == "scaled":
        assert (CHANGED_AT, "param_before", "2.weight") == next(
            (point.step, point.kind, point.tensor) for point in found.points
        )
        assert {key for key in differing if key[0] == CHANGED_AT} <= reported
    else:
        # One bit of one weight changes no statistic, but changes the hash.
        after = {key for key in differing if key[:2] == (CHANGED_AT, "param_after")}
        assert after == {(point.step, point.kind, point.tensor) for point in found.points if point.op == "hash"}
