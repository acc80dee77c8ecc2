"""Tokens that Hugging Face's Trainer counts are those of its steps, and give TFLOP/s."""

from __future__ import annotations

import json

import pytest
import torch
from tests.exporter.conftest import Reader, wait_until
from torch import nn

transformers = pytest.importorskip("transformers", reason="pip install -e '.[trainers]'")

VOCABULARY, WIDTH, BATCH, LENGTH, ACCUMULATED = 50, 16, 2, 10, 3


class Scores(nn.Module):
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, labels=None):
        scores = self.head(self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


@pytest.mark.thorough
def test_tokens_of_a_step_equal_the_count_of_trainer(tmp_path):
    from rankscope_exporter.integrations.huggingface import RankscopeCallback

    watching = RankscopeCallback({"console": False, "exit_wait_seconds": 0, "statistics": "torch"})
    results = {}

    class Reading(transformers.TrainerCallback):
        def on_train_end(self, *_args, **_kwargs):
            monitor = watching._attended.monitor
            monitor.end_step()
            reader = Reader(monitor.address)
            wait_until(lambda: len(reader.scalars("step_seconds")) == 2)
            results["tokens"] = reader.scalars("tokens")
            pairs = zip(reader.scalars("tflops_per_gpu"), reader.scalars("step_seconds"), strict=True)
            results["flops"] = [rate * seconds * 1e12 for (_, rate), (_, seconds) in pairs]
            results["labels"] = {
                scalar["labels"]
                for record in reader.records()
                for scalar in record["scalars"] or ()
                if scalar["name"] == "tflops_per_gpu"
            }

    rows = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)}] * 12
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        num_train_epochs=1,
        include_num_input_tokens_seen="all",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Scores(), arguments, train_dataset=rows, callbacks=[Reading(), watching])
    trainer.train()

    tokens = BATCH * LENGTH * ACCUMULATED
    assert [(1, tokens), (2, tokens)] == results["tokens"]
    assert [tokens * 6 * VOCABULARY * WIDTH] * 2 == pytest.approx(results["flops"])
    assert [{"method": "6n"}] == [json.loads(text) for text in results["labels"]]
