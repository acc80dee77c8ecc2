"""`rankscope version`: print the installed versions for a bug report."""

from __future__ import annotations

import importlib.metadata
import platform

from rankscope_contract import SCHEMA_VERSION, __version__

LIBRARIES = (
    "torch",
    "pyarrow",
    "prometheus_client",
    "triton",
    "deltalake",
    "duckdb",
    "aiohttp",
    "apprise",
    "asyncssh",
)


def version() -> None:
    """Print the versions of Rankscope, Python and the libraries that it uses."""
    print(f"rankscope {__version__} (schema {SCHEMA_VERSION})")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for library in LIBRARIES:
        try:
            print(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{library} not installed")
