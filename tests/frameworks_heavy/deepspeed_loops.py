"""DeepSpeed: its engine trains the model of the other frameworks, in every stage of ZeRO."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from heavy_watching import LONGEST
from tests.exporter.adapters.loops import SKIPPED, Loop
from tests.exporter.adapters.training import ADAM, ROWS, STEPS, Net, batch, loss_of

logging.disable(logging.WARNING)


@dataclass(slots=True)
class Engine(Loop):
    def replaced(self) -> list[tuple[Any, str]]:
        """Return the methods that the monitor replaces while it is attached."""
        return [(self.attached, "_take_model_step")]

    def train(self, optimizer: Any) -> list[Any]:
        return [self.backward(step) for step in range(1, STEPS + 1)]

    def optimizer(self) -> Any:
        return self.attached.optimizer

    def state(self) -> list[torch.Tensor]:
        parameters = [_without_padding(item).detach() for item in self.model.module.parameters()]
        inner = getattr(self.attached.optimizer, "optimizer", self.attached.optimizer)
        kept = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.clone() for tensor in (*parameters, *kept)]


def _without_padding(parameter: Any) -> torch.Tensor:
    """Return the tensors of this rank; the padding after the last element of a parameter is uninitialized memory."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    size = parameter.ds_tensor.numel()
    return parameter.ds_tensor[: max(0, min(size, parameter.ds_numel - torch.distributed.get_rank() * size))]


def engine(
    _rank: int,
    stage: int,
    micros: int = 1,
    *,
    groups: int = 1,
    infinite: bool = False,
    by_hand: bool = False,
    bf16: bool = False,
    sums: str | None = None,
    reentrant: bool = False,
    **options: Any,
) -> Engine:
    model = Net(checkpointed=reentrant, reentrant=reentrant)
    parameters = list(model.parameters())
    divided = [{"params": parameters[place::groups]} for place in range(groups)]
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1 if by_hand else micros,
        "gradient_clipping": LONGEST,
        "zero_optimization": {"stage": stage, **options},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        **({"data_types": {"grad_accum_dtype": sums}} if sums else {}),
    }
    made, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(divided, **ADAM), config=config)

    def backward(step: int) -> torch.Tensor:
        for micro in range(micros):
            if by_hand:
                made.set_gradient_accumulation_boundary(micro == micros - 1)
            data = batch(torch.distributed.get_rank(), step, micro)
            loss = loss_of(made(data.bfloat16() if bf16 else data))
            if infinite and step == SKIPPED:
                loss = loss * float("inf")
            made.backward(loss, scale_wrt_gas=False)
            if not by_hand or micro == micros - 1:
                made.step()
        return loss.detach()

    # The monitor detects accumulation by hand only after it has happened.
    return Engine(made, made, backward, also={"gradients": {"sum_micro_batches": True}} if by_hand else {})


FROM_START = {"stage3_param_persistence_threshold": 0}
IN_MEMORY = {"offload_optimizer": {"device": "cpu"}}

LOOPS: dict[str, Callable[[int], Loop]] = {
    "zero 0": lambda rank: engine(rank, 0),
    "zero 0, accumulating": lambda rank: engine(rank, 0, 2),
    "zero 0, bfloat16": lambda rank: engine(rank, 0, bf16=True, sums="bf16"),
    "zero 1": lambda rank: engine(rank, 1),
    "zero 1, accumulating": lambda rank: engine(rank, 1, 2),
    "zero 1, two groups": lambda rank: engine(rank, 1, groups=2),
    "zero 1, bfloat16 summed in float32": lambda rank: engine(rank, 1, 2, bf16=True, sums="fp32"),
    "zero 1, infinite": lambda rank: engine(rank, 1, infinite=True),
    "zero 2": lambda rank: engine(rank, 2),
    "zero 2, accumulating": lambda rank: engine(rank, 2, 2),
    "zero 2, accumulating by hand": lambda rank: engine(rank, 2, 2, by_hand=True),
    "zero 2, bfloat16, accumulating": lambda rank: engine(rank, 2, 2, bf16=True),
    "zero 2, checkpointed": lambda rank: engine(rank, 2, reentrant=True),
    "zero 2, small buckets": lambda rank: engine(rank, 2, groups=2, reduce_bucket_size=50, overlap_comm=True),
    "zero 2, bfloat16": lambda rank: engine(rank, 2, bf16=True),
    "zero 2, offloaded": lambda rank: engine(rank, 2, **IN_MEMORY),
    "zero 2, infinite": lambda rank: engine(rank, 2, infinite=True),
    "zero 3": lambda rank: engine(rank, 3, **FROM_START),
    "zero 3, accumulating": lambda rank: engine(rank, 3, 2),
    "zero 3, accumulating, offloaded": lambda rank: engine(rank, 3, 3, **FROM_START, **IN_MEMORY),
    "zero 3, checkpointed": lambda rank: engine(rank, 3, reentrant=True, **FROM_START),
    "zero 3, sub-groups": lambda rank: engine(rank, 3, groups=2, sub_group_size=40, **FROM_START),
    "zero 3, bfloat16": lambda rank: engine(rank, 3, bf16=True, **FROM_START),
    "zero 3, offloaded": lambda rank: engine(rank, 3, **FROM_START, **IN_MEMORY),
    "zero 3, infinite": lambda rank: engine(rank, 3, infinite=True),
}
