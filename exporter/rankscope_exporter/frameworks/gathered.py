"""What both generations of FSDP have in common: parameters are gathered for a moment, gradients scattered again."""

from __future__ import annotations


class Gathered:
    """Stands before `Framework` among the bases."""

    @property
    def replicated(self) -> bool:
        """Return True: what is too small to be sharded, or ignored, is the same everywhere."""
        return True

    @property
    def local_until_backward_ends(self) -> bool:
        """Return False: the gathered gradient is gone when backward ends."""
        return False

    @property
    def reduces_each_micro_batch(self) -> bool | None:
        """Return None: it does unless the loop holds gradients back."""
        return None

    @property
    def reduces(self) -> bool:
        """Return True."""
        return True
