"""Shards of a store: the runs of each, and the text `i/N` that names a shard."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Self

_TEXT: Final = re.compile(r"(\d{1,4})/(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `number` of the `count` shards of a store, each of which has one service."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard that `text` names. Raises ValueError if it is not i/N with 0 <= i < N < 10000."""
        match = _TEXT.fullmatch(text)
        if not match or not int(match[1]) < int(match[2]):
            raise ValueError(f"shard {text!r} must be i/N with 0 <= i < N, as in 0/1 or 2/4")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, name: str) -> Shard:
        """Return the shard that owns the run `name`: the number is that of `hashmod` in relabelling of Prometheus."""
        digest = hashlib.md5(name.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()
        return Shard(int.from_bytes(digest[8:]) % self.count, self.count)

    def owns(self, name: str) -> bool:
        """Return whether this shard owns the run `name`."""
        return self.count == 1 or self.of(name) == self
