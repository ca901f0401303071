"""An HTTP server on loopback that answers what a test says, and remembers what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    """`promised` is the length in the header, if it is not that of the content."""

    content: bytes = b""
    kind: str = "application/dicom+json"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    promised: int | None = None


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class QuietServer(ThreadingHTTPServer):
    """A client that is gone in the middle, as tests want it, is no reason for a traceback."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


class WebServer:
    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                asked = Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                server.asked.append(asked)
                told = answer(asked)
                self.send_response(told.status)
                self.send_header("Content-Type", told.kind)
                self.send_header("Content-Length", str(len(told.content) if told.promised is None else told.promised))
                for name, value in told.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(told.content)
                self.close_connection = told.promised is not None

            do_POST = do_GET

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
