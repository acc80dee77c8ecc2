"""`rankscope view`: show the pages of a store or of an offline folder, without a running service."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from rankscope.access.service import service_errors
from rankscope.access.stores import readable_store, store_errors
from rankscope.shell.errors import command_errors
from rankscope.shell.options import Listen, Store, store_folder


def view(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Store, or folder with records of ranks. Default: that of --store.",
            parser=store_folder,
            metavar="FOLDER",
        ),
    ] = None,
    store: Store = Path("history"),
    listen: Listen = "127.0.0.1:0",
) -> None:
    """Show the runs of a store as web pages, until Ctrl-C. The pages follow a store that a service writes.

    On loopback, the pages need no token. At an address that other machines reach, the token must be in RANKSCOPE_TOKEN
    or in the file named by RANKSCOPE_TOKEN_FILE; a browser asks for it as password.

    [bold]Example[/bold]: rankscope view history
    """
    from rankscope_ingest.base.config import split_address

    store, listen = source or store, listen or "127.0.0.1:0"
    with command_errors(usage=(ValueError,)):
        split_address(listen)
    from rankscope_ingest.http.pages import serve_pages
    from rankscope_storage.connection import connect

    def ready(url: str) -> None:
        print(f"pages of {store}: {url}", flush=True)

    with readable_store(store) as folder:
        with store_errors():
            connect(folder).close()
        with service_errors():
            asyncio.run(serve_pages(folder, listen, environment=os.environ, on_ready=ready, named=store))
