"""What Hugging Face Trainer, Accelerate and Lightning owe, alone and on two ranks, beside a float64 training.

`make test-frameworks` installs them; without them the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[1] / "exporter" / "frameworks"))

from framework_training import ADAM, loss_of
from framework_watching import Found
from trainings import LONGEST, MICROS, STEPS, TRAININGS, Seeing, Told, told_by

MISSING = [name for name in ("transformers", "accelerate", "lightning") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(300),  # the first test waits for all the training
    pytest.mark.skipif(bool(MISSING), reason=f"make test-frameworks (not installed: {', '.join(MISSING)})"),
]

KINDS = {"grad_unreduced", "grad_reduced", "grad_clipped", "param_before", "param_after", "exp_avg", "exp_avg_sq"}
ACTIVATIONS = {"act_in", "act_out", "act_grad_out", "act_grad_in"}
Step = dict[str, dict[str, torch.Tensor]]
Both = dict[int, list[dict[str, Told]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """What each rank tells of each training, by the number of ranks."""
    return {count: launched(count, tmp_path_factory.mktemp(f"ranks{count}")) for count in (1, 2)}


def launched(count: int, folder: Path) -> list[dict[str, Told]]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    script = (str(Path(__file__).with_name("trainings.py")), str(folder))
    command = (sys.executable, *(torchrun if count > 1 else ()), *script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert 0 == done.returncode, done.stderr[-3000:]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(count)]


def twin(ranks: list[Told]) -> list[Step]:
    """Train on what all ranks saw, in float64 and without any wrapper."""
    model = Seeing().double()
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    found = []
    for place in range(STEPS):
        step: Step = {"param_before": values(model)}
        for rank, told in enumerate(ranks):
            model.zero_grad()
            for batch in told.seen[place * MICROS : (place + 1) * MICROS]:
                (loss_of(model.net(batch.double())) / MICROS).backward()
            step[f"grad_unreduced {rank}"] = gradients(model)
        for name, item in model.named_parameters():
            item.grad = torch.stack([step[f"grad_unreduced {rank}"][name] for rank in range(len(ranks))]).mean(0)
        step["grad_reduced"] = gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LONGEST)
        step["grad_clipped"] = gradients(model)
        optimizer.step()
        step["param_after"] = values(model)
        for key in ("exp_avg", "exp_avg_sq"):
            step[key] = {name: optimizer.state[item][key].clone() for name, item in model.named_parameters()}
        found.append(step)
    return found


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def equals(row: Found, value: torch.Tensor) -> bool:
    margin = 1e-4 * float(value.abs().max())
    expected = {"norm": value.norm(), "min": value.min(), "max": value.max()}
    return all(float(item) == pytest.approx(row.numbers[op], rel=1e-4, abs=margin) for op, item in expected.items())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_bit_identical_and_without_a_fault(name, count, both):
    for rank in both[count]:
        assert [] == rank[name].unequal
        assert 0 == rank[name].faults
        assert [] == [event for event in rank[name].events if event[1] in ("fault", "step_skipped")]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_every_kind_is_on_every_rank_for_every_step_and_equals_the_reference(name, count, both):
    ranks = [rank[name] for rank in both[count]]
    expected = twin(ranks)
    for place, told in enumerate(ranks):
        kinds: dict[tuple[int, str], set[str]] = defaultdict(set)
        for row in told.rows:
            if row.kind.startswith("act_"):
                continue
            tensor = row.tensor.removeprefix("inner.")
            kinds[row.step, tensor].add(str(row.kind))
            kind = f"{row.kind} {place}" if row.kind == "grad_unreduced" else str(row.kind)
            assert equals(row, expected[row.step - 1][kind][tensor]), row
        tensors = [tensor for tensor, _ in Seeing().named_parameters()]
        assert {(step + 1, tensor): KINDS for step in range(STEPS) for tensor in tensors} == kinds


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_activations_are_there_for_every_micro_batch(name, count, both):
    for rank in both[count]:
        kinds: dict[tuple[int, int | None], set[str]] = defaultdict(set)
        for row in rank[name].rows:
            if row.kind.startswith("act_"):
                kinds[row.step, row.micro_step].add(str(row.kind))
                seen = rank[name].seen[(row.step - 1) * MICROS + (row.micro_step or 0)]
                enters = row.tensor.removeprefix("inner.").startswith("net.enter")
                assert row.kind != "act_in" or not enters or equals(row, seen)
        assert {(step + 1, micro): ACTIVATIONS for step in range(STEPS) for micro in range(MICROS)} == kinds


@pytest.mark.parametrize("count", [1, 2])
def test_what_trainers_log_is_logged_with_their_step(count, both):
    for rank in both[count]:
        trainer, lightning = rank["hugging face"].scalars, rank["lightning"].scalars
        assert {1, 2, 3} == {step for step, name in lightning if name == "own"}
        assert {1, 2, 3} == {step for step, name in lightning if name == "loss"}
        assert {2} == {step for step, name in lightning if name == "val_loss"}
    assert {1, 2, 3} == {step for step, name in both[count][0]["hugging face"].scalars if name == "grad_norm"}
    assert {1, 2, 3} == {step for step, name in trainer if name == "learning_rate"}


def test_evaluation_of_lightning_is_a_phase(both):
    assert (2, "phase", "evaluation") in both[1][0]["lightning"].events


def test_a_resumed_trainer_goes_on_with_its_steps_and_names_its_phases(tmp_path):
    saved = told_by("hugging face", tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    checkpoint = str(tmp_path / "watched" / "checkpoint-2")
    resumed = told_by("hugging face", tmp_path / "again", resume=checkpoint, max_steps=5)

    assert {1, 2, 3} == {row.step for row in saved.rows}
    assert {3, 4, 5} == {row.step for row in resumed.rows}
    assert {"evaluation", "checkpoint"} == {message for _, kind, message in saved.events if kind == "phase"}
    assert {2, 3} == {step for step, name in saved.scalars if name == "eval_runtime"}
    assert ([], []) == (saved.unequal, resumed.unequal)
