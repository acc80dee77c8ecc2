"""Several parts of one model on one rank of a pipeline, each with a number: its virtual stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rankscope_exporter.deferred import Row


def numbers_of(chunks: Sequence[nn.Module]) -> dict[int, int]:
    """Return the chunk of each parameter and module by identity, the first that has it; nothing of one alone."""
    found: dict[int, int] = {}
    for number, chunk in enumerate(chunks) if len(chunks) > 1 else ():
        for part in (*chunk.modules(), *chunk.parameters()):
            found.setdefault(id(part), number)
    return found


def as_one(chunks: Sequence[nn.Module]) -> nn.Module:
    """Return a module that has all chunks, whose names begin with their numbers there; one alone as it is."""
    return chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)


def told_apart(row: Row) -> Row:
    """Return a row of a parameter or module of such a model, with the chunk that its name begins with."""
    name: str = row["tensor"] if "tensor" in row else row["module"]
    return {**row, "vpp_stage": int(name.partition(".")[0])}
