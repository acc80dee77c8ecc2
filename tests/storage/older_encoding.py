"""Write files as earlier releases did, with integers that some readers cannot read."""

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
        names = {name for name, _, leaf in encoding._leaves(dataset) if str(leaf) != "string"}
        return {
            name: "BYTE_STREAM_SPLIT" if name in names and one in integers else one
            for name, one in current(dataset).items()
        }

    with mock.patch.object(encoding, "_encodings", split), wide_differences():
        yield


@contextlib.contextmanager
def wide_differences() -> Iterator[None]:
    """Write integers as differences of any width."""
    layout = lambda *found: (set(), list(range(0, found[-1], encoding.ROW_GROUP_ROWS)))  # noqa: E731
    with mock.patch.multiple(encoding, _plain_integers=layout, INTEGERS_KEY="unknown"):
        yield
