"""The modules of all commands and importers. A process imports them before it forks `rankscope` commands."""

from importlib import import_module

from rankscope.commands import command
from rankscope_ingest.importers import importers

for name in ("numpy.ma", "pyarrow.acero", "pyarrow.csv", "pydantic.type_adapter"):
    import_module(name)
command()
importers()
