"""Placements and replicas on a mesh, and rows of equal tensors, which only the first rank of a group publishes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exporter.adapters.loops import WORLD, Loop, ddp, ddp_scaled, fsdp1, fsdp2, plainly, tensor_parallel
from tests.exporter.adapters.observation import Found, Outcome, begin, outcomes, read, unequal
from tests.exporter.adapters.training import ADAM, Net
from tests.exporter.parts import QUIET, Watched
from tests.properties import THOROUGH, named
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from rankscope_exporter import Monitor
from rankscope_exporter.adapters import framework_of
from rankscope_exporter.adapters.parameter_names import named_parameters
from rankscope_exporter.adapters.placement import Layout, layout_of, ranks_text, replicas_of
from rankscope_exporter.api.attachment import find_replica_dedup

pytestmark = pytest.mark.timeout(400)  # the first test waits for all the training
QUANTITIES = ("parameters", "gradients", "optimizer_state", "adam_updates", "direction", "activations")
SHARED = {"param_before", "param_after", "grad_reduced", "grad_clipped", "exp_avg", "exp_avg_sq"}
STATE = {"exp_avg", "exp_avg_sq"}
NAMES = {name for name, _ in Net().named_parameters()}


def hooked(rank: int) -> Loop:
    """A model with a communication hook of the user, which may do anything."""
    loop = ddp(rank)
    loop.model.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]  # of DDP
    return loop


def ignoring(rank: int) -> Loop:
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["leave.bias"]  # type: ignore[assignment]  # as DDP has it
    return plainly(DistributedDataParallel(net), rank)


def half_frozen(rank: int) -> Loop:
    net = Net()
    assert net.leave is not None
    net.leave.requires_grad_(False)
    return plainly(DistributedDataParallel(net), rank)


def hybrid(rank: int) -> Loop:
    """FSDP2 with two replicas, each with one shard."""
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("copies", "parts")))
    return plainly(model, rank)


@dataclass(frozen=True)
class Case:
    loop: Any
    group: str = "dp_group"
    left: frozenset[str] = frozenset(NAMES)
    """Parameters whose shared rows the first rank publishes."""
    zero: bool = False


TP_WHOLE = frozenset({"blocks.0.down.bias", "blocks.1.down.bias"})
CASES = {
    "ddp": Case(ddp),
    "ddp, gradient scaler": Case(ddp_scaled),
    "ddp, ZeRO": Case(ddp, zero=True),
    "ddp, a communication hook": Case(hooked, left=frozenset()),
    "ddp, ignoring": Case(ignoring, left=frozenset(NAMES - {"leave.bias"})),
    "ddp, frozen": Case(half_frozen, left=frozenset(NAMES - {"leave.bias", "leave.weight"})),
    "fsdp1": Case(fsdp1, left=frozenset()),
    "fsdp2": Case(fsdp2, left=frozenset()),
    "fsdp2, copies": Case(hybrid),
    "tensor parallel": Case(tensor_parallel, group="tp_group", left=TP_WHOLE),
}
USUAL = ("ddp", "ddp, ZeRO", "ddp, ignoring", "fsdp2", "fsdp2, copies", "tensor parallel")


@dataclass
class Pair:
    """One rank with and without the group."""

    usual: Outcome
    grouped: Outcome
    same: bool
    """True if both runs end with the same bits."""
    notes: list[str]
    others: list[tuple[int, int]]
    """Number of features and histograms of the run with the group, by step."""


def train_pairs(rank: int, store: str, names: list[str], results: Any) -> None:
    begin(rank, store)
    for name in names:
        case = CASES[name]
        usual, _, state = train(case, rank, {})
        grouped, watched, other = train(case, rank, {case.group: dist.group.WORLD})
        measured = [record for record in watched.records if record.statistics is not None]
        others = [(len(record.features), len(record.histograms)) for record in measured]
        same = not any(unequal(*both) for both in zip(state, other, strict=True))
        results.put((name, rank, Pair(usual, grouped, same, watched.messages("note"), others)))
        dist.barrier()
    dist.destroy_process_group()


def train(case: Case, rank: int, groups: dict[str, Any]) -> tuple[Outcome, Watched, list[torch.Tensor]]:
    loop, outcome = case.loop(rank), Outcome()
    optimizer: Any = loop.optimizer()
    if case.zero:
        optimizer = ZeroRedundancyOptimizer(loop.model.parameters(), torch.optim.Adam, **ADAM)
    # One way to measure, since two round differently and the compiled one is ready at any step.
    monitor = Monitor(QUIET | {"quantities": QUANTITIES, "statistics": "torch"})
    with Watched(loop.attached, optimizer, monitor=monitor, groups=groups) as watched:
        loop.train(optimizer)
        watched.publish()
        read(monitor, outcome)
    outcome.faults = watched.faults
    return outcome, watched, loop.state()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Pair]:
    return outcomes(tmp_path_factory.mktemp("mates"), train_pairs, tuple(CASES) if THOROUGH else USUAL)


def keyed(rows: list[Found]) -> dict[tuple[Any, ...], Found]:
    return {(row.step, row.kind, row.tensor, row.micro_step): row for row in rows}


@pytest.mark.parametrize("name", named(USUAL, CASES))
def test_other_rank_publishes_only_tensors_that_differ(name, found):
    """Training is the same, and the first rank publishes the tensors that the other rank leaves to it."""
    case, first, other = CASES[name], found[name, 0], found[name, 1]
    for pair in (first, other):
        assert (True, 0, 0) == (pair.same, pair.usual.faults, pair.grouped.faults)
    whole, usual, grouped = (keyed(rows) for rows in (first.grouped.rows, other.usual.rows, other.grouped.rows))
    shared = SHARED - STATE if case.zero else SHARED
    left = {key for key in usual if key[1] in shared and key[2] in case.left}

    assert keyed(first.usual.rows) == whole
    assert usual.keys() - left == grouped.keys()
    assert all(grouped[key] == usual[key] for key in grouped)
    assert all((whole[key].numbers, whole[key].counts) == (usual[key].numbers, usual[key].counts) for key in left)
    assert {"grad_unreduced", "act_in"} <= {kind for _, kind, _, _ in grouped}
    assert bool(left) == bool(case.left)


@pytest.mark.parametrize("name", named(USUAL, CASES))
def test_store_receives_the_publishing_rank(name, found):
    case = CASES[name]
    reported = [[note for note in found[name, rank].notes if case.group in note] for rank in range(WORLD)]
    if case.left:
        text = f"rank 0 publishes the equal data of {len(case.left)} of {len(NAMES)} parameters for all ranks"
        assert [[], [f"{case.group}: {text} of the group"]] == reported
    else:
        assert all(len(notes) == 1 and "no parameter is known to be equal" in notes[0] for notes in reported)


def test_histograms_and_features_of_replicas_are_left_to_the_first_rank(found):
    first, other = (found["ddp", rank].others for rank in range(WORLD))

    assert [2 * len(NAMES)] * len(first) == [histograms for _, histograms in first]
    assert {(0, 0)} == set(other)
    assert all(histograms > 0 for _, histograms in found["fsdp2", 1].others)


def test_megatron_attributes_identify_tensor_parallel_replicas(monkeypatch):
    """Split parameters have the attribute True, others False; gradients of experts are reduced over another group."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for layer, split in zip(net, (False, True, False), strict=True):
        for parameter in layer.parameters():
            parameter.tensor_model_parallel = split
    for parameter in net[2].parameters():
        parameter.allreduce = False
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 6])
    monkeypatch.setattr(dist, "get_rank", lambda: 6)
    framework, parameters = framework_of(net), named_parameters(net)
    of_tp = find_replica_dedup(framework, parameters, {"dp_group": None, "tp_group": object()})
    of_dp = find_replica_dedup(framework, parameters, {"dp_group": object(), "tp_group": None})

    assert {0, 1} == of_tp.positions
    assert ["tp_group: rank 4 publishes the equal data of 2 of 6 parameters for all ranks of the group"] == [
        event.message for event in of_tp.events
    ]
    assert (frozenset(), 1) == (of_dp.positions, len(of_dp.notices))


FULL = Layout("full")


@dataclass
class Mesh:
    """The used part of a DeviceMesh, on rank 6 of 8: the third of four pairs, or the coordinate `here`."""

    mesh: torch.Tensor
    here: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, dim: int | None = None) -> int:
        return self.mesh.numel() if dim is None else self.mesh.shape[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.here


@dataclass
class Tensor:
    device_mesh: Mesh
    placements: tuple[Any, ...]


FLAT = Mesh(torch.arange(8), (6,))
PAIRS = Mesh(torch.arange(8).view(4, 2), (3, 0))
ALONE = Mesh(torch.arange(1), (0,))


@pytest.mark.parametrize(
    ("mesh", "placements", "expected", "replicas"),
    [
        (FLAT, (Shard(0),), Layout("shard", "0-7"), []),
        (FLAT, (Replicate(),), Layout("replica"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (FLAT, (Partial(),), Layout("partial"), []),
        # Hybrid sharding: four copies, each in two parts; and two copies, each in four.
        (PAIRS, (Replicate(), Shard(0)), Layout("shard", "6,7"), [0, 2, 4, 6]),
        (PAIRS, (Shard(0), Replicate()), Layout("shard", "0-6:2"), [6, 7]),
        # Sharded by FSDP and by tensor parallelism: all eight hold a part.
        (PAIRS, (_StridedShard(0, split_factor=2), Shard(0)), Layout("shard", "0-7"), []),
        (PAIRS, (Replicate(), Replicate()), Layout("replica"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (PAIRS, (Replicate(), Partial()), Layout("partial"), []),
        (ALONE, (Shard(0),), FULL, []),
        (ALONE, (Replicate(),), FULL, []),
    ],
)
def test_dtensor_names_the_other_shards_and_its_replicas(mesh, placements, expected, replicas):
    tensor: Any = Tensor(mesh, placements)

    assert (expected, replicas) == (layout_of(tensor, FULL), list(replicas_of(tensor)))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        *(([3], "3"), ([0, 1], "0,1"), ([4, 5, 6, 7], "4-7")),
        *(([0, 8, 16, 24], "0-24:8"), ([0, 3, 5], "0,3,5"), ([2, 1, 0], "2,1,0")),
    ],
)
def test_ranks_are_written_in_short_form(ranks, text):
    assert text == ranks_text(ranks)


@pytest.mark.usefixtures("group")
def test_pipeline_stage_has_the_replicas_of_its_wrapper():
    net = nn.Linear(4, 2)
    stages = [PipelineStage(part, 0, 1, torch.device("cpu")) for part in (net, DistributedDataParallel(net))]
    bare, wrapped = map(framework_of, stages)  # they do not keep the stages alive

    assert ([], [0]) == (list(bare.replicas(net.weight)), list(wrapped.replicas(net.weight)))


@pytest.mark.usefixtures("group")
def test_parameter_that_ddp_ignores_belongs_to_this_rank():
    net = nn.Linear(4, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["bias"])
    wrapper = DistributedDataParallel(net)
    optimizer, quantities = torch.optim.Adam(net.parameters()), ("parameters", "optimizer_state", "structure")
    options = {"optimizer_state": {"names": ["*"]}}
    with Watched(wrapper, optimizer, quantities=quantities, options=options) as watched:
        wrapper(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    placements = {(row.entry.tensor, row.entry.placement) for row in watched.rows()}
    local = framework_of(wrapper).local_layout

    assert {("weight", "replica"), ("bias", "full")} == placements
    assert ["full, replica"] == [row["placement"] for record in watched.records for row in record.modules]
    assert (Layout("partial"), FULL) == (local(net.weight, 2), local(net.bias, 2))
