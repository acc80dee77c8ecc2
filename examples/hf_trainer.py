"""Train a tiny GPT-2 of random weights with Hugging Face Trainer: one callback adds the monitor. Nothing is downloaded.

python examples/hf_trainer.py 50
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py 50
"""

from __future__ import annotations

import os
import sys
import tempfile

from gpt_ddp import BYTES, standard_library_text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from rankscope.integrations.huggingface import RankscopeCallback

CONTEXT = 64


def main(steps: int) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=BYTES, n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4))
    text = standard_library_text(limit=1_000_000).long()
    pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        data = [{"input_ids": piece, "labels": piece} for piece in pieces]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[RankscopeCallback()]).train()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
