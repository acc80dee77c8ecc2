"""Trains with each trainer, with and without the monitor, and writes what was found into the folder it is given."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path
sys.path.insert(0, str(Path(__file__).parents[1] / "exporter" / "frameworks"))

import torch
from framework_training import ADAM, Net, loss_of
from framework_watching import Found, rows_of, unequal
from torch.utils.data import DataLoader

from rankscope_exporter import Monitor, MonitorConfig

STEPS, MICROS, LONGEST = 3, 2, 0.05
QUANTITIES = ("gradients", "parameters", "optimizer_state", "activations")
CONFIG = MonitorConfig(
    quantities=QUANTITIES,
    options={"activations": {"targets": ["*enter", "*leave"]}},
    console=False,
    exit_wait_seconds=0,
)
DATA = [{"x": torch.randn(5, generator=torch.Generator().manual_seed(seed))} for seed in range(200)]


class Seeing(torch.nn.Module):
    """Keeps what it was trained on, so that a twin can be trained on the same, whatever samplers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(x.detach().clone())
        return {"loss": loss_of(self.net(x))}

    def adam(self) -> torch.optim.Adam:
        return torch.optim.Adam(self.parameters(), **ADAM)


@dataclass(slots=True)
class Told:
    """What one rank tells of one training."""

    rows: list[Found] = field(default_factory=list)
    scalars: dict[tuple[int, str], float] = field(default_factory=dict)
    events: list[tuple[int, str, str]] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)
    faults: int = 0
    unequal: list[str] = field(default_factory=list)


def read(monitor: Monitor, told: Told) -> None:
    """Take what was published; called before the monitor is gone, its goodbye included where that is said."""
    session = monitor._session
    assert session is not None
    monitor.end_step()
    deadline = time.monotonic() + 30
    records: list[Any] = []
    while sum(record.statistics is not None for record in records) < STEPS and time.monotonic() < deadline:
        time.sleep(0.01)
        records = session.channel.ring.after(-1, 1 << 30).records
    for record in records:
        told.events += [(record.step, str(event.type), event.message) for event in record.events]
        told.scalars |= {(record.step, item.name): item.value for item in record.scalars}
        told.rows += rows_of(record) if record.statistics is not None else []
    told.faults = monitor.faults


def hugging_face(told: Told | None, folder: Path, **options: Any) -> Seeing:
    from transformers import Trainer, TrainingArguments

    from rankscope_exporter.integrations.huggingface import RankscopeCallback

    class Reading(RankscopeCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            read(self._attended.monitor, told)
            super().on_train_end(*args, **kwargs)

    model = Seeing()
    options = {"max_steps": STEPS, "save_strategy": "no", **options}
    resume = options.pop("resume", None)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=MICROS,
        max_grad_norm=LONGEST,
        logging_steps=1,
        lr_scheduler_type="constant",
        label_names=[],
        **options,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=DATA,
        eval_dataset=DATA[:8],
        optimizers=(model.adam(), None),
        callbacks=[Reading(CONFIG)] if told is not None else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def accelerated(told: Told | None, folder: Path) -> Seeing:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROS)
    model = Seeing()
    wrapped, optimizer, loader = accelerator.prepare(model, model.adam(), DataLoader(DATA, batch_size=8))
    monitor = Monitor(CONFIG, total_steps=STEPS)
    if told is not None:
        monitor.attach(wrapped, optimizer)
    for place, batch in enumerate(loader):
        if place == STEPS * MICROS:
            break
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(batch["x"])["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), LONGEST)
            optimizer.step()
            optimizer.zero_grad()
    if told is not None:
        read(monitor, told)
    monitor.detach()
    return model


def lightning(told: Told | None, folder: Path, **options: Any) -> Seeing:
    import lightning as pl

    from rankscope_exporter.integrations.lightning import RankscopeCallback

    class Reading(RankscopeCallback):
        def on_train_end(self, *args: Any) -> None:
            read(self._attended.monitor, told)
            super().on_train_end(*args)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Seeing()

        def training_step(self, batch: Any, _place: int) -> torch.Tensor:
            loss = self.inner(batch["x"])["loss"]  # the module itself is never called
            self.log("own", loss)
            return loss

        def validation_step(self, batch: Any, _place: int) -> None:
            self.log("val_loss", self.inner(batch["x"])["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.inner.adam()

    module = Module()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options = {"enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=STEPS,
        accumulate_grad_batches=MICROS,
        gradient_clip_val=LONGEST,
        val_check_interval=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[Reading(CONFIG)] if told is not None else [],
        **options,
    )
    trainer.fit(module, DataLoader(DATA, batch_size=8), DataLoader(DATA[:8], batch_size=8))
    return module.inner


TRAININGS: dict[str, Callable[..., Seeing]] = {
    "accelerate": accelerated,
    "hugging face": hugging_face,
    "lightning": lightning,
}


def told_by(name: str, folder: Path, **options: Any) -> Told:
    """Train without the monitor, and with it."""
    alone = TRAININGS[name](None, folder / "alone", **options)
    told = Told()
    model = TRAININGS[name](told, folder / "watched", **options)
    told.seen = model.seen
    told.unequal = [
        parameter
        for (parameter, one), other in zip(alone.named_parameters(), model.parameters(), strict=True)
        if unequal(one.detach(), other.detach())
    ]
    return told


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    found = {name: told_by(name, folder / name / rank) for name in TRAININGS}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from trainings import main as told_under_its_own_name  # what is pickled here is read elsewhere

    told_under_its_own_name()
