"""Python imports this file at its start: it loads the module MUTANT_OF from its changed copy MUTANT_COPY."""

import importlib.machinery
import os
from pathlib import Path

_OF, _COPY = os.environ.get("MUTANT_OF"), os.environ.get("MUTANT_COPY")
_get_code = importlib.machinery.SourceFileLoader.get_code


def _changed_code(loader, name):
    if os.path.realpath(loader.path) == _OF:
        return compile(Path(_COPY).read_bytes(), _OF, "exec", dont_inherit=True)
    return _get_code(loader, name)


if _OF and _COPY:
    importlib.machinery.SourceFileLoader.get_code = _changed_code
