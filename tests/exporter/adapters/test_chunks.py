"""Several chunks of a model on one rank with interleaved micro-batches: rows contain chunk and micro-batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.exporter.parts import Watched
from torch import nn

from rankscope_exporter.adapters.ddp import Plain
from rankscope_exporter.adapters.monitored_model import as_one, numbers_of


class Core(nn.Module):
    """An attention core with the arguments that the quantity reads: (sequence, batch, heads, width)."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / query.shape[-1] ** 0.5
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), key)


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.core = Core()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(self.scale * x, x)


class Chunked(Plain):
    """The chunks of one model, which a loop calls in any order."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._list = as_one(chunks)  # nothing else holds it
        super().__init__(self._list)
        self._chunks = chunks
        self.chunk_numbers = numbers_of(chunks)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return False

    @property
    def chunks(self) -> Sequence[nn.Module]:
        return self._chunks


MICROS = 3
ORDER = [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]  # of the forward passes: chunk, micro-batch


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 2, 2, 8, generator=generator) for _ in range(MICROS)]


def entropy(query: torch.Tensor, key: torch.Tensor, head: int) -> float:
    scores = torch.einsum("sbd,tbd->bst", query[:, :, head], key[:, :, head]) / query.shape[-1] ** 0.5
    return float(torch.distributions.Categorical(logits=scores).entropy().mean())


def run(spoil: Any = None) -> Watched:
    """Train a step, in which `spoil(chunk, micro, tensor)` may change the input."""
    chunks = [Chunk(), Chunk()]
    optimizer = torch.optim.SGD([item for chunk in chunks for item in chunk.parameters()], lr=0.0)
    options = {name: {"targets": ["*.core"]} for name in ("activations", "attention")}
    quantities = ("activations", "attention", "structure", "gradients")
    model = Chunked(chunks)
    with Watched(model, optimizer, statistics="torch", quantities=quantities, options=options) as watched:
        outputs: dict[tuple[int, int], torch.Tensor] = {(-1, micro): data for micro, data in enumerate(batches())}
        for chunk, micro in ORDER:
            given = outputs[chunk - 1, micro]
            outputs[chunk, micro] = chunks[chunk](given if spoil is None else spoil(chunk, micro, given))
            if chunk == len(chunks) - 1:
                outputs[chunk, micro].square().mean().backward()
        optimizer.step()
    assert 0 == watched.faults
    return watched


@pytest.fixture(scope="module")
def watched() -> Watched:
    return run()


def test_each_chunk_counts_its_own_micro_batches(watched):
    found = {
        (row.entry.vpp_stage, row.entry.tensor, row.entry.micro_step): row.numbers["norm"]
        for row in watched.rows("act_in")
        if row.entry.index == 1
    }
    chunks, hidden = [Chunk(), Chunk()], batches()
    for number, chunk in enumerate(chunks):
        for micro in range(MICROS):
            assert float(hidden[micro].norm()) == pytest.approx(found.pop((number, f"{number}.core", micro)))
            hidden[micro] = chunk(hidden[micro]).detach()
    assert {} == found


def test_attention_of_all_chunks_is_measured_in_each_micro_batch(watched):
    features = [row for item in watched.records for row in item.features if row["kind"] == "attention_entropy"]
    found = {(row["vpp_stage"], row["module"], row["micro_step"], row["index"]): row["value"] for row in features}
    chunks, hidden = [Chunk(), Chunk()], batches()

    assert len(found) == len(features) == 2 * MICROS * 2
    for (number, name, micro, head), value in sorted(found.items()):
        given = hidden[micro] if number == 0 else chunks[0](hidden[micro]).detach()
        assert f"{number}.core" == name
        assert entropy(1.5 * given, given, head) == pytest.approx(value, rel=1e-4)


def test_structure_contains_the_chunk_of_each_module(watched):
    assert {("0", 0), ("0.core", 0), ("1", 1), ("1.core", 1)} == {
        (row["module"], row["vpp_stage"]) for record in watched.records for row in record.modules
    }


def test_first_cause_is_ordered_by_micro_batch_then_by_chunk():
    """The NaN in the second chunk of an early micro-batch precedes one in the first chunk of a later micro-batch."""

    def spoil(chunk: int, micro: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * float("nan") if (chunk, micro) in ((1, 0), (0, 1)) else tensor

    anomalies = [event for _, event in run(spoil).events("anomaly") if event.rule == "AnomalyNan"]
    forward = [(event.micro_step, event.vpp_stage) for event in anomalies if event.kind in ("act_in", "act_out")]

    assert (0, 1, "act_in") == (anomalies[0].micro_step, anomalies[0].vpp_stage, anomalies[0].kind)
    assert [(0, 1), (1, 0), (1, 1)] == list(dict.fromkeys(forward))
