"""Classes of torch that take seconds to import: whoever has an object of one has imported it already."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """Return the class `name` of `module` for isinstance(), matching nothing while the program has not imported it."""
    return getattr(sys.modules.get(module), name, ())
