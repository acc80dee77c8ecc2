"""Hugging Face Trainer: `Trainer(…, callbacks=[RankscopeCallback()])`. Needs transformers.

Trainer drives its model through Accelerate, whose optimizers `attach()` unwraps: with Accelerate alone, that is all.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback

from rankscope_exporter.base.copies import CopiesDoNothing
from rankscope_exporter.config.resolve import Given
from rankscope_exporter.integrations.callback_base import CallbackBase
from rankscope_exporter.model.module_names import defines_forward

_NOTED_BY_THE_MONITOR = frozenset({"learning_rate"})  # per parameter group


class RankscopeCallback(CopiesDoNothing, TrainerCallback):  # type: ignore[misc,unused-ignore]  # transformers may be missing where types are checked
    """Attaches a monitor when training begins, numbers steps by `global_step`, and detaches at the end.

    What Trainer logs is logged under its own names: its loss is the mean since it logged last. A copy of the callback,
    also a pickled one, does nothing.
    """

    def __init__(self, config: Given = None) -> None:
        """Take what Monitor takes."""
        self._attended = CallbackBase(config)
        self._tokens_seen = 0

    def on_train_begin(
        self, _args: Any, state: Any, _control: Any, *, model: nn.Module, optimizer: Any, **_kwargs: Any
    ) -> None:
        """Attach; a resumed training goes on with the step after its checkpoint's."""
        if self._refuses("on_train_begin()"):
            return
        self._attended.safely("on_train_begin", self._begin, state, model, optimizer)

    def _begin(self, state: Any, model: nn.Module, optimizer: Any) -> None:
        planned = state.max_steps if state.max_steps > 0 else None
        self._tokens_seen = state.num_input_tokens_seen
        self._attended.begin(outermost(model), optimizer, first_step=state.global_step + 1, total_steps=planned)

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Evaluation and saving are over."""
        self._attended.leave_phase()

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Number the step, and see what is next: Trainer tells of an evaluation or a checkpoint only afterwards."""
        # Trainer counts them where `include_num_input_tokens_seen` is set, of all ranks together.
        tokens, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        self._attended.log(state.global_step, {"tokens": tokens / args.world_size} if tokens else {})
        self._next_phase(control)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> None:
        """See what is next."""
        self._next_phase(control)

    def on_log(
        self, _args: Any, state: Any, _control: Any, *, logs: Mapping[str, Any] | None = None, **_kwargs: Any
    ) -> None:
        """Log the same numbers for the step that Trainer has reached."""
        values = {name: value for name, value in (logs or {}).items() if name not in _NOTED_BY_THE_MONITOR}
        self._attended.log(state.global_step or None, values)

    def on_prediction_step(self, *_args: Any, **_kwargs: Any) -> None:
        """An evaluation is under way, also one that nobody planned."""
        self._attended.enter_phase("evaluation")

    def on_evaluate(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> None:
        """The evaluation is over; a checkpoint may follow."""
        self._attended.leave_phase()
        if control.should_save:
            self._attended.enter_phase("checkpoint")

    def on_predict(self, *_args: Any, **_kwargs: Any) -> None:
        """The prediction is over."""
        self._attended.leave_phase()

    def on_save(self, *_args: Any, **_kwargs: Any) -> None:
        """The checkpoint is written."""
        self._attended.leave_phase()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Say goodbye. After an exception Trainer calls nothing, and the end of the process tells of it."""
        self._attended.end()

    def _next_phase(self, control: Any) -> None:
        if control.should_evaluate:
            self._attended.enter_phase("evaluation")
        elif control.should_save:
            self._attended.enter_phase("checkpoint")


def outermost(model: nn.Module) -> nn.Module:
    """Return what wraps `model`: callbacks are given the bare model, and training calls the wrapper.

    Nobody hands the wrapper out, so it is looked for among the objects that are alive, once per training.
    """
    wrappers = [found for found in gc.get_objects() if _is_wrapper_of(found, model)]
    return outermost(wrappers[-1]) if wrappers else model


def _is_wrapper_of(found: Any, model: nn.Module) -> bool:
    # type(), because a lazy proxy may import what it stands for when it is asked for its class
    if not issubclass(type(found), nn.Module) or not defines_forward(type(found)):
        return False
    parts = found.__dict__.get("_modules") or {}
    return parts.get("_fsdp_wrapped_module") is model or (
        parts.get("module") is model and type(found).__module__.startswith(("torch.nn.parallel", "torch.distributed"))
    )
