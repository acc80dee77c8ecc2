"""Two ranks with sharded parameters and activations: weights are read while they are whole, without communication."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.exporter.measure.quantities.test_activations import batch
from tests.exporter.measure.quantities.trainings import Feature, Key, equal_bits, measure, train
from tests.exporter.ranks import RANKS, WORLD, outcomes_of
from tests.properties import THOROUGH, named
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

QUANTITIES: dict[str, dict[str, Any]] = {"linear": {}, "router": {"targets": ["gate"], "top_k": 1}}
NEVER = "linear: unused: was not called in a forward of the model, so it is not measured"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gate = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.second(torch.relu(self.first(x))))


class Sharded(nn.Module):
    """A sharded weight that no framework gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        part = distribute_tensor(torch.randn(4, 8), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
        self.part = nn.Module()
        self.part.weight = nn.Parameter(part)
        self.part.forward = lambda x: x + self.part.weight.to_local().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first(x))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def sharded_in_place() -> nn.Module:
    model = net()
    for part in (model.second, model):
        fully_shard(part).set_force_sum_reduction_for_comms(enable=True)  # the only reduction that Gloo supports
    return model


CASES: dict[str, Any] = {
    "FSDP2": sharded_in_place,
    "FSDP1": lambda: FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
    "FSDP1, original parameters": lambda: FullyShardedDataParallel(
        net(), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "in parts": Sharded,
}
USUAL = ("FSDP2", "in parts")


def loss(rank: int) -> Any:
    def of(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()

    return of


def cases(rank: int) -> Iterator[tuple[str, Any]]:
    for case, make in CASES.items():
        if not THOROUGH and case not in USUAL:
            continue
        run = measure(make(), loss(rank), {"linear": {}} if case == "in parts" else QUANTITIES)
        is_equal = case == "in parts" or run.losses == measure(make(), loss(rank), None).losses
        yield case, (run.features, run.notices, run.faults, is_equal)
    yield "tensor parallel", tensor_parallel()


def tensor_parallel() -> tuple[Any, ...]:
    """Return the rows of a layer whose outputs are sharded over the ranks, and the complete outputs."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)

    def one(model: nn.Module, step: int) -> torch.Tensor:
        return model(batch(step)).square().mean()

    bare, run = train(make(), one, 2, None), train(make(), one, 2, {})
    torch.manual_seed(0)
    whole = nn.Linear(6, 8)(batch(1))
    norm = run.rows[1][Key("act_out", "0")]["norm"]
    return equal_bits(bare, run), run.faults, run.notices, run.placements, norm, float(whole.detach().norm())


def references() -> list[dict[Feature, float]]:
    """Return the weight features of one process that computes the batches of all ranks."""
    model, found = net(), []
    for step in (1, 2):
        found.append({})
        for name in ("first", "second", "gate"):
            values = torch.linalg.svdvals(model.get_submodule(name).weight.detach().double())
            found[-1][Feature("spectral_norm", name)] = float(values[0])
            found[-1][Feature("stable_rank", name)] = float(values.norm() / values[0])
        vectors = nn.functional.normalize(model.gate.weight.detach().double(), dim=1)
        cosines = (vectors @ vectors.t())[*torch.triu_indices(3, 3, 1)]
        found[-1][Feature("router_similarity", "gate")] = float(cosines.mean())
        for rank in range(WORLD):
            (loss(rank)(model, step) / WORLD).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, ...]]:
    return outcomes_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", named(USUAL, [case for case in CASES if case != "in parts"]))
def test_every_rank_has_the_features_of_whole_weights(case, outcomes):
    expected = references()
    for rank in RANKS:
        rows, notices, faults, is_equal = outcomes[case, rank]

        assert (0, True) == (faults, is_equal)
        assert [NEVER] == notices
        for step in (1, 2):
            of_weights = {key: value for key, value in rows[step].items() if key.micro_step is None}
            assert expected[step - 1].keys() == of_weights.keys()
            for key, value in expected[step - 1].items():
                assert value == pytest.approx(of_weights[key], rel=1e-4), key
            assert {"router_entropy", "router_load"} == {key.kind for key in rows[step] if key not in of_weights}


def test_weight_that_is_never_whole_is_reported_once_and_has_no_rows(outcomes):
    for rank in RANKS:
        rows, notices, faults, _ = outcomes["in parts", rank]

        assert {"first"} == {key.module for key in rows[2]}
        assert (["linear: part: has a weight in parts on several ranks"], 0) == (notices, faults)


def test_tensor_sharded_over_ranks_is_measured_in_parts(outcomes):
    norms = []
    for rank in RANKS:
        *rest, norm, whole = outcomes["tensor parallel", rank]
        norms.append(norm)

        assert [True, 0, [], {"full", "replica", "shard"}] == rest
    assert whole == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-5)
