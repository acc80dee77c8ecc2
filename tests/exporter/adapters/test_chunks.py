"""Several chunks of a model on one rank with interleaved micro-batches: the order of their anomalies."""

from collections.abc import Sequence

import torch
from tests.exporter.parts import Watched
from torch import nn

from rankscope_exporter.adapters import Framework
from rankscope_exporter.adapters.monitored_model import as_one, numbers_of


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.core = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(self.scale * x)


class Chunked(Framework):
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


ORDER = [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]  # of the forward passes: chunk, micro-batch


def test_first_cause_is_ordered_by_micro_batch_then_by_chunk():
    """The NaN in the second chunk of an early micro-batch precedes one in the first chunk of a later micro-batch."""
    chunks = [Chunk(), Chunk()]
    optimizer = torch.optim.SGD([item for chunk in chunks for item in chunk.parameters()], lr=0.0)
    options = {"activations": {"targets": ["*.core"]}}
    model = Chunked(chunks)
    with Watched(model, optimizer, statistics="torch", quantities=[*options, "gradients"], options=options) as watched:
        outputs = {(-1, micro): torch.ones(4, 2) for micro in range(3)}
        for chunk, micro in ORDER:
            spoiled = torch.nan if (chunk, micro) in ((1, 0), (0, 1)) else 1.0
            outputs[chunk, micro] = chunks[chunk](outputs[chunk - 1, micro] * spoiled)
            if chunk == 1:
                outputs[chunk, micro].square().mean().backward()
        optimizer.step()
    anomalies = [event for _, event in watched.events("anomaly") if event.rule == "AnomalyNan"]
    forward = [(event.micro_step, event.vpp_stage) for event in anomalies if event.kind in ("act_in", "act_out")]

    assert 0 == watched.faults
    assert (0, 1, "act_in") == (anomalies[0].micro_step, anomalies[0].vpp_stage, anomalies[0].kind)
    assert [(0, 1), (1, 0), (1, 1)] == list(dict.fromkeys(forward))
