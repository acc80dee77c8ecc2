"""Train a small GPT of Megatron-Core with its DDP and its distributed optimizer.

    torchrun --standalone --nproc-per-node 2 examples/megatron_core.py

Each rank measures the ranges that it updates; the view `tensor_global` combines them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import megatron_shim
import torch
import torch.distributed as dist
from gpt_ddp import draw_batch, standard_library_text

if not torch.cuda.is_available():
    megatron_shim.put()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

import rankscope

CONTEXT, ROWS, MICRO_BATCHES = 64, 8, 2


def made_model(config: TransformerConfig) -> DistributedDataParallel:
    layer = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, layer, vocab_size=256, max_sequence_length=CONTEXT, position_embedding_type="rope")
    sharing = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(config, sharing, model.cuda())


def forward_step(data: Iterator[Any], model: Any) -> Any:
    inputs, targets = (tensor.cuda() for tensor in next(data))
    positions = torch.arange(CONTEXT).expand(ROWS, CONTEXT).cuda()
    hidden = torch.triu(torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool), 1).cuda()
    return model(inputs, positions, hidden, labels=targets), lambda loss: (loss.mean(), {"loss": loss.detach().mean()})


def main(steps: int) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    megatron_shim.seed()
    config = TransformerConfig(
        num_layers=2, hidden_size=96, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0
    )
    model = made_model(config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=6e-4, clip_grad=1.0, use_distributed_optimizer=True), [model]
    )
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss

    text = standard_library_text(limit=1_000_000)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = (draw_batch(text, ROWS, CONTEXT, generator) for _ in iter(int, 1))
    run = get_forward_backward_func()
    with rankscope.Monitor(total_steps=steps).attach(model, optimizer) as monitor:
        for _ in range(steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            reported = run(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=[model],
                num_microbatches=MICRO_BATCHES,
                seq_length=CONTEXT,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            optimizer.step()
            monitor.log(loss=reported[-1]["loss"], tokens=MICRO_BATCHES * ROWS * CONTEXT)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
