"""Build the targets for Prometheus' http_sd: one per rank, or one per node.

A node has one target if its ranks share one metrics page. The module performs no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from rankscope_contract.protocol.channel import NODE_METRICS_PATH
from rankscope_ingest.runs.target import Health, Target

_JOB: Final = "rankscope"
_PREFERENCE: Final = {Health.UP: 0, Health.DRAINING: 1, Health.PENDING: 2, Health.FAILING: 3}
"""Preference of ranks that share the page of a node; a lower number is better.

Ranks that respond to the service come first, because they probably also respond to Prometheus.
"""


def per_rank(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return the http_sd entry of the metrics page of each live rank."""
    return [_target(target, target.name) for target in targets if _has_page(target)]


def per_node(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return one http_sd entry per run and host.

    A rank that does not share the metrics page of its node has a separate entry.
    """
    nodes: dict[tuple[str, str], dict[tuple[str, str], list[Target]]] = defaultdict(lambda: defaultdict(list))
    found = []
    for target in targets:
        registration = target.registration
        if not _has_page(target):
            continue
        if registration.node:
            nodes[registration.run, registration.host][registration.launch_id, registration.node].append(target)
        else:
            found.append(_target(target, target.name))
    for (run, host), groups in nodes.items():
        chosen = _page_ranks(groups.values())
        for position, target in enumerate(chosen):
            # Containers with the same host name have separate pages; the first one has the plain name.
            instance = f"{run}@{host}" + (f"/{position}" if position else "")
            found.append(_target(target, instance, __metrics_path__=NODE_METRICS_PATH))
    return found


def _has_page(target: Target) -> bool:
    """Return whether the process of `target` is alive and has a metrics page.

    The records of a dead process may be served by another process, which does not serve the metrics page of the dead
    process.
    """
    return target.health is not Health.GONE and target.registration.served_by is None


def _page_ranks(groups: Iterable[list[Target]]) -> list[Target]:
    """Return one rank of each group of ranks that share a metrics page.

    A group is left out if polls of all its ranks fail and another group has a rank whose polls succeed.
    """
    best = [min(group, key=lambda target: (_PREFERENCE[target.health], target.registration.rank)) for group in groups]
    alive = [target for target in best if target.health is not Health.FAILING]
    return sorted(alive or best, key=lambda target: target.registration.rank)


def _target(target: Target, instance: str, **labels: str) -> dict[str, Any]:
    address = urlsplit(target.registration.url)
    scheme = {"__scheme__": "https"} if address.scheme == "https" else {}
    return {"targets": [address.netloc], "labels": {"job": _JOB, "instance": instance, **scheme, **labels}}
