"""Names of torch that a release or build of torch may lack, private ones in particular.

A module that needs such a name at its import reads it with `torch_name`. All other accesses run inside the error
boundary of a monitor, which recognizes a missing name with `missing_name`. Both publish one line for each name, and
training continues without the part that needs the name.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger("rankscope")


def torch_name(path: str, absent: Any, without: str = "", *, earlier: str = "") -> Any:
    """Return the object with the full name `path`, or with its full name `earlier` in older releases, else `absent`.

    If torch has neither, log `without`, a sentence about what the monitor does not do; log nothing if it is empty.
    """
    for name in filter(None, (path, earlier)):
        with contextlib.suppress(AttributeError, ImportError):
            return pkgutil.resolve_name(name)
    if without:
        log.warning("torch %s has no %s: %s; training continues", torch.__version__, path, without)
    return absent


def torch_variable(path: str, absent: Any, without: str) -> Callable[[], Any]:
    """Return a function that returns the present value of the variable `path` of a module, as `torch_name` does."""
    torch_name(path, absent, without)
    module, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(module)
    return lambda: getattr(owner, name, absent)


def missing_name(error: BaseException) -> str | None:
    """Return the name that torch lacks, such as "torch._C._name", if this is the reason of `error`, else None."""
    if isinstance(error, ImportError):
        return error.name if _is_of_torch(error.name) else None
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    if isinstance(error.obj, ModuleType):
        return f"{error.obj.__name__}.{error.name}" if _is_of_torch(error.obj.__name__) else None
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    # If a class of the script inherits from a class of torch, only its private names are names of torch.
    classes = owner.__mro__ if error.name.startswith("_") else (owner,)
    found = next((item for item in classes if _is_of_torch(item.__module__)), None)
    return None if found is None else f"{found.__name__}.{error.name}"


def _is_of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"
