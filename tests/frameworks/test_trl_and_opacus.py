"""TRL with LoRA, and Opacus, on tiny random models: training is the same, and rows equal its tensors."""

import importlib.util
import os
import random
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path

import trainings
from tests.exporter.adapters.observation import unequal

from rankscope_exporter import Monitor

MISSING = [name for name in ("trl", "peft", "datasets", "opacus") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("RANKSCOPE_REQUIRE_FRAMEWORKS"),
    reason=f"make test-frameworks (not installed: {', '.join(MISSING)})",
)
STEPS, BATCH = 4, 4
CONFIG = replace(trainings.CONFIG, quantities=(*trainings.CONFIG.quantities, "micro_gradients"), options={})
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = {word: number for number, word in enumerate([*SPECIAL.values(), *string.ascii_lowercase])}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SIZES, "vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
LOOP = {"logging_steps": 1, "max_steps": STEPS, "max_grad_norm": 0.0, "learning_rate": 0.01}
BATCHES = {"per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
TRAINERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # columns of texts, options
    "SFT": (("text",), {"max_length": 16, "neftune_noise_alpha": 5.0, "eval_strategy": "steps", "eval_steps": 2}),
    "DPO": (("prompt", "chosen", "rejected"), {"max_length": 16, "gradient_checkpointing": True}),
    "GRPO": (("prompt",), {"num_generations": 2, "max_completion_length": 6, "num_iterations": 2, "beta": 0.04}),
}
OPACUS = {"Opacus": (BATCH, True), "Opacus, virtual steps": (2, True), "Opacus, module attached": (2, False)}
Updates = list[dict[tuple[str, str], torch.Tensor]]


@contextmanager
def updates_of(model: nn.Module, kind: str) -> Iterator[Updates]:
    """Yield a list to which each update adds its gradients, under the name `kind`, and the parameters after it."""
    trained = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
    found: Updates = []

    def begins(*_: object) -> None:
        found.append({(kind, name): item.grad.clone() for name, item in trained})

    def ends(*_: object) -> None:
        found[-1] |= {("param_after", name): item.detach().clone() for name, item in trained}

    with register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends):
        yield found


def train_with_opacus(name: str, _folder: Path, watch: trainings.Watch | None) -> tuple[list[float], Updates]:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    size, is_wrapped = OPACUS[name]
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(BATCH * STEPS, 4), torch.randn(BATCH * STEPS, 2))
    parts = {"module": net, "optimizer": torch.optim.Adam(net.parameters()), "data_loader": DataLoader(data, BATCH)}
    private = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(**parts, **private)
    losses, monitor = [], Monitor(CONFIG)
    if watch is not None:
        watch.take(monitor.attach(model if is_wrapped else net, optimizer))
    batches = BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer)
    with monitor, updates_of(net, "grad_clipped") as updates, batches as physical:
        for x, y in physical:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, updates


def train_with_trl(name: str, folder: Path, watch: trainings.Watch | None) -> tuple[list[float], Updates]:
    import peft
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    from rankscope.integrations.huggingface import RankscopeCallback

    class Watched(RankscopeCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            watch.take(self.monitor)

    columns, options = TRAINERS[name]
    rewards = {"reward_funcs": lambda completions, **_: [float(len(text) % 7) for text in completions]}
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    draw = random.Random(0)
    data = Dataset.from_dict({key: [" ".join(draw.choices([*WORDS][3:], k=5)) for _ in range(20)] for key in columns})
    trainer = getattr(trl, f"{name}Trainer")(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
        args=getattr(trl, f"{name}Config")(str(folder), **{**QUIET, **LOOP, **BATCHES, **options}),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL),
        peft_config=peft.LoraConfig(**LORA),
        callbacks=[] if watch is None else [Watched(CONFIG)],
        **(rewards if name == "GRPO" else {}),
    )
    with updates_of(trainer.model, "grad_reduced") as updates:
        trainer.train()
    return [log[key] for log in trainer.state.log_history for key in ("loss", "eval_loss") if key in log], updates


@pytest.mark.parametrize("name", [*TRAINERS, *OPACUS])
def test_training_is_bit_identical_and_rows_are_those_of_its_steps(name, tmp_path):
    train, found, watch = train_with_opacus if name in OPACUS else train_with_trl, [], trainings.Watch()
    for each in (None, watch):
        torch.manual_seed(0)
        found.append(train(name, tmp_path, each))
    (losses, updates), (watched_losses, watched_updates) = found
    results = watch.results()
    rows = {(row.step, row.kind, row.tensor): row.numbers for row in results.rows if row.micro_step is None}
    micros = {(row.step, row.micro_step) for row in results.rows if row.kind == "act_out"}
    alarms = [event for event in results.events if event[1] not in ("phase", "exit")]

    assert losses == watched_losses
    assert 0 == results.faults
    assert [] == [event for event in alarms if "lm_head: was not called" not in event[2]]  # TRL reads its weight
    assert STEPS == len(updates) == len(watched_updates)
    for step, (alone, update) in enumerate(zip(updates, watched_updates, strict=True), 1):
        for (kind, tensor), x in update.items():
            expected = {"norm": x.norm(), "min": x.min(), "max": x.max(), "mean": x.mean()}
            expected = {op: pytest.approx(float(value), rel=1e-5, abs=1e-7) for op, value in expected.items()}
            assert not unequal(x, alone[kind, tensor]), (step, kind, tensor)
            assert expected == rows[step, kind, tensor], (step, kind, tensor)
    assert {(1 + step, place) for step in range(STEPS) for place in range(1 if name == "Opacus" else 2)} == micros
