"""Write files of tensor statistics as earlier releases did: integers are split into bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from rankscope_storage.files import encoding


@contextlib.contextmanager
def split_integers() -> Iterator[None]:
    """Write the integers of all datasets with BYTE_STREAM_SPLIT, except constant ones."""
    current = encoding._encodings

    def split(dataset: str) -> dict[str, str]:
        integers = ("DELTA_BINARY_PACKED", "PLAIN")
        names = {name for name, leaf in encoding._leaves(dataset) if str(leaf) != "string"}
        return {
            name: "BYTE_STREAM_SPLIT" if name in names and one in integers else one
            for name, one in current(dataset).items()
        }

    with mock.patch.object(encoding, "_encodings", split):
        yield
