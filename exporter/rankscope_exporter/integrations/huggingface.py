"""Callback for the Hugging Face Trainer: `Trainer(…, callbacks=[RankscopeCallback()])`. Needs transformers.

Trainer wraps optimizers by Accelerate, and `Monitor.attach()` unwraps them. A script that uses Accelerate without
Trainer therefore needs no callback.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback

from rankscope_exporter.adapters.parameter_names import defines_forward
from rankscope_exporter.adapters.torch_private import FSDP_WRAPPED, held_modules
from rankscope_exporter.integrations.callback_base import CallbackBase


class RankscopeCallback(CallbackBase, TrainerCallback):  # type: ignore[misc,unused-ignore]  # transformers may be missing where types are checked
    """Attaches a monitor when training begins, numbers steps by `global_step`, and detaches at the end.

    The numbers that Trainer logs are logged under the same names. The loss that Trainer logs is the mean over the steps
    since its previous log. A copy of the callback, also a pickled one, does nothing.
    """

    _tokens_seen = 0

    def on_train_begin(
        self, args: Any, state: Any, _control: Any, *, model: nn.Module, optimizer: Any, **_kwargs: Any
    ) -> None:
        # The first step of a resumed training follows the last step of the checkpoint.
        if self._refuses("on_train_begin()"):
            return
        self.boundary.call("on_train_begin", self._begin, args, state, model, optimizer)

    def _begin(self, args: Any, state: Any, model: nn.Module, optimizer: Any) -> None:
        self._tokens_seen = state.num_input_tokens_seen
        self.begin(
            outermost(model),
            optimizer,
            first_step=state.global_step + 1,
            total_steps=max(0, state.max_steps),
            hyperparameters=lambda: _hyperparameters(args, model),
        )

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        # An evaluation or a checkpoint has ended by then.
        self.leave_phase()

    on_predict = on_save = on_step_begin  # these two are called at the end

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        # The phase begins here, because Trainer calls no callback directly before an evaluation or a checkpoint, only
        # after it.
        # Trainer counts the tokens of all ranks together if `include_num_input_tokens_seen` is set.
        tokens, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        self.log_numbers(state.global_step, {"tokens": tokens / args.world_size} if tokens else {})
        self._next_phase(control)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> None:
        self._next_phase(control)

    def on_log(
        self, _args: Any, state: Any, _control: Any, *, logs: Mapping[str, Any] | None = None, **_kwargs: Any
    ) -> None:
        # The monitor itself records learning rates, for each parameter group.
        values = {name: value for name, value in (logs or {}).items() if name != "learning_rate"}
        self.log_numbers(state.global_step or None, values)

    def on_prediction_step(self, *_args: Any, **_kwargs: Any) -> None:
        # Begin the phase `evaluation` unless it is open. It is already open if Trainer evaluates after a training
        # step or an epoch. It is not open if the script called `evaluate` or `predict`.
        self.enter_phase("evaluation")

    def on_evaluate(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> None:
        self.leave_phase()
        if control.should_save:
            self.enter_phase("checkpoint")

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        # After an exception, Trainer does not call this method. The error is then recorded when the process exits.
        self.end()

    def _next_phase(self, control: Any) -> None:
        if control.should_evaluate:
            self.enter_phase("evaluation")
        elif control.should_save:
            self.enter_phase("checkpoint")


def _hyperparameters(args: Any, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of Trainer, and the configuration of the model, if any, under the key `model_config`."""
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = args.to_dict()
    if config is not None:
        found["model_config"] = config.to_dict() if hasattr(config, "to_dict") else config
    return found


def outermost(model: nn.Module) -> nn.Module:
    """Return the outermost wrapper (DDP) of `model`, found among all live objects: Trainer passes the bare model."""
    wrappers = [found for found in gc.get_objects() if _is_wrapper_of(found, model)]
    return outermost(wrappers[-1]) if wrappers else model


def _is_wrapper_of(found: Any, model: nn.Module) -> bool:
    # type() instead of isinstance: a lazy proxy may import its module when its class is read
    if not issubclass(type(found), nn.Module) or not defines_forward(type(found)):
        return False
    parts = held_modules(found)
    return parts.get(FSDP_WRAPPED) is model or (
        parts.get("module") is model and type(found).__module__.startswith(("torch.nn.parallel", "torch.distributed"))
    )
