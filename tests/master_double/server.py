"""HTTP: finds the route of a request, checks who asks, turns answers and errors into responses.

A route is a function `(master, request, **path parameters)`. It runs with the lock held unless it
is `unlocked`, as those that wait must be. It returns a JSON object, `Bytes`, or an iterator of
JSON objects, which is sent line by line as it grows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from .faults import PAGE
from .rules import Conflict
from .schema import ConfigError

if TYPE_CHECKING:
    from .double import MasterDouble

_REASONS = {400: "InvalidArgument", 401: "Unauthenticated", 403: "PermissionDenied"}


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Bytes:
    content: bytes
    content_type: str


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes
    user: str = ""

    def json(self) -> Any:
        try:
            return json.loads(self.body) if self.body else {}
        except ValueError as error:
            raise ApiError(400, f"request body is not JSON: {error}") from error

    def get(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def number(self, name: str, default: int = 0) -> int:
        return int(self.get(name) or default)

    def flag(self, name: str) -> bool:
        return self.get(name).lower() == "true"


@dataclass
class Route:
    method: str
    pattern: re.Pattern[str]
    numbers: list[str]
    handler: Callable[..., Any]
    public: bool
    unlocked: bool


class Routes:
    """A table that a module fills with `@routes.on("GET", "/api/v1/things/{thing_id:int}")`."""

    def __init__(self) -> None:
        self.table: list[Route] = []

    def on(
        self, method: str, path: str, *, public: bool = False, unlocked: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        numbers = re.findall(r"\{(\w+):int\}", path)
        pattern = re.sub(r"\{(\w+):int\}", r"(?P<\1>[0-9]+)", path)
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            compiled = re.compile(pattern + "$")
            self.table.append(Route(method, compiled, numbers, handler, public, unlocked))
            return handler

        return register


def page(request: Request, name: str, items: list[Any]) -> dict[str, Any]:
    """One page of a list, as the paginating clients ask for it; no limit means everything."""
    start = request.number("offset")
    limit = request.number("limit")
    end = len(items) if limit <= 0 else min(len(items), start + limit)
    pagination = {
        "offset": start,
        "limit": limit,
        "startIndex": start,
        "endIndex": max(start, end),
        "total": len(items),
    }
    return {name: items[start:end], "pagination": pagination}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # Many trials and tests connect at once; the default backlog of 5 would refuse some.
    request_queue_size = 128

    def __init__(self, master: MasterDouble, host: str, port: int, tables: list[Routes]) -> None:
        super().__init__((host, port), _Handler)
        self.master = master
        self.routes = [route for table in tables for route in table.table]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that vanish are part of the play; errors of routes are answered with 500."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    # Small answers must not wait for the client's delayed acknowledgment.
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        master = self.server.master
        split = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, split.path, parse_qs(split.query), self.rfile.read(length))
        fault = master.faults.next_for(request.method, request.path)
        how = fault.how if fault is not None else ""
        if how in ("page", "silence"):
            master.requests.append((request.method, request.path, fault.status))
            self._stand_in(fault)
            return
        try:
            if how == "error":
                raise ApiError(fault.status, "injected failure")
            answer = self._call(request)
        except ApiError as error:
            answer, status = self._error(error.status, error.message)
        except (ConfigError, Conflict) as error:
            answer, status = self._error(400, str(error))
        except Exception as error:
            answer, status = self._error(500, f"{type(error).__name__}: {error}")
            master.internal_errors.append(error)
        else:
            status = 200
        master.requests.append((request.method, request.path, status))
        if how == "act silently":
            self._stand_in(fault)
        elif how == "half":
            self._send_half(answer)
        else:
            self._send(answer, status)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _call(self, request: Request) -> Any:
        master = self.server.master
        known_path = False
        for route in self.server.routes:
            match = route.pattern.match(request.path)
            if match is None:
                continue
            known_path = True
            if route.method != request.method:
                continue
            if not route.public:
                request.user = self._authenticate()
            arguments = {
                name: int(value) if name in route.numbers else unquote(value)
                for name, value in match.groupdict().items()
            }
            if route.unlocked:
                return route.handler(master, request, **arguments)
            with master.world.changed:
                answer = route.handler(master, request, **arguments)
                if request.method != "GET":
                    master.world.changed.notify_all()
                return answer
        raise ApiError(405 if known_path else 404, f"no route for {request.method} {request.path}")

    def _authenticate(self) -> str:
        header = self.headers.get("Authorization") or self.headers.get("Grpc-Metadata-x-allocation-token") or ""
        with self.server.master.world.changed:
            user = self.server.master.world.user_of(header.removeprefix("Bearer "))
        if user is None:
            raise ApiError(401, "unauthenticated")
        return user

    @staticmethod
    def _error(status: int, message: str) -> tuple[dict[str, Any], int]:
        # The gateway's form, plus the plain form of the older endpoints.
        reason = _REASONS.get(status, "Unknown")
        error = {"code": status, "reason": reason, "error": message}
        return {"message": message, "error": error}, status

    def _send(self, answer: Any, status: int) -> None:
        if isinstance(answer, Iterator):
            self._stream(answer)
            return
        if not isinstance(answer, Bytes):
            answer = Bytes(json.dumps(answer).encode(), "application/json")
        self.send_response(status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def _stand_in(self, fault: Any) -> None:
        """What a client gets from a proxy whose master is away, or from a connection that has died."""
        if fault.how == "page":
            self._send(Bytes(PAGE, "text/html"), fault.status)
        else:
            self.server.master.faults.closed.wait()
            self.close_connection = True

    def _send_half(self, answer: Any) -> None:
        if isinstance(answer, Iterator):
            content = b"".join(json.dumps({"result": line}).encode() + b"\n" for line in answer)
        else:
            content = answer.content if isinstance(answer, Bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(max(len(content), 2)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def _stream(self, lines: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = json.dumps({"result": line}).encode() + b"\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are kept in `MasterDouble.requests`; the terminal belongs to the tests."""
