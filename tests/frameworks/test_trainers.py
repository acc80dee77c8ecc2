"""Conformance of Hugging Face Trainer, Accelerate, Lightning and Fabric, on one and two ranks, with a float64 model."""

import importlib.util
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path

from trainings import LONGEST, MICROS, SCALE, SKIPPED, STEPS, Seeing, TrainingResults
from trainings_run import ALONE, EVERYWHERE, FAILING, LONGEST_SECONDS, RESUMED

sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

from tests.exporter.adapters.observation import Found
from tests.exporter.adapters.training import ADAM, loss_of

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]  # the first test waits for all the training
KINDS = {"grad_unreduced", "grad_reduced", "grad_clipped", "param_before", "param_after", "exp_avg", "exp_avg_sq"}
OF_SKIPPED = {"grad_unreduced", "grad_reduced"}
ACTIVATIONS = {"act_in", "act_out", "act_grad_out", "act_grad_in"}
TENSORS = [name for name, _ in Seeing().named_parameters()]
Step = dict[str, dict[str, torch.Tensor]]
Everything = dict[str, dict[str, TrainingResults]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """The expectations of one training: all of `KINDS` for each tensor and step, equal to the reference."""

    kinds: frozenset[str] = frozenset(KINDS)
    micros: int = MICROS
    longest: float = LONGEST
    """Gradients are clipped to this norm."""
    scaled: bool = False
    """True with a gradient scaler that skips a step, which then has only the kinds `OF_SKIPPED`."""
    rel: float = 1e-4
    """float32 against float64, over three steps of Adam."""


HALF = 0.05  # bfloat16 has 8 bits, float16 has 11, and sums cancel
OWED = {
    "accelerate": Owed(),
    "fabric": Owed(),
    "hugging face": Owed(),
    "lightning": Owed(),
    "accelerate, gradient scaler": Owed(scaled=True, longest=torch.inf),
    "hugging face, bfloat16": Owed(rel=HALF),
    "hugging face, evaluating and saving": Owed(),
    "lightning, bfloat16": Owed(rel=HALF),
    "lightning, gradient scaler": Owed(scaled=True, rel=HALF),
    "lightning, by hand": Owed(kinds=frozenset(KINDS - {"grad_clipped"}), micros=1, longest=torch.inf),
}
EACH = [(name, count) for name in OWED for count in (1, 2) if count == 1 or name in EVERYWHERE]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    """Results of each process for each training: "0" and "1" are ranks, "alone" has no group, the others fail."""
    missing = [name for name in ("transformers", "accelerate", "lightning") if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("RANKSCOPE_REQUIRE_SERVERS"):
        pytest.fail(f"not installed: {', '.join(missing)}; pip install -e '.[trainers]'")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -e '.[trainers]'")
    folder = tmp_path_factory.mktemp("trainers")
    script = (sys.executable, str(Path(__file__).with_name("trainings_run.py")), str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    how = {"capture_output": True, "text": True, "timeout": LONGEST_SECONDS + 50, "env": environment}
    done = subprocess.run(script, check=False, **how)
    paths = {name: (folder / name).with_suffix(".pickle") for name in ("0", "1", "alone", *FAILING)}
    assert [] == [name for name, path in paths.items() if not path.exists()], done.stderr[-5000:]
    return {name: pickle.loads(path.read_bytes()) for name, path in paths.items()}


def ranks_of(everything: Everything, name: str, count: int) -> list[TrainingResults]:
    return [everything[process][name] for process in (("alone",) if count == 1 else ("0", "1"))]


def twin(ranks: list[TrainingResults], owed: Owed) -> list[Step]:
    """Train on the data of all ranks, in float64 and without any wrapper."""
    model = Seeing().double()
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    found = []
    for place in range(STEPS):
        step: Step = {"param_before": values(model)}
        scale = 1.0 if not owed.scaled else SCALE if place < SKIPPED else SCALE / 2
        for rank, results in enumerate(ranks):
            model.zero_grad()
            for batch in results.seen[place * owed.micros : (place + 1) * owed.micros]:
                (loss_of(model.net(batch.double())) / owed.micros).backward()
            step[f"grad_unreduced {rank}"] = gradients(model)
        for name, item in model.named_parameters():
            item.grad = torch.stack([step[f"grad_unreduced {rank}"][name] for rank in range(len(ranks))]).mean(0)
        step["grad_reduced"] = gradients(model, scale)
        step |= {f"grad_unreduced {rank}": scaled(step[f"grad_unreduced {rank}"], scale) for rank in range(len(ranks))}
        torch.nn.utils.clip_grad_norm_(model.parameters(), owed.longest)
        step["grad_clipped"] = gradients(model)
        if not is_skipped(owed, place + 1):
            optimizer.step()
        step["param_after"] = values(model)
        for key in ("exp_avg", "exp_avg_sq"):
            step[key] = {name: optimizer.state[item][key].clone() for name, item in model.named_parameters()}
        found.append(step)
    return found


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def gradients(model: torch.nn.Module, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: scale * item.grad for name, item in model.named_parameters() if item.grad is not None}


def scaled(tensors: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    return {name: scale * tensor for name, tensor in tensors.items()}


def is_skipped(owed: Owed, step: int) -> bool:
    return owed.scaled and step == SKIPPED


def equals(row: Found, value: torch.Tensor, rel: float) -> bool:
    margin = rel * float(value.abs().max())
    expected = {"norm": value.norm(), "min": value.min(), "max": value.max()}
    return all(float(item) == pytest.approx(row.numbers[op], rel=rel, abs=margin) for op, item in expected.items())


def test_every_training_has_expectations():
    assert OWED.keys() == {**EVERYWHERE, **ALONE}.keys()


@pytest.mark.parametrize(("name", "count"), EACH)
def test_training_is_bit_identical_and_without_a_fault(name, count, everything):
    for results in ranks_of(everything, name, count):
        assert [] == results.unequal
        assert 0 == results.faults
        skipped = [(SKIPPED, "step_skipped")] if OWED[name].scaled else []
        assert skipped == [event[:2] for event in results.events if event[1] in ("fault", "note", "step_skipped")]


@pytest.mark.parametrize(("name", "count"), EACH)
def test_every_kind_is_on_every_rank_for_every_step_and_equals_the_reference(name, count, everything):
    owed, ranks = OWED[name], ranks_of(everything, name, count)
    expected = twin(ranks, owed)
    for place, results in enumerate(ranks):
        kinds: dict[tuple[int, str], set[str]] = defaultdict(set)
        for row in results.rows:
            if row.kind.startswith("act_"):
                continue
            tensor = row.tensor.removeprefix("inner.")
            kinds[row.step, tensor].add(str(row.kind))
            kind = f"{row.kind} {place}" if row.kind == "grad_unreduced" else str(row.kind)
            if is_skipped(owed, row.step):
                assert row.counts["nans"] + row.counts["infs"] > 0, row
            else:
                assert equals(row, expected[row.step - 1][kind][tensor], owed.rel), row
        steps = range(1, STEPS + 1)
        owes = {step: OF_SKIPPED if is_skipped(owed, step) else owed.kinds for step in steps}
        assert {(step, tensor): owes[step] for step in steps for tensor in TENSORS} == kinds


@pytest.mark.parametrize(("name", "count"), EACH)
def test_every_micro_batch_has_activations(name, count, everything):
    owed = OWED[name]
    for results in ranks_of(everything, name, count):
        kinds: dict[tuple[int, int | None], set[str]] = defaultdict(set)
        for row in results.rows:
            if row.kind.startswith("act_"):
                kinds[row.step, row.micro_step].add(str(row.kind))
                seen = results.seen[(row.step - 1) * owed.micros + (row.micro_step or 0)]
                enters = row.tensor.removeprefix("inner.").startswith("net.enter")
                if row.kind == "act_in" and enters and bool(seen.isfinite().all()):
                    assert equals(row, seen, owed.rel)
        assert {(step + 1, micro): ACTIVATIONS for step in range(STEPS) for micro in range(owed.micros)} == kinds


@pytest.mark.parametrize("count", [1, 2])
def test_values_logged_by_trainers_have_their_step(count, everything):
    trainers, lightnings = (ranks_of(everything, name, count) for name in ("hugging face", "lightning"))
    for trainer, lightning in zip(trainers, lightnings, strict=True):
        assert {1, 2, 3} == {step for step, name in lightning.scalars if name == "own"}
        assert {1, 2, 3} == {step for step, name in lightning.scalars if name == "loss"}
        assert {2} == {step for step, name in lightning.scalars if name == "eval_loss"}
        assert {1, 2, 3} == {step for step, name in trainer.scalars if name == "learning_rate"}
    assert {1, 2, 3} == {step for step, name in trainers[0].scalars if name == "grad_norm"}


@pytest.mark.parametrize("count", [1, 2])
def test_hyperparameters_of_trainers_are_stored_without_secrets(count, everything):
    trainers, lightnings = (ranks_of(everything, name, count) for name in ("hugging face", "lightning"))
    for trainer, lightning in zip(trainers, lightnings, strict=True):
        found = trainer.hyperparameters
        assert (LONGEST, MICROS, STEPS) == tuple(
            found[name] for name in ("max_grad_norm", "gradient_accumulation_steps", "max_steps")
        )
        assert 4 == found["model_config"]["hidden_size"]
        assert "***" == found["hub_token"]
        found = lightning.hyperparameters
        assert (4, "***") == (found["width"], found["api_token"])
        assert (LONGEST, MICROS) == tuple(
            found["trainer"][name] for name in ("gradient_clip_val", "accumulate_grad_batches")
        )


def test_evaluations_and_checkpoints_are_phases(everything):
    saving = everything["alone"]["hugging face, evaluating and saving"]

    assert (2, "phase", "evaluation") in everything["alone"]["lightning"].events
    assert {"evaluation", "checkpoint"} == {message for _, kind, message in saving.events if kind == "phase"}
    assert {2, 3} == {step for step, name in saving.scalars if name == "eval_runtime"}


@pytest.mark.parametrize(("name", "expected"), [("hugging face", {3, 4, 5}), ("lightning", {4, 5})])
def test_training_resumed_from_a_checkpoint_continues_its_steps(name, expected, everything):
    resumed = everything["alone"][f"{name}, resumed"]

    assert RESUMED.keys() == {"hugging face", "lightning"}
    assert expected == {row.step for row in resumed.rows}
    assert ([], 0) == (resumed.unequal, resumed.faults)


def test_finished_training_is_completed(everything):
    for name in OWED:
        assert (3, "exit", "completed") == everything["alone"][name].events[-1]


@pytest.mark.parametrize("name", FAILING)
def test_cause_of_the_end_of_training_has_the_last_step(name, everything):
    reason = "signal: KeyboardInterrupt" if "KeyboardInterrupt" in name else "exception: ValueError: no such token"

    assert [reason] == [message for _, kind, message in everything[name][name].events if kind == "exit"]
    assert KINDS <= {row.kind for row in everything[name][name].rows if row.step == 1}
