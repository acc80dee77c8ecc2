"""An HTTP server on loopback, as a receiver of requests or as a proxy."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass
class Web:
    """An HTTP server on loopback: its answer, and the requests that it got."""

    status: int = 200
    text: bytes = b""
    location: str = ""
    port: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def start(self) -> ThreadingHTTPServer:
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                web.requests.append((self.path, dict(self.headers)))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(web.status)
                if web.location:
                    self.send_header("Location", web.location)
                self.send_header("Content-Length", str(len(web.text)))
                self.end_headers()
                self.wfile.write(web.text)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server
