"""The HTTP side of `headway watch`: its routes, and the server."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pyarrow as pa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.server import serving
from headway.records.errors import ConfigurationError
from headway.report.watch import compared, now, report, series
from headway.report.watch.cache import trim_cache
from headway.report.watch.runs import NoSuchRun, WatchedRun, WatchedRuns
from headway.runtime.addresses import listening, service_keys
from headway.runtime.supervision import until_interrupted
from headway.services.watch import rollouts
from headway.services.watch.access import AccessControl, json_response
from headway.services.watch.stream import SharedAnswers, changes, encode

_STATIC = Path(__file__).with_name("static")
_RUNS_EVERY_S = 3.0
View = Callable[..., Any]  # called with a WatchedRun (or several) and values of the query by name
Stamp = Callable[[WatchedRun], Any]  # changes with the files that a view reads
_VIEWS: dict[str, tuple[View, Stamp | None]] = {
    "now": (now.now, now.stamp),
    "report": (report.report, WatchedRun.stamp),
    "names": (series.names, WatchedRun.stamp),
    "series": (series.series, WatchedRun.stamp),
    "events": (series.events, WatchedRun.stamp),
    "config": (series.configuration, WatchedRun.stamp),
    "logs": (series.logs, None),
    "log": (series.log, None),
    "compare": (compared.compare, None),
    **{name: (view, None) for name, view in rollouts.VIEWS.items()},
}


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """Settings of `headway watch`, as its options have them."""

    roots: tuple[str, ...] = ("runs",)
    host: str = "127.0.0.1"
    port: int = 8060  # 0: any
    key_file: str = ""  # "": no key is needed
    usd_per_device_hour: float | None = None


async def watch(settings: PageSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address)`` is called once. Raises ConfigurationError: a folder that
    isn't there, an address that is taken, or that other machines reach without keys, a file without any."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    endpoint = EndpointConfig(address=f"{host}:{settings.port}")
    keys = service_keys(settings.key_file, "--key-file", endpoint.address, f"--host {settings.host}")
    watched = WatchedRuns(settings.roots, settings.usd_per_device_hour)
    _without_pandas()
    async with until_interrupted() as stopped, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening(endpoint.address, "--host and --port")))
        await asyncio.to_thread(trim_cache)
        stack.enter_context(closing(watched))
        answers = stack.enter_context(closing(SharedAnswers()))
        async with serving(AccessControl(make_app(watched, answers, stopped), keys), endpoint, listener) as address:
            on_ready(address)
            await stopped.wait()


def _without_pandas() -> None:
    """Have pyarrow look for pandas now and find none: else the first page waits for its import, and 50 MB stay."""

    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    pa.array([])
    sys.meta_path.remove(finder)


def make_app(watched: WatchedRuns, answers: SharedAnswers, stopped: asyncio.Event) -> FastAPI:
    """The application, without its door (`AccessControl`). Streams end when ``stopped`` is set."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for kind, status in {NoSuchRun: 404, ConfigurationError: 400, RequestValidationError: 400, Exception: 500}.items():
        app.add_exception_handler(kind, _refusal(status))
    app.add_exception_handler(HTTPException, _refusal(None))
    for name, (view, stamp) in _VIEWS.items():
        app.get(f"/api/{name}")(_endpoint(watched, answers, view, stamp))

    @app.get("/api/health")
    async def _health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/api/runs")
    async def _runs() -> Response:
        return json_response(await answers.get("runs", watched.listing))

    @app.get("/api/stream")
    async def _stream(run: str = "") -> Response:
        if run:
            await asyncio.to_thread(watched.run, run)  # one that isn't there is refused as elsewhere

        async def get() -> bytes:
            try:
                if not run:
                    return await answers.get("runs", watched.listing)
                shown, stamp = lambda: now.now(watched.run(run), watched.price), lambda: now.stamp(watched.run(run))
                return await answers.get(("now", run), shown, stamp)
            except Exception as error:
                # The boundary of a stream, whose status is sent already: the page shows what is wrong.
                return encode({"error": str(error)})

        events = changes("now" if run else "runs", get, stopped, 1.0 if run else _RUNS_EVERY_S)
        return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    app.mount("/", StaticFiles(directory=_STATIC, html=True))
    return app


def _endpoint(watched: WatchedRuns, answers: SharedAnswers, view: View, stamp: Stamp | None) -> Callable[..., Any]:
    """FastAPI's function for a view: its query has the view's parameters, checked by their types, with the id of the
    run (``run``), or several (``runs``, separated by commas), in place of the first. ``price`` is the server's own."""
    hints, (first, *rest) = get_type_hints(view), inspect.signature(view).parameters.values()
    several, priced = first.name == "runs", any(parameter.name == "price" for parameter in rest)

    async def endpoint(**query: Any) -> Response:
        ids, more = query.pop(first.name), {"price": watched.price} if priced else {}

        def make() -> Any:
            found = [watched.run(one) for one in ids.split(",") if one] if several else watched.run(ids)
            return view(found, **query, **more)

        found = None if stamp is None else partial(lambda of: of(watched.run(ids)), stamp)
        return json_response(await answers.get((view, ids, *sorted(query.items())), make, found))

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [first.replace(kind=kind, annotation=str)]
    parameters += [
        of.replace(kind=kind, annotation=hints.get(of.name, of.annotation)) for of in rest if of.name != "price"
    ]
    endpoint.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return endpoint


def _refusal(status: int | None) -> Any:
    async def handle(_: Request, error: Any) -> Response:
        if status is None:
            return json_response({"error": error.detail}, error.status_code)
        if isinstance(error, RequestValidationError):
            return json_response({"error": "; ".join(f"{of['loc'][-1]}: {of['msg']}" for of in error.errors())}, status)
        words = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
        return json_response({"error": words}, status)

    return handle
