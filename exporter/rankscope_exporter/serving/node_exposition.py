"""One page with the metrics of all ranks of a launch on one host. It copies blocks of bytes and parses no lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope_contract.metrics.catalogue import NODE_RANKS
from rankscope_contract.model.identity import Identity
from rankscope_contract.security.escaping import label_value
from rankscope_exporter.process.threads import CpuMeter
from rankscope_exporter.serving.node_peers import Gathered, NodePeers

_HELP: Final = b"# HELP "
_NEXT: Final = b"\n# HELP "
"""Start of each family after the first. It occurs nowhere else, since line breaks in names and labels are escaped."""
_TYPE: Final = b"# TYPE "


class NodeExposition:
    """The page of the node, composed by this rank. Every rank can compose it, so no particular rank is needed."""

    def __init__(
        self,
        identity: Identity,
        own: Callable[[], Sequence[Any]],
        on_fault: Callable[[str, BaseException], None],
        meter: CpuMeter,
    ) -> None:
        self._identity = identity
        self._own = own
        self._on_fault = on_fault
        self.peers = NodePeers(identity, lambda: joined(own()), on_fault=on_fault, meter=meter)

    def pieces(self) -> list[Any]:
        """Return the page of all ranks that respond, as byte buffers, lowest rank first."""
        identity = self._identity
        try:
            gathered = self.peers.gather()
        except Exception as error:  # noqa: BLE001 - the page of this rank is shown without the others
            self._on_fault("pages of the other ranks", error)
            gathered = Gathered((), 0)
        # One page per rank: a process of an earlier launch with the same id may still exist.
        pages = {**dict(gathered.pages), identity.rank: joined(self._own())}
        return [
            rank_counts(identity.run, identity.host, shown=len(pages), silent=gathered.silent),
            *merged(pages[rank] for rank in sorted(pages)),
        ]


@dataclass(slots=True)
class _Family:
    head: memoryview
    samples: list[memoryview] = field(default_factory=list)


def merged(pages: Iterable[bytes]) -> list[memoryview]:
    """Return one page from several, as byte buffers: all samples of a family under one HELP and TYPE line."""
    families: dict[bytes, _Family] = {}
    for page in pages:
        for name, head, samples in _families(page):
            families.setdefault(name, _Family(head)).samples.append(samples)
    return [piece for family in families.values() for piece in (family.head, *family.samples)]


def rank_counts(run: str, host: str, *, shown: int, silent: int) -> bytes:
    """Return the family with the number of ranks on the page and of live ranks that did not respond in time."""
    labels = f'run="{label_value(run)}",host="{label_value(host)}"'
    lines = "".join(
        f'{NODE_RANKS.name}{{{labels},state="{state}"}} {count}\n'
        for state, count in (("shown", shown), ("silent", silent))
    )
    head = f"# HELP {NODE_RANKS.name} {NODE_RANKS.help}\n# TYPE {NODE_RANKS.name} {NODE_RANKS.type}\n"
    return (head + lines).encode("utf-8", "replace")


def joined(pieces: Iterable[Any]) -> bytes:
    """Return the pieces of a page as one bytes object."""
    return b"".join(memoryview(piece).cast("B") for piece in pieces)


def _families(page: bytes) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """Yield (name, HELP and TYPE lines, samples) of each family; text before the first HELP line is left out."""
    view = memoryview(page)
    start = 0 if page.startswith(_HELP) else page.find(_NEXT) + 1 or len(page)
    while start < len(page):
        end = page.find(_NEXT, start) + 1 or len(page)
        samples = page.find(b"\n", start, end) + 1
        if page.startswith(_TYPE, samples):
            samples = page.find(b"\n", samples, end) + 1
        name = page[start + len(_HELP) : page.find(b" ", start + len(_HELP), end)]
        yield name, view[start:samples], view[samples:end]
        start = end
