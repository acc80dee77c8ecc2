"""The pages of all ranks of a launch on one host as one page. Bytes are moved, lines are not looked at."""

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
"""Begins a family and nothing else: a line break in a name or label is escaped."""
_TYPE: Final = b"# TYPE "


class NodeExposition:
    """The node's page as one of its ranks makes it; every rank can, so that none of them has to be there."""

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
        self._neighbours = NodePeers(identity, lambda: joined(own()), on_fault=on_fault, meter=meter)

    @property
    def node(self) -> str:
        """Return what the ranks that show one page together have in common; empty before `start()`."""
        return self._neighbours.node

    def start(self) -> None:
        """Let the other ranks have this rank's page. Raises ServeError."""
        self._neighbours.start()

    def pieces(self) -> list[Any]:
        """Return the page of all ranks that answer now, lowest rank first."""
        who = self._identity
        try:
            gathered = self._neighbours.gather()
        except Exception as error:  # noqa: BLE001 - this rank's own page is shown all the same
            self._on_fault("pages of the other ranks", error)
            gathered = Gathered((), 0)
        # One page per rank: a launch that cannot be told from its successor may still have a process here.
        pages = {**dict(gathered.pages), who.rank: joined(self._own())}
        return [
            census(who.run, who.host, shown=len(pages), silent=gathered.silent),
            *merged(pages[rank] for rank in sorted(pages)),
        ]

    def close(self) -> None:
        """Leave the page."""
        self._neighbours.close()

    def abandon(self) -> None:
        """In a forked child: leave it to the parent."""
        self._neighbours.abandon()


@dataclass(slots=True)
class _Family:
    head: memoryview
    samples: list[memoryview] = field(default_factory=list)


def merged(pages: Iterable[bytes]) -> list[memoryview]:
    """Return the pages as pieces of one, family by family: one HELP and TYPE each, as the format demands."""
    families: dict[bytes, _Family] = {}
    for page in pages:
        for name, head, samples in _families(page):
            families.setdefault(name, _Family(head)).samples.append(samples)
    return [piece for family in families.values() for piece in (family.head, *family.samples)]


def census(run: str, host: str, *, shown: int, silent: int) -> bytes:
    """Return the family that says how many ranks the page shows, and how many live ones did not answer in time."""
    labels = f'run="{label_value(run)}",host="{label_value(host)}"'
    lines = "".join(
        f'{NODE_RANKS.name}{{{labels},state="{state}"}} {count}\n'
        for state, count in (("shown", shown), ("silent", silent))
    )
    head = f"# HELP {NODE_RANKS.name} {NODE_RANKS.help}\n# TYPE {NODE_RANKS.name} {NODE_RANKS.type}\n"
    return (head + lines).encode("utf-8", "replace")


def joined(pieces: Iterable[Any]) -> bytes:
    """Return a page that is in pieces as one."""
    return b"".join(memoryview(piece).cast("B") for piece in pieces)


def _families(page: bytes) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """Yield (name, HELP and TYPE, samples) of each family; what stands before the first is no family of ours."""
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
