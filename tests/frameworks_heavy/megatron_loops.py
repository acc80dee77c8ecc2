"""Megatron-Core: its DDP, optimizers, parallel layers and schedules train the model of the other frameworks."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import megatron_shim
import torch
from heavy_watching import LONGEST
from tests.exporter.adapters.loops import OF_CALLS, SKIPPED, WORLD, Loop
from tests.exporter.adapters.training import ADAM, ROWS, STEPS, Block, Net, batch, loss_of

if not torch.cuda.is_available():
    megatron_shim.put()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

SCALE, WIDTH = 8.0, 6
PARTS = ("enter", "0", "1", "leave")


@dataclass(slots=True)
class Trained(Loop):
    """A loop in which Megatron's optimizer steps the attached model."""

    made: Any = None

    def replaced(self) -> list[tuple[Any, str]]:
        """Return the methods that the monitor replaces while it is attached."""
        return [(self.made, "step")]

    def train(self, optimizer: Any) -> list[Any]:
        losses = []
        for step in range(1, STEPS + 1):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(self.backward(step))
            optimizer.step()
        return losses

    def optimizer(self) -> Any:
        return self.made

    def state(self) -> list[torch.Tensor]:
        states = [state for one in self.made.chained_optimizers for state in one.optimizer.state.values()]
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *kept)]


class ParallelBlock(Block):
    """The block with Megatron's parallel layers and the same weights."""

    def __init__(self, whole: Block, config: Any) -> None:
        super().__init__()
        options = {"config": config, "init_method": torch.nn.init.zeros_, "bias": True, "skip_bias_add": False}
        up = ColumnParallelLinear(WIDTH, 8, gather_output=False, **options)
        down = RowParallelLinear(8, WIDTH, input_is_parallel=True, **options)
        rank = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            up.weight.copy_(whole.up.weight.chunk(WORLD)[rank])
            up.bias.copy_(whole.up.bias.chunk(WORLD)[rank])
            down.weight.copy_(whole.down.weight.chunk(WORLD, dim=1)[rank])
            down.bias.copy_(whole.down.bias)
        self.up, self.down = up, down

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)[0]))[0]


class Staged(Net):
    """The model, or one stage of it, with the interface of Megatron's schedules."""

    def __init__(self, place: int = 0, stages: int = 1, vp_stage: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        kept = PARTS[place * len(PARTS) // stages : (place + 1) * len(PARTS) // stages]
        for name in "01":
            if name not in kept:
                del self.blocks[name]
        self.enter = self.enter if "enter" in kept else None
        self.leave = self.leave if "leave" in kept else None
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.pre_process, self.post_process = place == 0, place == stages - 1
        self.vp_stage = vp_stage
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, received: Any) -> None:
        self.received = received[0] if isinstance(received, list) else received

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.received is not None:
            x = self.received.view(ROWS, WIDTH)
        output = super().forward(x)
        return output.view(ROWS, 1, WIDTH) if self.leave is None else output


def trained(
    _rank: int,
    micros: int = 1,
    *,
    distributed: bool = False,
    bf16: bool = False,
    overlapping: bool = False,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    chunks: int = 1,
    scaled: bool = False,
    hidden: int = 8,
) -> Trained:
    _divide(tensor_parallel, pipeline, chunks)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # Each of two ranks is before and after the other: messages of both directions must not be sent together.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bf16,
        gradient_accumulation_fusion=False,
    )
    models = _models(config, tensor_parallel, pipeline, chunks, hidden)
    overlap = {"overlap_grad_reduce": overlapping, "bucket_size": 40 if overlapping else None}
    sharing = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, **overlap)
    wrapped = [
        DistributedDataParallel(config, sharing, Float16Module(config, model) if bf16 else model) for model in models
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=ADAM["lr"],
            adam_eps=ADAM["eps"],
            weight_decay=0.0,
            bf16=bf16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=LONGEST,
            loss_scale=SCALE if scaled else None,
        ),
        wrapped,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync if chunks > 1 else no_sync[0]
    run = get_forward_backward_func()

    def forward_step(data: Any, chunk: Any) -> Any:
        output = chunk(next(data))

        def loss_func(result: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = loss_of(result.float()) * micros  # Megatron divides by their number
            return loss, {"loss": loss.detach().clone()}

        return output, loss_func

    def backward(step: int) -> torch.Tensor | None:
        place = parallel_state.get_data_parallel_rank()
        infinite = float("inf") if scaled and step == SKIPPED else 1.0
        data = [iter([batch(place, step, micro) * infinite for micro in range(micros)]) for _ in wrapped]
        sizes = {"num_microbatches": micros, "seq_length": ROWS, "micro_batch_size": 1}
        given = {"data_iterator": data if chunks > 1 else data[0], "model": wrapped}
        reported = run(forward_step_func=forward_step, forward_only=False, **given, **sizes)
        return torch.stack([one["loss"] for one in reported]) if reported else None

    also = OF_CALLS if chunks > 1 else {}
    given = wrapped if chunks > 1 else wrapped[0]
    return Trained(given, torch.nn.ModuleList(wrapped), backward, also=also, made=optimizer)


def _divide(tensor_parallel: int, pipeline: int, chunks: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline, chunks if chunks > 1 else None)
    megatron_shim.seed()


def _models(config: Any, tensor_parallel: int, pipeline: int, chunks: int, hidden: int) -> list[Net]:
    if pipeline > 1:
        rank, stages = parallel_state.get_pipeline_model_parallel_rank(), pipeline * chunks
        numbers = range(chunks) if chunks > 1 else [None]
        return [Staged((chunk or 0) * pipeline + rank, stages, chunk) for chunk in numbers]
    model = Staged(hidden=hidden)
    if tensor_parallel > 1:
        for name, block in list(model.blocks.items()):
            model.blocks[name] = ParallelBlock(block, config)
    return [model]


LOOPS: dict[str, Callable[[int], Loop]] = {
    "ddp": trained,
    "ddp, accumulating": lambda rank: trained(rank, 2, overlapping=True),
    "ddp, bfloat16": lambda rank: trained(rank, 2, bf16=True),
    "distributed": lambda rank: trained(rank, distributed=True),
    "distributed, accumulating": lambda rank: trained(rank, 2, distributed=True, overlapping=True, hidden=24),
    "distributed, bfloat16": lambda rank: trained(rank, 2, distributed=True, bf16=True),
    "distributed, scaled": lambda rank: trained(rank, distributed=True, scaled=True),
    "tensor parallel": lambda rank: trained(rank, tensor_parallel=2),
    "tensor parallel, distributed": lambda rank: trained(rank, distributed=True, tensor_parallel=2),
    "pipeline": lambda rank: trained(rank, 4, pipeline=2),
    "pipeline, interleaved": lambda rank: trained(rank, 4, pipeline=2, chunks=2),
}
