"""The worker that runs environments: many concurrent rollouts on one event loop, their sandboxes in one pool."""

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
from headway.rollout.external_models import ExternalModels, require_models
from headway.rollout.hosting.mcp.servers import ToolServers
from headway.rollout.tools import ToolCalls, tools_by_name
from headway.rollout.verification.verdicts import to_verdict
from headway.runtime.clock import Clock, RealClock
from headway.runtime.hooks import error_text, is_infrastructure, source_location, storable
from headway.runtime.imports import import_class, import_function
from headway.sandbox.backends import spec_of
from headway.sandbox.guards import RunSandboxes
from headway.sandbox.pool import SandboxPool
from headway.sandbox.snapshot_store import is_hosted

KEY = "environment.name"
_LONGEST_DETAIL = 4000  # characters of a traceback that are kept
_AWAITED = ("begin", "reply", "score", "park", "resume", "close", "stop")  # async methods of an environment
_CLOSE_S = 20.0  # time for all to end: a half for episodes, a quarter for shared resources, the rest for sandboxes
_CANCEL_S = 10.0  # time for a finished rollout's cancelled tasks to end

# Number of a request, whether it succeeded, its result or its error, seconds from its arrival to its answer.
Answered = tuple[int, bool, Any, float]


class EnvironmentService:
    """The worker class that runs environments; ``submit`` returns at once, and the result is emitted later."""

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
        makes a pool of sandboxes with its guards, as `orchestrator/actors/sandboxes.py` does; ``run``: the run that
        owns them; ``snapshots``: the folder of parked ones. Raises ConfigurationError for an environment that can't be
        imported or refuses a parameter, and for sandboxes or tool servers that aren't available."""
        self._emit: Callable[[Answered], None] = context.emit
        settings = EnvironmentConfig.model_validate(environment)
        loaded = load_environment(settings)
        self.loop = asyncio.new_event_loop()  # inspections of this worker report its tasks
        self._clock = RealClock()
        self._open = AsyncExitStack()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()
        folder = Path(snapshots).resolve() if snapshots else None
        clock, config = self._clock, SandboxConfig.model_validate(sandbox)

        async def begin() -> tuple[Episodes, RunSandboxes]:
            guarded = import_function(sandboxes, "sandboxes", ())(config, clock, run=run, snapshots=folder, seed=seed)
            run_sandboxes: RunSandboxes = await self._open.enter_async_context(guarded)
            spec = await spec_of(config) if loaded.uses_sandbox else config.spec
            loaded.tool_calls.report = lambda *event: self._emit((WORKER_EVENT, True, event, 0.0))
            episodes = Episodes(loaded, settings, run_sandboxes.pool, config, spec, clock, snapshots=folder or Path())
            self._open.push_async_callback(episodes.shut_down)
            await episodes.start()
            return episodes, run_sandboxes

        try:
            self._episodes, self._sandboxes = asyncio.run_coroutine_threadsafe(begin(), self.loop).result()
        except BaseException:
            asyncio.run_coroutine_threadsafe(self._open.aclose(), self.loop).result(_CLOSE_S)
            raise

    @property
    def trouble(self) -> str:
        """The reason why no sandbox can be started now, for inspections of this worker; "": none is known."""
        return self._sandboxes.pool.trouble

    def _run(self) -> None:
        """Run the event loop of all rollouts until `close`; an exit in an environment's task ends that task alone."""
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                traceback.print_exc()

    def submit(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of `Episodes`; its result is emitted."""
        work: Coroutine[Any, Any, Any] = getattr(self._episodes, method)(*arguments)
        asyncio.run_coroutine_threadsafe(self._answer(number, work, self._clock.now()), self.loop)

    def submit_sandboxes(self, number: int) -> None:
        """Request the sandbox statistics, which are emitted; they are empty where the environment uses no sandboxes."""
        asyncio.run_coroutine_threadsafe(self._answer(number, self._sandbox_statistics(), self._clock.now()), self.loop)

    async def _sandbox_statistics(self) -> SandboxStatistics:
        return sandbox_statistics(self._sandboxes) if self._episodes.uses_sandbox else SandboxStatistics()

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any], arrived_s: float) -> None:
        try:
            succeeded, payload = True, await work
        except Exception as error:  # a bug of ours, which the caller gets as an error
            succeeded, payload = False, "".join(traceback.format_exception(error))[-_LONGEST_DETAIL:]
        answered: Answered = (number, succeeded, payload, self._clock.now() - arrived_s)
        try:
            self._emit(answered)
        except Exception as error:  # the answer can't be sent, and the caller gets that as an error
            self._emit((number, False, "".join(traceback.format_exception(error))[-_LONGEST_DETAIL:], 0.0))

    def close(self) -> None:
        """End all rollouts and their sandboxes."""
        close_future = asyncio.run_coroutine_threadsafe(self._open.aclose(), self.loop)
        try:
            close_future.result(_CLOSE_S)
        finally:
            self._stopping = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_CLOSE_S)


class Episodes:
    """The rollouts of one worker, by name: *open* from `begin` (or `restore`) to `end`.

    An environment's exception is returned as a Failure, never raised.
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
        """``spec``: of the sandboxes; ``snapshots``: the folder into which the pool's backend writes snapshots."""
        self._environment = environment
        self._settings = settings
        self._pool = pool
        self._sandbox = sandbox
        self._spec = spec
        self._clock = clock
        self._snapshots = snapshots
        self._open: dict[str, Episode] = {}
        self._replaced_snapshots: dict[str, Snapshot | None] = {}  # the snapshot before the last park, by rollout
        self._working: dict[str, set[asyncio.Task[Any]]] = {}  # tasks that work on a rollout, by its name
        self._servers = ToolServers(settings.mcp, clock)
        self._models = ExternalModels(settings.models)
        self._logged: set[tuple[type[BaseException], str]] = set()  # errors whose traceback is in the worker's log

    async def start(self) -> None:
        """Add the tools of ``environment.mcp`` to those offered. Raises ConfigurationError."""
        self._environment.offered = await self._servers.merge_tools(list(self._environment.offered.values()))

    @property
    def uses_sandbox(self) -> bool:
        return self._environment.uses_sandbox

    async def begin(self, name: str, task: Task, seed: int) -> Reply:
        """Begin a new rollout."""
        episode = self._episode(name, task, seed, None)
        return await self._make_reply(episode, "begin", lambda: self._environment.begin(episode))

    async def restore(
        self,
        name: str,
        task: Task,
        saved: EnvironmentState,
        asked: NextTurn,
        messages: Mapping[str, Sequence[dict[str, Any]]],
    ) -> Failure | None:
        """Restore a rollout that a former process parked. ``asked``: the turn it was parked in."""
        if held_resource := saved.state["held"]:
            cause = f"{held_resource} was lost with its process"
            return Failure(boundary="environment", cause=cause, infrastructure=True)
        snapshot = saved.snapshot
        if snapshot is not None and not is_hosted(snapshot.path):
            snapshot_path = str(self._snapshots / snapshot.path)
            saved = msgspec.structs.replace(saved, snapshot=msgspec.structs.replace(snapshot, path=snapshot_path))
        episode = self._episode(name, task, 0, saved)
        episode.restore(saved.state, asked, messages)
        failure, _ = await self._guarded(lambda: self._environment.resume(episode), name)
        return failure

    async def reply(self, name: str, message: Mapping[str, Any], speaker: str, cut: bool) -> Reply:
        """Return the environment's reply to an answer of the policy."""
        episode = self._open[name]
        answer = Answer.of(message, speaker, cut)

        async def work() -> None:
            episode.receive(answer)
            await self._environment.reply(episode, answer)
            if episode.turns_left <= 0:
                episode.end("environment.max_turns")

        return await self._make_reply(episode, "reply", work)

    async def score(self, name: str) -> EpisodeScore:
        """Return the environment's verdict, if it gives one, and the last turn's reward."""
        episode = self._open[name]
        started_s = self._clock.now()
        failure, returned = await self._run_step(episode, lambda: self._environment.score(episode))
        if failure is not None:
            return EpisodeScore(verdict=Verdict(reward=0.0, solved=False, failure=failure))
        verdict = None
        if returned is not None:
            parsed_verdict = to_verdict(returned, "the environment's score")
            verdict = msgspec.structs.replace(parsed_verdict, verify_s=self._clock.now() - started_s)
        return EpisodeScore(verdict=verdict, reward=episode.take_reward())

    async def park(self, name: str) -> EnvironmentState | Failure:
        """Park a rollout: it resumes here with `unpark`, or in another process with `restore`."""
        episode = self._open[name]

        async def work() -> EnvironmentState:
            await self._environment.park(episode)
            parked_state = await episode.sandbox.park(f"{name}.{secrets.token_hex(4)}")
            snapshot = parked_state.snapshot  # a file by its name alone: the run's folder may be elsewhere by then
            if snapshot is not None and Path(snapshot.path).is_absolute():
                snapshot = msgspec.structs.replace(snapshot, path=Path(snapshot.path).name)
            return msgspec.structs.replace(parked_state, state=_plain(episode.saved_state()), snapshot=snapshot)

        previous_snapshot, state = episode.sandbox.snapshot, None
        self._replaced_snapshots.pop(name, None)
        try:
            failure, state = await self._guarded(work, name)
        finally:
            if state is None:  # no saved state refers to the new snapshot
                episode.sandbox.forget_snapshot(self._snapshots, previous_snapshot)
            else:
                self._replaced_snapshots[name] = previous_snapshot
        return failure or cast("EnvironmentState", state)

    async def unpark(self, name: str) -> Failure | None:
        failure, _ = await self._guarded(self._open[name].sandbox.unpark, name)
        return failure

    async def end(self, name: str, park_undelivered: bool = False) -> None:
        """End a finished or abandoned rollout; a no-op for an unknown name. ``park_undelivered``: the caller didn't
        receive the last `park`'s answer."""
        was_parked, previous_snapshot = name in self._replaced_snapshots, self._replaced_snapshots.pop(name, None)
        episode = self._open.pop(name, None)
        if episode is None:
            return
        try:
            await self._cancel_work(name)
            await self._guarded(lambda: self._environment.close(episode))
            await self._servers.end(name)
        finally:
            await episode.sandbox.close()
            if park_undelivered and was_parked:
                episode.sandbox.forget_snapshot(self._snapshots, previous_snapshot)

    async def _cancel_work(self, name: str) -> None:
        """Cancel a rollout's remaining tasks, which would use resources that `close` has released."""
        if working_tasks := self._working.get(name, set()) - {asyncio.current_task()}:
            for task in working_tasks:
                task.cancel()
            await asyncio.wait(working_tasks, timeout=_CANCEL_S)

    async def shut_down(self) -> None:
        """End all rollouts; slow ones are abandoned, for their sandboxes end after this anyway."""
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
        episode.set_active_agent(episode.speaker, tools=list(self._environment.offered.values()))
        return episode

    async def _make_reply(self, episode: Episode, method: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Reply:
        started_s = self._clock.now()
        failure, _ = await self._run_step(episode, work)
        reward, times = episode.take_reward(), episode.take_tool_times()
        if not times:
            times = (ToolTimes(name=method, start_s=started_s, end_s=self._clock.now(), error=failure is not None),)
        if failure is not None:
            return Reply(failure=failure, reward=reward, tool_times=times)
        if episode.over:
            return Reply(over=storable(episode.over), reward=reward, tool_times=times)
        return Reply(asked=episode.take_next(), reward=reward, tool_times=times)

    async def _run_step(
        self, episode: Episode, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> tuple[Failure | None, Any]:
        """Run a step as `_guarded`, and apply its sandbox's failures: an infrastructure failure fails the rollout, even
        if the environment caught it, and the policy's own failure ends it with reward 0."""
        failure, returned = await self._guarded(work, episode.name)
        if episode.sandbox.failure is not None:
            return failure_of(SandboxError(episode.sandbox.failure)), None
        if failure is not None and failure.boundary == "model":
            episode.end(failure.cause)
            return None, Verdict(reward=0.0, solved=False, detail={"sandbox": failure.cause})
        return failure, returned

    async def _guarded(
        self, work: Callable[[], Coroutine[Any, Any, Any]], name: str = ""
    ) -> tuple[Failure | None, Any]:
        """Run ``work`` at the environment's boundary: exceptions become Failures. ``name``: the rollout whose end
        cancels it."""
        task, episode = asyncio.current_task(), self._open.get(name)
        assert task is not None
        limit = asyncio.timeout(self._settings.timeout_s)
        limits = set[asyncio.Timeout]() if episode is None else episode.sandbox.limits
        working_tasks = self._working.setdefault(name, set())
        working_tasks.add(task)
        try:
            async with limit:
                limits.add(limit)
                return None, await work()
        except (asyncio.CancelledError, SystemExit) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # by `end`
            return self._log_failure(error), None  # the environment cancelled itself or exited
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                cause = f"no answer within environment.timeout_s = {self._settings.timeout_s:g} s"
                return Failure(boundary="environment", cause=cause, infrastructure=True), None
            return self._log_failure(error), None
        finally:
            limits.discard(limit)
            working_tasks.discard(task)
            if not working_tasks:
                del self._working[name]

    def _log_failure(self, error: BaseException) -> Failure:
        """Return the failure for ``error``; its traceback goes to the worker's log once for each raising line."""
        failure = failure_of(error)
        if failure.boundary == "environment" and (error_key := (type(error), failure.raised_at)) not in self._logged:
            self._logged.add(error_key)
            print(f"rollouts fail: {failure.cause}\n{failure.detail}", file=sys.stderr, flush=True)
        return failure


async def _within(seconds: float, *ends: Coroutine[Any, Any, Any]) -> None:
    ends_future = asyncio.gather(*ends, return_exceptions=True)
    ends_future.add_done_callback(lambda all_of_them: all_of_them.cancelled() or all_of_them.exception())
    await asyncio.wait({ends_future}, timeout=seconds)
    ends_future.cancel()


def sandbox_statistics(guarded: RunSandboxes) -> SandboxStatistics:
    """Return the current statistics of a pool and its guards."""
    return SandboxStatistics(pool=guarded.statistics(), reaper=guarded.reaped(), injected=guarded.injected())


def failure_of(error: BaseException) -> Failure:
    """Return the rollout's failure for an exception of its environment: boundary, cause, and whether infrastructure
    failed."""
    detail = storable("".join(traceback.format_exception(error)))[-_LONGEST_DETAIL:]
    boundary, cause, location = "environment", error_text(error), source_location(error)
    infrastructure = is_infrastructure(error)
    if isinstance(error, SandboxError):
        boundary, cause = "model", error.failure.message
        if error.failure.cause != "model_code":
            boundary, cause = "sandbox", f"{cause} ({error.failure.cause.replace('_', ' ')})"
    cause, location = storable(cause)[:300], storable(location) if boundary == "environment" else ""
    cause += f" ({location})" if location else ""
    return Failure(boundary=boundary, cause=cause, infrastructure=infrastructure, detail=detail, raised_at=location)


def load_environment(settings: EnvironmentConfig) -> Environment:
    """Load the environment that ``settings`` name, with its tools described. Raises ConfigurationError."""
    environment_class = import_class(ENVIRONMENTS.get(settings.name, settings.name), KEY, Environment)
    try:
        inspect.signature(environment_class).bind(**settings.parameters)
    except TypeError as error:
        valid_text = ", ".join(inspect.signature(environment_class).parameters) or "none"
        raise ConfigurationError(f"environment.parameters: {error}; {settings.name} takes: {valid_text}") from None
    for method_name in _AWAITED:
        method: Any = inspect.unwrap(getattr(environment_class, method_name))
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            raise ConfigurationError(f"{KEY} = {settings.name!r}: {settings.name}.{method_name} must be `async def`")
    try:
        environment = environment_class(**settings.parameters)
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
    """Return whether the environment that ``settings`` name overrides `score`. Raises ConfigurationError."""
    return settings.is_class and type(load_environment(settings)).score is not Environment.score


def _require_time(longest_s: Mapping[str, float], timeout_s: float) -> None:
    """Raise ConfigurationError for a time limit above the worker's own, which would blame the machine for a timeout."""
    for name, seconds in longest_s.items():
        if not 0 < seconds < timeout_s:
            limit_text = f"environment.timeout_s = {timeout_s:g}"
            raise ConfigurationError(f"environment.parameters.{name} = {seconds:g}: valid: above 0, below {limit_text}")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a saved state to JSON types. Raises TypeError for a value that another process wouldn't restore equal."""
    try:
        _require_json(state["own"])
        msgspec.msgpack.encode(state)  # as it will be stored: no integers beyond 64 bits, no halves of surrogate pairs
        return msgspec.to_builtins(state)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"episode.state must hold JSON types alone: {error}") from None


def _require_json(value: Any) -> None:
    if isinstance(value, dict):
        for key, nested in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
            _require_json(nested)
    elif isinstance(value, list | tuple):
        for nested in cast("Sequence[Any]", value):
            _require_json(nested)
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
