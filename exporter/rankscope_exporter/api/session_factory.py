"""Create and start the session of a model and its optimizers when a monitor is attached.

If another rank publishes equal statistics of a parameter, the session does not publish them again. This module finds
such parameters. Equality is never assumed: the adapter, or an attribute of the parameter, states that the ranks of a
group have equal values.
"""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from rankscope_contract.model.events import Event, EventType, Severity
from rankscope_contract.model.kinds import COUNT_OPS
from rankscope_contract.model.schema import WIRE_VALUE_OPS
from rankscope_exporter.adapters import Framework, Stage, framework_of
from rankscope_exporter.adapters.monitored_model import Borrowed, MonitoredModel, UpdateScope
from rankscope_exporter.adapters.parameter_names import (
    NamedParameter,
    Targets,
    element_count,
    named_parameters,
    target_notices,
)
from rankscope_exporter.adapters.process_group import place_in
from rankscope_exporter.api.session import Session
from rankscope_exporter.api.session_end import Owner
from rankscope_exporter.config.monitor_config import MonitorConfig
from rankscope_exporter.measure.kernels.compiled import backend_name
from rankscope_exporter.monitors.throughput.costs import ALONE, parallel_of
from rankscope_exporter.process.errors import ErrorBoundary
from rankscope_exporter.publish.console import banner

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Run no garbage collection inside the `with` block. Then move all objects to the oldest generation.

    The objects of a large plan would cause many full collections, which would take most of the time of attach(). They
    remain until detach(), so that collections of younger generations need not visit them either.
    """
    was_enabled = gc.isenabled()
    if was_enabled:
        gc.collect(1)  # otherwise recent garbage of the training would be moved, and freed by a full collection only
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not _is_frozen():  # gc.unfreeze() would undo gc.freeze() of the script
                gc.freeze()
                gc.unfreeze()
            gc.enable()


_FROZEN: Final = threading.Event()


def _is_frozen() -> bool:
    """Return whether the script has called gc.freeze(); kept, as the count visits all objects (0.02 s for 215,000)."""
    if not _FROZEN.is_set() and gc.get_freeze_count():
        _FROZEN.set()
    return _FROZEN.is_set()


@_collection_paused()
def attached(
    model: torch.nn.Module | Stage | Framework,
    optimizer: Optimizers,
    config: MonitorConfig,
    boundary: ErrorBoundary,
    *,
    groups: Mapping[str, Any],
    first_step: int,
    total_steps: int | None,
    owner: Owner,
) -> Session:
    """Return the session of `model`, with hooks installed and the server started, and publish notices for the user.

    `groups` has the process groups of `Monitor.attach` by name; the value is None for a group that was not given. The
    hooks of the model hold `owner`.
    """
    began = time.thread_time()
    framework = framework_of(model)
    place = boundary.call("pp_group", place_in, groups["pp_group"])
    framework.pp_stage = place[0] if place else framework.pp_stage
    parameters, targets = named_parameters(framework.module), Targets(config.tensors)
    selected = [item for item in parameters if targets.selects(item.name, *item.aliases)]
    lazy = [item.name for item in selected if item.is_lazy]
    chosen = tuple(item for item in selected if not item.is_lazy)
    of_groups = {DP: groups["dp_group"], TP: groups["tp_group"]}
    replica_dedup = (
        boundary.call("reading dp_group and tp_group", find_replica_dedup, framework, chosen, of_groups)
        or ReplicaDedup()
    )
    given = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    optimizers = Borrowed(framework.optimizers(given))
    monitored = MonitoredModel(
        framework, chosen, optimizers, world_size, elsewhere=replica_dedup.positions, update=UpdateScope(chosen)
    )
    names = [name for item in parameters for name in (item.name, *item.aliases)]
    notices = [f"tensors: {sentence}" for sentence in target_notices(targets, names, "parameter")]
    if unknown := framework.unknown_optimizers:
        notices.append(
            f"no torch optimizer was found in {', '.join(unknown)}: learning rates and optimizer state are absent "
            "until a torch optimizer of the model's parameters steps"
        )
    if lazy:
        notices.append(
            f"{len(lazy)} parameters have no shape yet and are not measured ({', '.join(lazy[:3])}): "
            "run a forward pass before attach()"
        )
    session = Session(
        monitored,
        config,
        boundary,
        first_step=first_step,
        total_steps=total_steps,
        on_anomaly=owner.callback,
        parallel=boundary.call("finding how the model is divided", parallel_of, framework, world_size, groups) or ALONE,
    )
    address = session.start(owner)
    session.attach_seconds = time.thread_time() - began
    for sentence in (*notices, *replica_dedup.notices):
        boundary.call("publishing a notice of attach()", session.notices.tell, sentence)
    for event in replica_dedup.events:
        boundary.call("publishing an event of attach()", session.current_step.publish_event, event)
    boundary.call("printing the banner", _print_banner, session, address)
    return session


BYTES_PER_ENTRY: Final = 4 * len(WIRE_VALUE_OPS) + 8 * len(COUNT_OPS)
"""Size in bytes of the statistics of one tensor in a record, before compression."""


def _print_banner(session: Session, address: str) -> None:
    """Print a banner on rank 0: the number of monitored tensors, the size of a record, and the service address."""
    identity, config, channel = session.identity, session.config, session.channel
    if identity.rank != 0:
        return
    parameters = session.monitored.parameters
    entries = len(session.active_quantities.table)
    quantities = ", ".join(name.replace("_", " ") for name in config.quantities)
    lines = banner(
        run=identity.run,
        world_size=identity.world_size,
        measured=quantities if config.switch_file is None else f"nothing until {config.switch_file} switches it on",
        tensors=len(parameters),
        elements=element_count(parameters),
        series=entries * 2,
        bytes_per_step=entries * BYTES_PER_ENTRY,
        every=config.every,
        backend=backend_name(session.monitored.device, coming=config.statistics == "auto"),
        address=address,
        service=channel.service_url,
        spool_dir=None if channel.spool is None else channel.spool.root,
    )
    for line in (*lines, *filter(None, [session.watchdog.signal_note()])):
        session.console.line(line)


DP, TP = "dp_group", "tp_group"


@dataclass(frozen=True, slots=True)
class ReplicaDedup:
    """The parameters that another rank publishes for this rank, and events and notices about them.

    `positions` are the positions of these parameters in the list of all monitored parameters.
    """

    positions: frozenset[int] = frozenset()
    events: tuple[Event, ...] = ()
    notices: tuple[str, ...] = ()


def find_replica_dedup(
    framework: Framework, parameters: Sequence[NamedParameter], groups: dict[str, Any]
) -> ReplicaDedup:
    """Return the parameters whose data the first rank of a group publishes for this rank.

    `groups` has the process groups by the names DP and TP; the value is None for a group that was not given.
    """
    positions: set[int] = set()
    events, notices = [], []
    for name, group in groups.items():
        if group is None:
            continue
        try:
            ranks = dist.get_process_group_ranks(group)
            here = ranks.index(dist.get_rank())
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            notices.append(f"{name} is not a process group of this rank; this rank publishes all parameters: {error}")
            continue
        same = [i for i, named in enumerate(parameters) if _is_same(framework, named, name, ranks)]
        if len(ranks) > 1 and not same:
            notices.append(
                f"{name}: no parameter is known to be equal on all ranks of the group; "
                "each rank publishes all its parameters"
            )
        if here > 0 and same:
            positions.update(same)
            events.append(_event(name, ranks, len(same), len(parameters)))
    return ReplicaDedup(frozenset(positions), tuple(events), tuple(notices))


def _is_same(framework: Framework, named: NamedParameter, name: str, ranks: Sequence[int]) -> bool:
    parameter = framework.parameter(named)
    if parameter is None or framework.is_same_on(parameter, ranks):
        return parameter is not None
    # Megatron sets the attribute on every parameter. Parameters of experts are reduced over another group.
    of_tp = name == TP and getattr(parameter, "tensor_model_parallel", None) is False
    return of_tp and getattr(parameter, "allreduce", True) is not False


def _event(name: str, ranks: Sequence[int], same: int, all_: int) -> Event:
    text = f"{name}: rank {ranks[0]} publishes the equal data of {same} of {all_} parameters for all ranks of the group"
    details = {"group": name, "published_by": ranks[0], "ranks": list(ranks), "parameters": same}
    return Event(type=EventType.NOTE, severity=Severity.INFO, message=text, details=json.dumps(details))
