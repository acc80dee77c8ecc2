"""Trainings of one small model by each trainer, with and without the monitor; tests check the results."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # programs of tests begin elsewhere

import torch
from tests.exporter.adapters.observation import Found, rows_of, unequal
from tests.exporter.adapters.training import ADAM, Net, loss_of
from tests.exporter.parts import session_of
from torch.utils.data import DataLoader

from rankscope_exporter import Monitor, MonitorConfig
from rankscope_exporter.config.monitor_config import public_settings

STEPS, MICROS, LONGEST, SCALE = 3, 2, 0.05, 8.0
SKIPPED = 2  # the step that a gradient scaler skips
CONFIG = MonitorConfig(
    quantities=("gradients", "parameters", "optimizer_state", "activations"),
    options={"activations": {"targets": ["*enter", "*leave"]}},
    statistics="torch",  # nothing is compiled for three steps
    console=False,
    exit_wait_seconds=60,
)
DATA = [{"x": torch.randn(5, generator=torch.Generator().manual_seed(seed))} for seed in range(200)]


class Seeing(torch.nn.Module):
    """A model that keeps its training data, so that a twin can be trained on the same data with any sampler."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[torch.Tensor] = []
        self.at, self.error = at, error

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training and self.at == len(self.seen):
            if self.error is not None:
                raise self.error
            x = torch.full_like(x, torch.inf)
        if self.training:
            self.seen.append(x.detach().clone())
        return {"loss": loss_of(self.net(x))}

    def adam(self) -> torch.optim.Adam:
        return torch.optim.Adam(self.parameters(), **ADAM)


@dataclass(slots=True)
class TrainingResults:
    rows: list[Found] = field(default_factory=list)
    scalars: dict[tuple[int, str], float] = field(default_factory=dict)
    events: list[tuple[int, str, str]] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)
    faults: int = 0
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Watch:
    """A callback that keeps the monitor of a training, to read the published records after its end."""

    monitor: Monitor | None = None
    ring: Any = None

    def take(self, monitor: Monitor | None) -> None:
        assert monitor is not None
        self.monitor, self.ring = monitor, session_of(monitor).channel.ring

    def results(self) -> TrainingResults:
        assert self.monitor is not None
        stored = public_settings(self.monitor.config)["hyperparameters"]
        results = TrainingResults(faults=self.monitor.faults, hyperparameters=stored)
        for record in self.ring.after(-1, 1 << 30).records:
            results.events += [(record.step, str(event.type), event.message) for event in record.events]
            results.scalars |= {(record.step, item.name): item.value for item in record.scalars}
            results.rows += rows_of(record) if record.statistics is not None else []
        return results


def hugging_face(watch: Watch | None, folder: Path, model: Seeing, **options: Any) -> None:
    from transformers import PretrainedConfig, Trainer, TrainingArguments

    from rankscope.integrations.huggingface import RankscopeCallback

    class Watched(RankscopeCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            watch.take(self.monitor)

    model.config = PretrainedConfig(hidden_size=4)  # as a model of transformers
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
    callbacks = [Watched(CONFIG)] if watch is not None else []
    data = {"train_dataset": DATA, "eval_dataset": DATA[:8]}
    trainer = Trainer(model=model, args=arguments, optimizers=(model.adam(), None), callbacks=callbacks, **data)
    trainer.train(resume_from_checkpoint=resume)


def accelerate(watch: Watch | None, folder: Path, model: Seeing, *, scaled: bool = False) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROS)
    if scaled:  # Accelerate makes one only where there is a GPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    wrapped, optimizer, loader = accelerator.prepare(model, model.adam(), DataLoader(DATA, batch_size=8))
    with Monitor(CONFIG, total_steps=STEPS) as monitor:
        if watch is not None:
            monitor.attach(wrapped, optimizer)
            watch.take(monitor)
        for _, batch in zip(range(STEPS * MICROS), loader, strict=False):
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(batch["x"])["loss"])
                if accelerator.sync_gradients and not scaled:
                    accelerator.clip_grad_norm_(wrapped.parameters(), LONGEST)
                optimizer.step()
                optimizer.zero_grad()


def fabric(watch: Watch | None, folder: Path, model: Seeing) -> None:
    from lightning.fabric import Fabric

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, model.adam())
    loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=8))
    with Monitor(CONFIG, total_steps=STEPS) as monitor:
        if watch is not None:
            monitor.attach(wrapped, optimizer)
            watch.take(monitor)
        for number, batch in zip(range(1, STEPS * MICROS + 1), loader, strict=False):
            is_last = number % MICROS == 0
            with fabric.no_backward_sync(wrapped, enabled=ranks > 1 and not is_last):
                fabric.backward(wrapped(batch["x"])["loss"] / MICROS)
            if is_last:
                fabric.clip_gradients(wrapped, optimizer, max_norm=LONGEST)
                optimizer.step()
                optimizer.zero_grad()


def lightning(
    watch: Watch | None, folder: Path, model: Seeing, *, by_hand: bool = False, scaled: bool = False, **options: Any
) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    from rankscope.integrations.lightning import RankscopeCallback

    class Watched(RankscopeCallback):
        def on_train_start(self, *args: Any) -> None:
            super().on_train_start(*args)
            watch.take(self.monitor)

    resume = options.pop("resume", None)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    clipping = {} if by_hand else {"accumulate_grad_batches": MICROS, "gradient_clip_val": LONGEST}
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]} if scaled else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[Watched(CONFIG)] if watch is not None else [],
        **{"max_steps": STEPS * (1 + by_hand), "val_check_interval": 4, **clipping, **plugins, **options},
    )
    module = lightning_module(pl.LightningModule, model, by_hand=by_hand)
    trainer.fit(module, DataLoader(DATA, batch_size=8), DataLoader(DATA[:8], batch_size=8), ckpt_path=resume)
    if resume is None and ranks == 1:
        trainer.save_checkpoint(folder / "saved.ckpt")


def lightning_module(base: type, model: Seeing, *, by_hand: bool) -> Any:
    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 4, "api_token": "hunter2"})
            self.inner = model
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, _place: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(batch["x"])["loss"]  # the module itself is never called
            self.log("own", loss)
            if by_hand:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch: Any, _place: int) -> None:
            self.log("val_loss", self.inner(batch["x"])["loss"])

        def configure_optimizers(self) -> Any:
            halves = [[*model.net.enter.parameters(), *model.net.leave.parameters()], model.net.blocks.parameters()]
            return [torch.optim.Adam(half, **ADAM) for half in halves] if by_hand else model.adam()

    return Module()


def results_of(train: Callable[..., None], folder: Path, *, at: int | None = None, **options: Any) -> TrainingResults:
    alone, watched, watch = Seeing(at), Seeing(at), Watch()
    train(None, folder / "alone", alone, **options)
    train(watch, folder / "watched", watched, **options)
    results = watch.results()
    results.seen = watched.seen
    pairs = zip(alone.named_parameters(), watched.parameters(), strict=True)
    results.unequal = [name for (name, one), other in pairs if unequal(one.detach(), other.detach())]
    return results
