"""Serves `headway watch` over HTTP: its routes, and the server."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import mimetypes
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pyarrow as pa
from pydantic import ValidationError, create_model

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.errors import Headers, HttpError
from headway.generator.endpoint.exchange import HttpExchange, Message, Receive, Send
from headway.generator.endpoint.http_app import HeadRequest, HttpApp
from headway.generator.endpoint.server import serving
from headway.records.errors import ConfigurationError
from headway.report.watch import run_series, view_compare, view_now, view_report
from headway.report.watch.cache import trim_cache
from headway.report.watch.watched_runs import NoSuchRun, WatchedRun, WatchedRuns
from headway.runtime.addresses import listening_socket, service_keys
from headway.runtime.supervision import until_interrupted
from headway.services.watch import rollouts
from headway.services.watch.access import AccessControl
from headway.services.watch.stream import SharedAnswers, changes, encode

_STATIC = Path(__file__).with_name("static")
_STREAM = "/api/stream"
_RUNS_EVERY_S = 3.0
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer streams
)
View = Callable[..., Any]  # called with a WatchedRun (or several) and values of the query by name
Stamp = Callable[[WatchedRun], Any]  # changes with the files that a view reads
_VIEWS: dict[str, tuple[View, Stamp | None]] = {
    "now": (view_now.now, view_now.stamp),
    "report": (view_report.report, WatchedRun.stamp),
    "names": (run_series.names, WatchedRun.stamp),
    "series": (run_series.series, WatchedRun.stamp),
    "events": (run_series.events, WatchedRun.stamp),
    "config": (run_series.configuration, WatchedRun.stamp),
    "logs": (run_series.logs, None),
    "log": (run_series.log, None),
    "compare": (view_compare.compare, None),
    **{name: (view, None) for name, view in rollouts.VIEWS.items()},
}


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """Settings of `headway watch`, with the names of its options."""

    roots: tuple[str, ...] = ("runs",)
    host: str = "127.0.0.1"
    port: int = 8060  # 0: any
    key_file: str = ""  # "": no key is needed
    usd_per_device_hour: float | None = None


async def watch(settings: PageSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address)`` is called once. Raises ConfigurationError for a missing
    folder, an address that is taken, or that other machines reach without keys, and a file without keys."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    endpoint = EndpointConfig(address=f"{host}:{settings.port}")
    keys = service_keys(settings.key_file, "--key-file", endpoint.address, f"--host {settings.host}")
    watched_runs = WatchedRuns(settings.roots, settings.usd_per_device_hour)
    _prevent_pandas_import()
    async with until_interrupted() as stop_event, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening_socket(endpoint.address, "--host and --port")))
        await asyncio.to_thread(trim_cache)
        stack.enter_context(closing(watched_runs))
        answers = stack.enter_context(closing(SharedAnswers()))
        async with serving(WatchApp(watched_runs, answers, stop_event, endpoint, keys), endpoint, listener) as address:
            on_ready(address)
            await stop_event.wait()


def _prevent_pandas_import() -> None:
    """Make pyarrow's import of pandas fail; otherwise the first page would wait for it, and 50 MB would stay in use."""

    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    pa.array([])
    sys.meta_path.remove(finder)


class WatchApp(HttpApp):
    """ASGI application with the page's files, and the JSON that they request. Errors are ``{"error": MESSAGE}``."""

    def __init__(
        self, watched: WatchedRuns, answers: SharedAnswers, stopped: asyncio.Event, settings: EndpointConfig,
        keys: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Read the list of the page's files. ``stopped``: ends streams when set. ``keys``: see `AccessControl`."""
        super().__init__(settings, proxied=True)  # hosts are checked by the access control
        self._watched = watched
        self._answers = answers
        self._stopped = stopped
        self._access = AccessControl(keys)
        file_by_path = {f"/{file.relative_to(_STATIC)}": file for file in _STATIC.rglob("*") if file.is_file()}
        self._files = {**file_by_path, "/": _STATIC / "index.html"}
        self._routes: dict[str, Callable[[HttpExchange], Awaitable[bytes]]] = {
            "/api/health": self._health,
            "/api/runs": self._runs,
            **{f"/api/{name}": self._view_route(*view) for name, view in _VIEWS.items()},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept_headers = [header for header in message["headers"] if header[0] != b"cache-control"]
                cache_control = b"no-store" if scope["path"].startswith("/api/") else b"no-cache"
                message = {**message, "headers": [*kept_headers, *_HEADERS, (b"cache-control", cache_control)]}
            await send(message)

        await super().__call__(scope, receive, send_with_headers)

    def route(self, path: str) -> str:
        return path if path in self._routes or path in self._files or path == _STREAM else "other"

    def error_body(self, exchange: HttpExchange, error: HttpError) -> bytes:
        return encode({"error": str(error)})

    async def answer(self, exchange: HttpExchange) -> None:
        if redirect := self._access.require(exchange):
            await exchange.reply(303, b"", redirect)
            return
        try:
            if exchange.path in self._routes:
                await exchange.reply(200, await self._routes[exchange.path](exchange))
            elif exchange.path == _STREAM:
                await self._stream(exchange)
            else:
                await exchange.reply(*self._file(exchange))
        except ConfigurationError as error:
            raise HttpError(404 if isinstance(error, NoSuchRun) else 400, str(error)) from None

    async def _health(self, exchange: HttpExchange) -> bytes:
        return encode({"status": "ok"})

    async def _runs(self, exchange: HttpExchange | None = None) -> bytes:
        return await self._answers.get("runs", self._watched.listing)

    def _view_route(self, view: View, stamp: Stamp | None) -> Callable[[HttpExchange], Awaitable[bytes]]:
        """Make the route of a view. Its query has the view's parameters, validated by their types; the first one is the
        id of a run (``run``), or of several (``runs``, separated by commas). The server sets ``price``."""
        hints, (first, *rest) = get_type_hints(view), inspect.signature(view).parameters.values()
        several, extra = (first.name == "runs", {arg.name: self._watched.price for arg in rest if arg.name == "price"})
        query_fields: dict[str, Any] = {
            arg.name: (hints.get(arg.name, arg.annotation), ... if arg.default is arg.empty else arg.default)
            for arg in rest
            if arg.name not in extra
        }
        query_model = create_model("Query", **{first.name: (str, ...), **query_fields})

        async def read(exchange: HttpExchange) -> bytes:
            try:
                query = dict(query_model.model_validate(exchange.query))
            except ValidationError as error:
                error_text = "; ".join(f"{detail['loc'][-1]}: {detail['msg']}" for detail in error.errors())
                raise HttpError(400, error_text) from None
            ids, find_run = query.pop(first.name), self._watched.run

            def make() -> Any:
                view_runs = [find_run(run_id) for run_id in ids.split(",") if run_id] if several else find_run(ids)
                return view(view_runs, **query, **extra)

            run_stamp = None if stamp is None else partial(lambda stamp_of: stamp_of(find_run(ids)), stamp)
            return await self._answers.get((view, ids, *sorted(query.items())), make, run_stamp)

        return read

    async def _stream(self, exchange: HttpExchange) -> None:
        """Send changes of a run, or of the list of runs, until the client disconnects or the server ends."""
        run, watched = exchange.query.get("run", ""), self._watched
        if exchange.method == "HEAD":
            raise HeadRequest
        if run:
            await asyncio.to_thread(watched.run, run)  # raises for an unknown id, as other routes do

        async def get() -> bytes:
            try:
                if not run:
                    return await self._runs()
                make_view, stamp = (
                    lambda: view_now.now(watched.run(run), watched.price),
                    lambda: view_now.stamp(watched.run(run)),
                )
                return await self._answers.get(("now", run), make_view, stamp)
            except Exception as error:
                # The boundary of a stream, whose status is sent already: the page shows the error.
                return encode({"error": str(error)})

        async def write() -> None:
            async for event in changes("now" if run else "runs", get, self._stopped, 1.0 if run else _RUNS_EVERY_S):
                await exchange.write(event)
            await exchange.end_stream(b"")

        await exchange.begin_stream()
        await exchange.while_connected(write())

    def _file(self, exchange: HttpExchange) -> tuple[int, bytes, Headers, bytes]:
        """Return status, body, headers and type of a file of the page, as it is now. Raises HttpError 404."""
        if (file := self._files.get(exchange.path)) is None:
            raise HttpError(404, "Not Found")
        body, content_type = file.read_bytes(), mimetypes.guess_type(file)[0] or "text/plain"
        content_type += "; charset=utf-8" if content_type.startswith("text/") else ""
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        is_known = etag in exchange.header("if-none-match")
        return 304 if is_known else 200, b"" if is_known else body, ((b"etag", etag.encode()),), content_type.encode()
