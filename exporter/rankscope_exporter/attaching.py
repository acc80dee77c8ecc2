"""From a model and its optimizers to a session that runs: what is found out once, when a monitor is attached."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankscope_exporter.borrowed import Borrowed
from rankscope_exporter.capture.callbacks import OnAnomaly
from rankscope_exporter.config import MonitorConfig
from rankscope_exporter.frameworks import Framework, Stage, framework_of
from rankscope_exporter.guard import Guard
from rankscope_exporter.identity import place_in
from rankscope_exporter.naming import named_parameters
from rankscope_exporter.quantities.base import Subject
from rankscope_exporter.sampling.mates import DP, TP, Mates, find_mates
from rankscope_exporter.sampling.targets import Targets, sentences
from rankscope_exporter.session import Session
from rankscope_exporter.throughput.parameters import ALONE, parallel_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def attached(
    model: torch.nn.Module | Stage | Framework,
    optimizer: Optimizers,
    config: MonitorConfig,
    guard: Guard,
    *,
    groups: Mapping[str, Any],
    first_step: int,
    total_steps: int | None,
    on_anomaly: OnAnomaly | None = None,
) -> Session:
    """Return the session of `model`, hooked and serving; what the user should know of it is said.

    `groups` has the process groups of `Monitor.attach` by their names, None for those that were not given.
    """
    began = time.thread_time()
    framework = framework_of(model)
    place = guard.call("pp_group", place_in, groups["pp_group"])
    framework.pp_stage = place[0] if place else framework.pp_stage
    parameters, targets = named_parameters(framework.module), Targets(config.tensors)
    selected = [item for item in parameters if targets.selects(item.name, *item.aliases)]
    lazy = [item.name for item in selected if item.is_lazy]
    chosen = tuple(item for item in selected if not item.is_lazy)
    of_groups = {DP: groups["dp_group"], TP: groups["tp_group"]}
    mates = guard.call("dp_group and tp_group", find_mates, framework, chosen, of_groups) or Mates()
    given = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    world_size = torch.distributed.get_world_size() if _in_process_group() else 1
    optimizers = Borrowed(framework.optimizers(given))
    subject = Subject(framework, chosen, optimizers, world_size, elsewhere=mates.positions)
    names = [name for item in parameters for name in (item.name, *item.aliases)]
    complaints = [f"tensors: {sentence}" for sentence in sentences(targets, names, "parameter")]
    if lazy:
        complaints.append(_of_lazy(lazy))
    session = Session(
        subject,
        config,
        guard,
        first_step=first_step,
        total_steps=total_steps,
        on_anomaly=on_anomaly,
        parallel=guard.call("how the model is divided", parallel_of, framework, world_size, groups) or ALONE,
    )
    address = session.start()
    session.attach_seconds = time.thread_time() - began
    for sentence in (*complaints, *mates.complaints):
        guard.call("a remark of attach()", session.hooks.tell, sentence)
    for event in mates.events:
        guard.call("an event of attach()", session.recorder.event, event)
    guard.call("the banner", session.print_banner, address)
    return session


def _of_lazy(names: Sequence[str]) -> str:
    return (
        f"{len(names)} parameters have no shape yet and are not measured ({', '.join(names[:3])}): "
        "run a forward pass before attach()"
    )


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
