"""What Prometheus is told by http_sd: a target per rank, or one per node for ranks that show a page together. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from rankscope_contract.protocol.channel import NODE_METRICS_PATH
from rankscope_ingest.runs.target import Health, Target

_JOB: Final = "rankscope"
_TRUST: Final = {Health.UP: 0, Health.DRAINING: 1, Health.PENDING: 2, Health.FAILING: 3}
"""Which rank is asked for the node's page: one that answers the service is likely to answer Prometheus too."""


def per_rank(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return every live rank's own page."""
    return [_target(target, target.name) for target in targets if _has_page(target)]


def per_node(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """Return one page per run and host, and the own pages of ranks that share none."""
    nodes: dict[tuple[str, str], dict[tuple[str, str], list[Target]]] = defaultdict(lambda: defaultdict(list))
    found = []
    for target in targets:
        who = target.registration
        if not _has_page(target):
            continue
        if who.node:
            nodes[who.run, who.host][who.launch_id, who.node].append(target)
        else:
            found.append(_target(target, target.name))
    for (run, host), groups in nodes.items():
        chosen = _speakers(groups.values())
        for position, target in enumerate(chosen):
            # Containers with one host name have a page each; the first keeps the plain name.
            instance = f"{run}@{host}" + (f"/{position}" if position else "")
            found.append(_target(target, instance, __metrics_path__=NODE_METRICS_PATH))
    return found


def _has_page(target: Target) -> bool:
    """Return whether the process lives: of a dead one whose spool another reads out, the page is that other's."""
    return target.health is not Health.GONE and target.registration.served_by is None


def _speakers(groups: Iterable[list[Target]]) -> list[Target]:
    """Return one rank of each group; a group that fails as a whole beside one that does not is a launch that ended."""
    best = [min(group, key=lambda target: (_TRUST[target.health], target.registration.rank)) for group in groups]
    alive = [target for target in best if target.health is not Health.FAILING]
    return sorted(alive or best, key=lambda target: target.registration.rank)


def _target(target: Target, instance: str, **labels: str) -> dict[str, Any]:
    address = urlsplit(target.registration.url)
    scheme = {"__scheme__": "https"} if address.scheme == "https" else {}
    return {"targets": [address.netloc], "labels": {"job": _JOB, "instance": instance, **scheme, **labels}}
