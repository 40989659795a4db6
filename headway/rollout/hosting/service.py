"""The worker that environments live in: many rollouts side by side on one event loop, their sandboxes in one pool."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec

from headway.config.endpoint import ENVIRONMENTS, EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.records.environment import WORKER_EVENT, EnvironmentState, EpisodeScore, NextTurn, Reply
from headway.records.errors import ConfigurationError
from headway.records.rollout import Failure, ToolTimes, Verdict
from headway.records.sandbox import SandboxError, SandboxSpec, Snapshot
from headway.records.sandbox_statistics import SandboxStatistics
from headway.records.task import Task
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.episode_sandbox import EpisodeSandbox
from headway.rollout.fixed_models import FixedModels, require_models
from headway.rollout.hosting.mcp.servers import ToolServers
from headway.rollout.tools import ToolCalls, tools_by_name
from headway.rollout.verification.verdicts import to_verdict
from headway.runtime.clock import Clock, RealClock
from headway.runtime.hooks import error_text, is_infrastructure, place_of, storable
from headway.runtime.imports import import_class, import_function
from headway.sandbox.backends import spec_of
from headway.sandbox.guards import RunSandboxes
from headway.sandbox.pool import SandboxPool
from headway.sandbox.snapshot_store import is_hosted

KEY = "environment.name"
_LONGEST_DETAIL = 4000  # characters of a traceback that are kept
_AWAITED = ("begin", "reply", "score", "park", "resume", "close", "stop")  # methods of an environment's
_CLOSE_S = 20.0  # that all episodes and sandboxes have to end; the episodes half of it, and what they share a quarter
_CANCEL_S = 10.0  # that what is done for a rollout has to end, when it is over

# Number of a request, whether it succeeded, its result or its error, seconds from its arrival to its answer.
Answered = tuple[int, bool, Any, float]


class EnvironmentService:
    """Worker class: runs environments. ``submit`` accepts a request at once; its result is emitted when it is ready."""

    def __init__(
        self,
        context: Any,
        *,
        environment: dict[str, Any],
        sandbox: dict[str, Any],
        sandboxes: str,
        run: str = "",
        snapshots: str = "",
        seed: int = 0,
    ) -> None:
        """``environment`` and ``sandbox``: their sections as plain types. ``sandboxes``: the ``module:function`` that
        makes a pool of sandboxes as `orchestrator/actors/sandboxes.py` does, with its guards; ``run``: whose they are;
        ``snapshots``: the folder of parked ones. Raises ConfigurationError for an environment that can't be imported or
        refuses a parameter, and for sandboxes or servers of tools that can't be had."""
        self._emit: Callable[[Answered], None] = context.emit
        settings = EnvironmentConfig.model_validate(environment)
        played = load_environment(settings)
        self.loop = asyncio.new_event_loop()  # its tasks are what a look at this worker shows
        self._clock = RealClock()
        self._open = AsyncExitStack()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()
        folder = Path(snapshots).resolve() if snapshots else None
        clock, boxes = self._clock, SandboxConfig.model_validate(sandbox)

        async def begin() -> tuple[Episodes, RunSandboxes]:
            guarded = import_function(sandboxes, "sandboxes", ())(boxes, clock, run=run, snapshots=folder, seed=seed)
            pool: RunSandboxes = await self._open.enter_async_context(guarded)
            spec = await spec_of(boxes) if played.uses_sandbox else boxes.spec
            played.tool_calls.report = lambda *event: self._emit((WORKER_EVENT, True, event, 0.0))
            episodes = Episodes(played, settings, pool.pool, boxes, spec, clock, snapshots=folder or Path())
            self._open.push_async_callback(episodes.shut_down)
            await episodes.start()
            return episodes, pool

        try:
            self._episodes, self._sandboxes = asyncio.run_coroutine_threadsafe(begin(), self.loop).result()
        except BaseException:
            asyncio.run_coroutine_threadsafe(self._open.aclose(), self.loop).result(_CLOSE_S)
            raise

    @property
    def trouble(self) -> str:
        """Why no sandbox can be started now, for a look at this worker; "": nothing is known to be wrong."""
        return self._sandboxes.pool.trouble

    def _run(self) -> None:
        """The loop that all rollouts are played on, until `close`: a task of an environment's that exits ends none but
        itself."""
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                traceback.print_exc()

    def submit(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of `Episodes`; its end is emitted."""
        work: Coroutine[Any, Any, Any] = getattr(self._episodes, method)(*arguments)
        asyncio.run_coroutine_threadsafe(self._answer(number, work, self._clock.now()), self.loop)

    def submit_sandboxes(self, number: int) -> None:
        """Ask for a look at the sandboxes, emitted likewise; empty where the environment uses none."""
        asyncio.run_coroutine_threadsafe(self._answer(number, self._look(), self._clock.now()), self.loop)

    async def _look(self) -> SandboxStatistics:
        return sandbox_statistics(self._sandboxes) if self._episodes.uses_sandbox else SandboxStatistics()

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any], arrived_s: float) -> None:
        try:
            well, answer = True, await work
        except Exception as error:  # a fault of ours: whoever asked is told
            well, answer = False, "".join(traceback.format_exception(error))[-_LONGEST_DETAIL:]
        answered: Answered = (number, well, answer, self._clock.now() - arrived_s)
        try:
            self._emit(answered)
        except Exception as error:  # it can't be sent: whoever waits for it is told so
            self._emit((number, False, "".join(traceback.format_exception(error))[-_LONGEST_DETAIL:], 0.0))

    def close(self) -> None:
        """End all rollouts and their sandboxes."""
        ending = asyncio.run_coroutine_threadsafe(self._open.aclose(), self.loop)
        try:
            ending.result(_CLOSE_S)
        finally:
            self._stopping = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_CLOSE_S)


class Episodes:
    """The rollouts of one worker, by name: *open* from `begin` (or `restore`) to `end`.

    What an environment raises comes back as a Failure, never as an exception.
    """

    def __init__(
        self,
        environment: Environment,
        settings: EnvironmentConfig,
        pool: SandboxPool,
        sandbox: SandboxConfig,
        spec: SandboxSpec,
        clock: Clock,
        *,
        snapshots: Path = Path(),
    ) -> None:
        """``spec``: what a sandbox is made of; ``snapshots``: the folder that the pool's backend writes them into."""
        self._environment = environment
        self._settings = settings
        self._pool = pool
        self._sandbox = sandbox
        self._spec = spec
        self._clock = clock
        self._snapshots = snapshots
        self._open: dict[str, Episode] = {}
        self._before_park: dict[str, Snapshot | None] = {}  # the snapshot that the last one took the place of, by name
        self._working: dict[str, set[asyncio.Task[Any]]] = {}  # on a rollout, by its name
        self._servers = ToolServers(settings.mcp, clock)
        self._models = FixedModels(settings.models)
        self._logged: set[tuple[type[BaseException], str]] = set()  # errors whose traceback is in the worker's log

    async def start(self) -> None:
        """Have the tools of ``environment.mcp`` offered. Raises ConfigurationError."""
        self._environment.offered = await self._servers.beside(list(self._environment.offered.values()))

    @property
    def uses_sandbox(self) -> bool:
        return self._environment.uses_sandbox

    async def begin(self, name: str, task: Task, seed: int) -> Reply:
        """Begin a new rollout."""
        episode = self._episode(name, task, seed, None)
        return await self._replied(episode, "begin", lambda: self._environment.begin(episode))

    async def restore(
        self,
        name: str,
        task: Task,
        saved: EnvironmentState,
        asked: NextTurn,
        messages: Mapping[str, Sequence[dict[str, Any]]],
    ) -> Failure | None:
        """Restore a rollout that a former process parked. ``asked``: the turn it was parked in."""
        if held := saved.state["held"]:
            cause = f"{held} is gone with the process that it was in"
            return Failure(boundary="environment", cause=cause, infrastructure=True)
        snapshot = saved.snapshot
        if snapshot is not None and not is_hosted(snapshot.path):
            path = str(self._snapshots / snapshot.path)
            saved = msgspec.structs.replace(saved, snapshot=msgspec.structs.replace(snapshot, path=path))
        episode = self._episode(name, task, 0, saved)
        episode.restore(saved.state, asked, messages)
        failure, _ = await self._guarded(lambda: self._environment.resume(episode), name)
        return failure

    async def reply(self, name: str, message: Mapping[str, Any], speaker: str, cut: bool) -> Reply:
        """The environment's reply to an answer of the policy."""
        episode = self._open[name]
        answer = Answer.of(message, speaker, cut)

        async def work() -> None:
            episode.hear(answer)
            await self._environment.reply(episode, answer)
            if episode.turns_left <= 0:
                episode.end("environment.max_turns")

        return await self._replied(episode, "reply", work)

    async def score(self, name: str) -> EpisodeScore:
        """The environment's verdict, if it gives one, and the last turn's reward."""
        episode = self._open[name]
        started = self._clock.now()
        failure, result = await self._judged(episode, lambda: self._environment.score(episode))
        if failure is not None:
            return EpisodeScore(verdict=Verdict(reward=0.0, solved=False, failure=failure))
        verdict = None
        if result is not None:
            judged = to_verdict(result, "the environment's score")
            verdict = msgspec.structs.replace(judged, verify_s=self._clock.now() - started)
        return EpisodeScore(verdict=verdict, reward=episode.take_reward())

    async def park(self, name: str) -> EnvironmentState | Failure:
        """Park a rollout: it resumes here with `unpark`, or in another process with `restore`."""
        episode = self._open[name]

        async def work() -> EnvironmentState:
            await self._environment.park(episode)
            parked = await episode.sandbox.park(f"{name}.{secrets.token_hex(4)}")
            snapshot = parked.snapshot  # a file by its name alone: the run's folder may be elsewhere by then
            if snapshot is not None and Path(snapshot.path).is_absolute():
                snapshot = msgspec.structs.replace(snapshot, path=Path(snapshot.path).name)
            return msgspec.structs.replace(parked, state=_plain(episode.kept()), snapshot=snapshot)

        before, state = episode.sandbox.snapshot, None
        self._before_park.pop(name, None)
        try:
            failure, state = await self._guarded(work, name)
        finally:
            if state is None:  # nobody will ever ask for it
                episode.sandbox.forget_snapshot(self._snapshots, before)
            else:
                self._before_park[name] = before
        return failure or cast("EnvironmentState", state)

    async def unpark(self, name: str) -> Failure | None:
        failure, _ = await self._guarded(self._open[name].sandbox.unpark, name)
        return failure

    async def end(self, name: str, unheard: bool = False) -> None:
        """End a finished or abandoned rollout; unknown: it has ended. ``unheard``: nobody got `park`'s last answer."""
        parked, before = name in self._before_park, self._before_park.pop(name, None)
        episode = self._open.pop(name, None)
        if episode is None:
            return
        try:
            await self._cancelled(name)
            await self._guarded(lambda: self._environment.close(episode))
            await self._servers.end(name)
        finally:
            await episode.sandbox.close()
            if unheard and parked:
                episode.sandbox.forget_snapshot(self._snapshots, before)

    async def _cancelled(self, name: str) -> None:
        """Cancel a rollout's tasks that nobody awaits any more: they would use what `close` has closed."""
        if working := self._working.get(name, set()) - {asyncio.current_task()}:
            for task in working:
                task.cancel()
            await asyncio.wait(working, timeout=_CANCEL_S)

    async def shut_down(self) -> None:
        """End all rollouts; those that take too long are abandoned: their sandboxes end after this anyway."""
        await _within(_CLOSE_S / 2, *(self.end(name) for name in list(self._open)))
        await _within(_CLOSE_S / 4, self._guarded(self._environment.stop), self._servers.stop())

    def _episode(self, name: str, task: Task, seed: int, restored: EnvironmentState | None) -> Episode:
        sandbox = EpisodeSandbox(
            self._pool,
            self._spec,
            labels={"rollout": name, "environment": self._settings.name},
            timeout_s=self._sandbox.exec_timeout_s,
            repeatable=self._environment.repeatable,
            restored=restored,
        )
        episode = self._open[name] = Episode(name, task, sandbox, seed, self._settings.max_turns, self._models)
        episode.turn_to(episode.speaker, tools=list(self._environment.offered.values()))
        return episode

    async def _replied(self, episode: Episode, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Reply:
        started_s = self._clock.now()
        failure, _ = await self._judged(episode, work)
        reward, times = episode.take_reward(), episode.take_tool_times()
        if not times:
            times = (ToolTimes(name=what, start_s=started_s, end_s=self._clock.now(), error=failure is not None),)
        if failure is not None:
            return Reply(failure=failure, reward=reward, tool_times=times)
        if episode.over:
            return Reply(over=storable(episode.over), reward=reward, tool_times=times)
        return Reply(asked=episode.take_next(), reward=reward, tool_times=times)

    async def _judged(
        self, episode: Episode, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> tuple[Failure | None, Any]:
        """`_guarded`; and whatever the environment made of it: a rollout whose sandbox has failed it is worth nothing,
        and one that has used its own sandbox up is over, and worth what it has come to."""
        failure, result = await self._guarded(work, episode.name)
        if episode.sandbox.failure is not None:
            return failure_of(SandboxError(episode.sandbox.failure)), None
        if failure is not None and failure.boundary == "model":
            episode.end(failure.cause)
            return None, Verdict(reward=0.0, solved=False, detail={"sandbox": failure.cause})
        return failure, result

    async def _guarded(
        self, work: Callable[[], Coroutine[Any, Any, Any]], name: str = ""
    ) -> tuple[Failure | None, Any]:
        """The environment's boundary: what it raises is a Failure. ``name``: of the rollout whose end cancels it."""
        task, episode = asyncio.current_task(), self._open.get(name)
        assert task is not None
        limit = asyncio.timeout(self._settings.timeout_s)
        limits = set[asyncio.Timeout]() if episode is None else episode.sandbox.limits
        working = self._working.setdefault(name, set())
        working.add(task)
        try:
            async with limit:
                limits.add(limit)
                return None, await work()
        except (asyncio.CancelledError, SystemExit) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # by `end`
            return self._failed(error), None  # of its own making: nobody else would be told
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                what = f"no answer within environment.timeout_s = {self._settings.timeout_s:g} s"
                return Failure(boundary="environment", cause=what, infrastructure=True), None
            return self._failed(error), None
        finally:
            limits.discard(limit)
            working.discard(task)
            if not working:
                del self._working[name]

    def _failed(self, error: BaseException) -> Failure:
        """The failure for ``error``, whose traceback goes to the worker's log once for each place that raises it."""
        failure = failure_of(error)
        if failure.boundary == "environment" and (raised := (type(error), failure.place)) not in self._logged:
            self._logged.add(raised)
            print(f"rollouts fail: {failure.cause}\n{failure.detail}", file=sys.stderr, flush=True)
        return failure


async def _within(seconds: float, *ends: Coroutine[Any, Any, Any]) -> None:
    ended = asyncio.gather(*ends, return_exceptions=True)
    ended.add_done_callback(lambda all_of_them: all_of_them.cancelled() or all_of_them.exception())
    await asyncio.wait({ended}, timeout=seconds)
    ended.cancel()


def sandbox_statistics(guarded: RunSandboxes) -> SandboxStatistics:
    """A pool and its guards as they are now."""
    return SandboxStatistics(pool=guarded.statistics(), reaper=guarded.reaped(), injected=guarded.injected())


def failure_of(error: BaseException) -> Failure:
    """The rollout's failure for an exception of its environment: boundary, cause, and whether infrastructure failed."""
    detail = storable("".join(traceback.format_exception(error)))[-_LONGEST_DETAIL:]
    boundary, cause, place = "environment", error_text(error), place_of(error)
    infrastructure = is_infrastructure(error)
    if isinstance(error, SandboxError):
        boundary, cause = "model", error.failure.what
        if error.failure.cause != "model_code":
            boundary, cause = "sandbox", f"{cause} ({error.failure.cause.replace('_', ' ')})"
    cause, place = storable(cause)[:300], storable(place) if boundary == "environment" else ""
    cause += f" ({place})" if place else ""
    return Failure(boundary=boundary, cause=cause, infrastructure=infrastructure, detail=detail, place=place)


def load_environment(settings: EnvironmentConfig) -> Environment:
    """The environment that ``settings`` name, with its tools described. Raises ConfigurationError."""
    kind = import_class(ENVIRONMENTS.get(settings.name, settings.name), KEY, Environment)
    try:
        inspect.signature(kind).bind(**settings.parameters)
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ConfigurationError(f"environment.parameters: {error}; {settings.name} takes: {takes}") from None
    for name in _AWAITED:
        method: Any = inspect.unwrap(getattr(kind, name))
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            raise ConfigurationError(f"{KEY} = {settings.name!r}: {settings.name}.{name} must be `async def`")
    try:
        environment = kind(**settings.parameters)
        environment.offered = tools_by_name(environment.tools())
        require_models(settings.models, environment.models, settings.timeout_s)
        _require_time(environment.longest_s, settings.timeout_s)
    except ConfigurationError:
        raise
    except Exception as error:  # the boundary to a user's class
        raise ConfigurationError(f"{KEY} = {settings.name!r}: {type(error).__name__}: {error}") from error
    environment.longest_result_characters = settings.tool_result_characters
    environment.reply_timeout_s = settings.timeout_s
    environment.tool_calls = ToolCalls(settings.timeout_s)
    return environment


def scores_itself(settings: EnvironmentConfig) -> bool:
    """Whether the environment that ``settings`` name has a `score` of its own. Raises ConfigurationError."""
    return settings.replies and type(load_environment(settings)).score is not Environment.score


def _require_time(longest_s: Mapping[str, float], timeout_s: float) -> None:
    """Raise ConfigurationError for a time limit above the worker's own, which would blame the machine for a timeout."""
    for name, seconds in longest_s.items():
        if not 0 < seconds < timeout_s:
            limit = f"environment.timeout_s = {timeout_s:g}"
            raise ConfigurationError(f"environment.parameters.{name} = {seconds:g}: valid: above 0, below {limit}")


def _plain(kept: dict[str, Any]) -> dict[str, Any]:
    """JSON types. Raises TypeError that names what another process wouldn't get back as it is."""
    try:
        _require_json(kept["own"])
        msgspec.msgpack.encode(kept)  # as it will be stored: no integers beyond 64 bits, no halves of surrogate pairs
        return msgspec.to_builtins(kept)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"episode.state must hold JSON types alone: {error}") from None


def _require_json(value: Any) -> None:
    if isinstance(value, dict):
        for key, entry in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
            _require_json(entry)
    elif isinstance(value, list | tuple):
        for entry in cast("Sequence[Any]", value):
            _require_json(entry)
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
