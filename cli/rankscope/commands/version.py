"""`rankscope version`: what is installed, as one would paste it into a report."""

from __future__ import annotations

import importlib.metadata
import platform

from rankscope_contract import SCHEMA_VERSION, __version__

LIBRARIES = ("torch", "pyarrow", "prometheus_client", "numba", "deltalake", "duckdb", "aiohttp", "apprise")


def version() -> None:
    """Print the versions of Rankscope and of the libraries it stands on."""
    print(f"rankscope {__version__} (schema {SCHEMA_VERSION})")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for library in LIBRARIES:
        try:
            print(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{library} not installed")
