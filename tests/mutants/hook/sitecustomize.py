"""Imports one module from a changed copy of its file. Python runs this file at its start if PYTHONPATH has the folder.

MUTANT_OF is the path of the module's file, and MUTANT_COPY is that of the copy. Bytecode is not kept.
"""

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
