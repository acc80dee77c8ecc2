"""Callback for the Lightning Trainer: `Trainer(callbacks=[RankscopeCallback()])`. Needs lightning."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

from lightning.pytorch.callbacks import Callback

from rankscope_exporter.adapters import framework_of
from rankscope_exporter.adapters.parameter_hooks import Announced
from rankscope_exporter.api.monitor import Monitor
from rankscope_exporter.integrations.callback_base import CallbackBase


class RankscopeCallback(CallbackBase, Callback):  # type: ignore[misc,unused-ignore]  # lightning may be missing where types are checked
    """Attaches a monitor when fitting begins, and detaches it at the end. A copy of the callback does nothing.

    The first step has the number `trainer.global_step` + 1. With automatic optimization, a step is one update. With
    manual optimization, a step is one batch, because a module may use several optimizers for one batch.
    """

    _announced: Announced | None = None
    _updates = 0
    _before_evaluation: AbstractSet[str] = frozenset()
    _of_evaluation: AbstractSet[str] = frozenset()

    def _unattached(self) -> dict[str, Any]:
        return {**super()._unattached(), "_announced": None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # The hyper-parameters of the module, of its data module and of the Lightning Trainer are stored with the run.
        if self._refuses("on_train_start()"):
            return
        self.boundary.call("on_train_start", self._begin, trainer, pl_module)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        by_batch = not pl_module.automatic_optimization
        config, model = self.config, trainer.strategy.model
        # Lightning never calls an unwrapped module as a whole, so no hook of the monitor detects its forward pass.
        # The callback reports it to the adapter.
        framework = framework_of(model)
        framework.announced = self._announced = Announced(pl_module) if model is pl_module else None
        self._updates = trainer.global_step
        done = trainer.fit_loop.total_batch_idx + 1 if by_batch else trainer.global_step
        self.begin(
            framework,
            trainer.optimizers,
            first_step=done + 1,
            total_steps=None if by_batch else _planned(trainer),
            config=replace(config, steps="explicit") if by_batch else config,
            hyperparameters=lambda: _hyperparameters(trainer, pl_module),
        )

    def on_train_batch_start(self, *_args: Any) -> None:
        self.leave_phase()
        if self._announced is not None:
            self._announced.begins()

    def on_before_backward(self, *_args: Any) -> None:
        if self._announced is not None:
            self._announced.ends()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_args: Any) -> None:
        # With automatic optimization, they are logged only at batches that end with an update.
        if self._announced is not None:
            self._announced.ends()  # a batch without a loss has no backward pass
        if self.monitor is not None:
            self.boundary.call("on_train_batch_end", self._end_batch, self.monitor, trainer, pl_module, outputs)

    def _end_batch(self, monitor: Monitor, trainer: Any, pl_module: Any, outputs: Any) -> None:
        metrics = trainer.callback_metrics
        values = {**_loss(outputs), **{name: metrics[name] for name in metrics.keys() - self._of_evaluation}}
        if not pl_module.automatic_optimization:
            self.log_numbers(None, values)
            monitor.end_step()
        elif trainer.global_step > self._updates:
            self._updates = trainer.global_step
            self.log_numbers(self._updates, values)

    def on_validation_start(self, trainer: Any, _pl_module: Any) -> None:
        self.enter_phase("evaluation")
        self._before_evaluation = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, _pl_module: Any) -> None:
        # The metrics are not logged again for later steps.
        self.leave_phase()
        metrics = trainer.callback_metrics
        self._of_evaluation |= metrics.keys() - self._before_evaluation
        self.log_numbers(None, {name: metrics[name] for name in metrics.keys() & self._of_evaluation})

    def on_save_checkpoint(self, *_args: Any) -> None:
        # Lightning does not report the end of saving: the phase ends with the next batch.
        self.enter_phase("checkpoint")

    def on_train_end(self, *_args: Any) -> None:
        self.end()

    def on_exception(self, _trainer: Any, _pl_module: Any, exception: BaseException) -> None:
        self.end(exception)


_TRAINER_SETTINGS: Final = (
    *("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("precision", "num_nodes", "num_devices", "check_val_every_n_epoch", "val_check_interval"),
)


def _hyperparameters(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """Return the values of `save_hyperparameters()`, and settings of the Lightning Trainer under the key `trainer`."""
    settings = {name: getattr(trainer, name) for name in _TRAINER_SETTINGS if hasattr(trainer, name)}
    data = getattr(trainer.datamodule, "hparams", {})
    return {"trainer": settings, **data, **pl_module.hparams}


def _planned(trainer: Any) -> int | None:
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < float("inf") else None


def _loss(outputs: Any) -> Mapping[str, Any]:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return {} if loss is None else {"loss": loss}
