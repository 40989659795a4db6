"""The HTTP side of `headway watch`: its routes, and the server."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as HttpRefusal
from starlette.responses import Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.api_keys import read_keys, require_keys
from headway.generator.endpoint.server import serving
from headway.records.errors import ConfigurationError
from headway.report.watch import compared, now, series
from headway.report.watch.cache import trim_cache
from headway.report.watch.runs import NoSuchRun, WatchedRun, WatchedRuns
from headway.runtime.addresses import listening
from headway.runtime.supervision import until_interrupted
from headway.services.run_tokenizer import token_table
from headway.services.watch.access import Access, json_response
from headway.services.watch.stream import SharedAnswers, changes

_STATIC = Path(__file__).with_name("static")
_RUNS_EVERY_S = 3.0
Whole = Annotated[int | None, Query()]
Number = Annotated[float | None, Query()]


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Settings of `headway watch`, as its options have them."""

    roots: tuple[str, ...] = ("runs",)
    host: str = "127.0.0.1"
    port: int = 8060  # 0: any
    key_file: str = ""  # "": no key is needed
    usd_per_device_hour: float | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def watch(settings: WatchSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address)`` is called once. Raises ConfigurationError: a folder that
    isn't there, an address that is taken, or that other machines reach without keys, a file without any."""
    keys = read_keys(settings.key_file, "--key-file")
    require_keys(keys, settings.address, f"--host {settings.host}", "--key-file")
    watched = WatchedRuns(settings.roots, settings.usd_per_device_hour)
    async with until_interrupted() as stopped, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening(settings.address, "--host and --port")))
        await asyncio.to_thread(trim_cache)
        stack.callback(watched.close)
        answers = stack.enter_context(closing(SharedAnswers()))
        app = Access(make_app(watched, answers, stopped), keys)
        async with serving(app, EndpointConfig(address=settings.address), listener) as address:
            on_ready(address)
            await stopped.wait()


def make_app(watched: WatchedRuns, answers: SharedAnswers, stopped: asyncio.Event) -> FastAPI:
    """The application, without its door (`Access`). Streams end when ``stopped`` is set."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _handle_errors(app)
    routes = _Routes(watched, answers)
    _add_runs(app, routes)
    _add_series(app, routes)
    _add_rollouts(app, routes)

    @app.get("/api/stream")
    async def _stream(run: str = "") -> Response:
        def make() -> Any:
            return now.now(watched.run(run), watched.price) if run else watched.listing()

        async def get() -> bytes:
            try:
                stamp = (lambda: now.stamp(watched.run(run))) if run else None
                return await answers.get(("now", run), make, stamp)
            except Exception as error:
                # The boundary of a stream, whose status is sent already: the page shows what is wrong.
                return msgspec.json.encode({"error": f"{error}"})

        every_s = 1.0 if run else _RUNS_EVERY_S
        events = changes("now" if run else "runs", get, stopped, every_s)
        return StreamingResponse(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    app.mount("/", StaticFiles(directory=_STATIC, html=True))
    return app


def _handle_errors(app: FastAPI) -> None:
    def answer(status: int | None) -> Any:
        async def handle(_: Request, error: Any) -> Response:
            if isinstance(error, RequestValidationError):
                text = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
            elif isinstance(error, HttpRefusal):
                text = error.detail
            else:
                text = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
            return json_response({"error": text}, status or error.status_code)

        return handle

    for kind, status in ((NoSuchRun, 404), (ConfigurationError, 400), (RequestValidationError, 400), (Exception, 500)):
        app.add_exception_handler(kind, answer(status))
    app.add_exception_handler(HttpRefusal, answer(None))


class _Routes:
    """Gives the answers of routes, shared by all who ask the same."""

    def __init__(self, watched: WatchedRuns, answers: SharedAnswers) -> None:
        self.watched, self._answers = watched, answers

    async def all(self, request: Request, make: Callable[[], Any]) -> Response:
        """The answer to a request that isn't of one run."""
        return json_response(await self._answers.get((request.scope["path"], request.scope["query_string"]), make))

    async def run(
        self,
        request: Request,
        run: str,
        make: Callable[[WatchedRun], Any],
        stamp: Callable[[WatchedRun], Any] | None = None,
    ) -> Response:
        """The answer to a request of a run; ``stamp``: changes with the files that it is made of."""
        found = None if stamp is None else lambda: stamp(self.watched.run(run))
        key = (request.scope["path"], request.scope["query_string"])
        return json_response(await self._answers.get(key, lambda: make(self.watched.run(run)), found))


def _add_runs(app: FastAPI, routes: _Routes) -> None:
    watched = routes.watched

    @app.get("/api/health")
    async def _health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/api/runs")
    async def _runs(request: Request) -> Response:
        return await routes.all(request, watched.listing)

    @app.get("/api/now")
    async def _now(request: Request, run: str) -> Response:
        return await routes.run(request, run, lambda found: now.now(found, watched.price), now.stamp)

    @app.get("/api/compare")
    async def _compare(
        request: Request, runs: str, names: str = "", axis: str = "steps", points: int = Query(400, ge=2, le=4000)
    ) -> Response:
        wanted = [name for name in runs.split(",") if name]
        return await routes.all(
            request,
            lambda: compared.compare(list(map(watched.run, wanted)), _list(names), axis, points, watched.price),
        )


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _add_series(app: FastAPI, routes: _Routes) -> None:
    price = routes.watched.price

    @app.get("/api/names")
    async def _names(request: Request, run: str) -> Response:
        return await routes.run(request, run, series.names, WatchedRun.stamp)

    @app.get("/api/series")
    async def _series(
        request: Request,
        run: str,
        names: str = "",
        axis: str = "steps",
        points: int = Query(800, ge=2, le=10_000),
        since: float = 0.0,
    ) -> Response:
        def make(found: WatchedRun) -> Any:
            return series.series(found, _list(names), axis, points, since, price)

        return await routes.run(request, run, make, WatchedRun.stamp)

    @app.get("/api/events")
    async def _events(request: Request, run: str, after: int = -1) -> Response:
        return await routes.run(request, run, lambda found: series.events(found, after), WatchedRun.stamp)

    @app.get("/api/logs")
    async def _logs(request: Request, run: str) -> Response:
        return await routes.run(request, run, series.logs)

    @app.get("/api/log")
    async def _log(
        request: Request,
        run: str,
        name: str,
        end: Whole = None,
        unix_s: Number = None,
        bytes_: int = Query(65536, alias="bytes", ge=1, le=1 << 20),
    ) -> Response:
        return await routes.run(request, run, lambda found: series.log(found, name, end, unix_s, bytes_))

    @app.get("/api/config")
    async def _config(request: Request, run: str) -> Response:
        return await routes.run(request, run, series.configuration, WatchedRun.stamp)


def _rollouts_of(path: Path) -> Any:
    return _lazily("headway.report.watch.rollouts.view", "WatchedRollouts")(path, token_table(path))


def _lanes_of(path: Path) -> Any:
    return _lazily("headway.report.watch.lanes", "RunLanes")(path)


def _lazily(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise HTTPException(501, f"not there yet: {error}") from None


def _add_rollouts(app: FastAPI, routes: _Routes) -> None:
    async def ask(request: Request, run: str, make: Callable[[Path], Any], call: Callable[[Any], Any]) -> Response:
        def answer(found: WatchedRun) -> Any:
            with found.part(make) as reader:
                return call(reader)

        return await routes.run(request, run, answer)

    @app.get("/api/rollouts")
    async def _search(
        request: Request,
        run: str,
        text: str = "",
        reward_from: Number = None,
        reward_to: Number = None,
        tokens_from: Whole = None,
        tokens_to: Whole = None,
        solved: bool | None = None,
        task: str = "",
        ending: str = "",
        version_from: Whole = None,
        version_to: Whole = None,
        step_from: Whole = None,
        step_to: Whole = None,
        group: Whole = None,
        failure: bool = False,
        order: str = "newest",
        limit: int = Query(50, ge=1, le=500),
        after: str = "",
    ) -> Response:
        query = {name: value for name, value in locals().items() if name not in ("request", "run", "ask")}
        return await ask(request, run, _rollouts_of, lambda reader: reader.search(**query))

    @app.get("/api/rollout")
    async def _rollout(
        request: Request,
        run: str,
        row: int,
        sequence: Whole = None,
        offset: int = Query(0, ge=0),
        limit: int = Query(4000, ge=1, le=20_000),
    ) -> Response:
        window = {"sequence": sequence, "offset": offset, "limit": limit}
        return await ask(request, run, _rollouts_of, lambda reader: reader.rollout(row, **window))

    @app.get("/api/same_task")
    async def _same_task(request: Request, runs: str, task: str) -> Response:
        def newest(run: str) -> Any:
            with routes.watched.run(run).part(_rollouts_of) as reader:
                return {"run": run, "row": reader.newest_of_task(task)}

        def make() -> Any:
            return {"rollouts": [found for found in map(newest, _list(runs)) if found["row"] is not None]}

        return await routes.all(request, make)

    @app.get("/api/tasks")
    async def _tasks(request: Request, run: str, bins: int = Query(24, ge=1, le=500)) -> Response:
        return await ask(request, run, _rollouts_of, lambda reader: reader.tasks(bins))

    @app.get("/api/lanes")
    async def _lanes(request: Request, run: str) -> Response:
        return await ask(request, run, _lanes_of, lambda reader: reader.lanes())

    @app.get("/api/lanes/window")
    async def _window(
        request: Request,
        run: str,
        from_s: float,
        to_s: float,
        tracks: str = "",
        pixels: int = Query(1600, ge=1, le=8000),
    ) -> Response:
        chosen = [int(track) for track in _list(tracks) if track.isdigit()]
        return await ask(request, run, _lanes_of, lambda reader: reader.window(from_s, to_s, pixels, chosen))
