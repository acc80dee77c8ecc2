"""FLOPs of models of Hugging Face against torch's FlopCounterMode on its own, and the tokens that Trainer counts."""

import copy
import json
from typing import Any

import pytest
import torch
from tests.exporter.conftest import Reader, wait_until
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rankscope_exporter import count_flops
from rankscope_exporter.adapters import framework_of
from rankscope_exporter.monitors.throughput import ALONE, misfit, six_n

transformers = pytest.importorskip("transformers", reason="pip install -e '.[trainers]'")
BATCH, SEQUENCE, VOCABULARY = 2, 32, 200
DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt() -> Any:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def mixture() -> Any:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank product (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Any:
    model = llama().requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def vit() -> Any:
    sizes = {name: DECODER[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")}
    config = transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config)


def resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def translator() -> Any:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


def by_torch(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Return torch's own count, with experts and attention as the single products for which torch has formulas."""
    model.train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(**batch)
        (output.logits.sum() if output.get("loss") is None else output.loss).backward()
    return counter.get_total_flops()


@pytest.mark.usual(2)
@pytest.mark.parametrize("make", [gpt, llama, mixture, adapted, vit, resnet])
def test_count_is_within_a_tenth_of_flop_counter_mode(make):
    model = make()
    batch = batch_of(model)

    assert by_torch(copy.deepcopy(model), batch) == pytest.approx(count_flops(model, **batch), rel=0.1)


@pytest.mark.parametrize(("make", "tolerance"), [(gpt, 0.02), (llama, 0.02), (adapted, 0.1)])
def test_six_n_is_the_count_of_flop_counter_mode_without_attention(make, tolerance):
    model = make()
    attention = 3 * 2 * 2 * 2 * SEQUENCE * 64  # of a token in two layers of width 64: scores and their product

    found = BATCH * SEQUENCE * (six_n(framework_of(model), ALONE) + attention)
    assert by_torch(model, batch_of(model)) == pytest.approx(found, rel=tolerance)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (vit, "convolution"),
        (resnet, "convolution"),
        (translator, "different tokens"),
        (mixture, "only some of the experts"),
    ],
)
def test_six_n_is_not_applied_to_images_pairs_of_sequences_and_experts(make, why):
    assert why in (misfit(make()) or "")


WIDTH, LENGTH, ACCUMULATED = 16, 10, 3


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
            monitor = watching.monitor
            monitor.end_step()
            reader = Reader(monitor.address)
            wait_until(lambda: len(reader.scalars("step_seconds")) == 2)
            results["tokens"] = reader.scalars("tokens")
            pairs = zip(reader.scalars("tflops_per_gpu"), reader.scalars("step_seconds"), strict=True)
            results["flops"] = [rate * seconds * 1e12 for (_, rate), (_, seconds) in pairs]
            all_scalars = [scalar for record in reader.records() for scalar in record["scalars"] or ()]
            results["labels"] = {scalar["labels"] for scalar in all_scalars if scalar["name"] == "tflops_per_gpu"}

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
    transformers.Trainer(Scores(), arguments, train_dataset=rows, callbacks=[Reading(), watching]).train()

    tokens = BATCH * LENGTH * ACCUMULATED
    assert [(1, tokens), (2, tokens)] == results["tokens"]
    assert [tokens * 6 * VOCABULARY * WIDTH] * 2 == pytest.approx(results["flops"])
    assert [{"method": "6n"}] == [json.loads(text) for text in results["labels"]]
