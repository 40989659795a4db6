"""Adapter for environments of the package verifiers (0.4), whose episodes become rollouts: docs/agents.md.

Each episode runs in a process of its own, forked from one that has the environment loaded
(rollout/hosting/agents/host.py). There the environment's harness calls the run's endpoint, as any agent does, so the
recorder has its tokens; the package's score is the rollout's reward. The package is imported only where it is needed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import EACCES, EISDIR, ENOENT, ENOTDIR
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError
from headway.rollout.hosting.agents.host import EX_TEMPFAIL
from headway.runtime.hooks import is_infrastructure
from headway.runtime.imports import import_extra

KEY = "environment.parameters"
PLAYER = "headway.rollout.verifiers_environment:player"
COLUMN = "verifiers"  # of a row, and so in a task's metadata: {"taskset": its id, "data": fields that aren't defaults}
_OUTSIDE = ("ProviderError", "InterceptionError", "TunnelError", "SandboxError")  # not caused by the episode
_TRY_AGAIN = (408, 409, 429)  # HTTP codes below 500 that are worth a retry
_NO_FILE = "|".join(os.strerror(code) for code in (ENOENT, EISDIR, ENOTDIR, EACCES))
_UNREADABLE = re.compile(rf"^read .*({_NO_FILE}|over the \d+ byte limit)", re.DOTALL)  # as the policy left it
_CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?P<text>:.*)?$", re.MULTILINE)
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_NO_CONTEXT = "context_length_exceeded"  # the endpoint's error code for a request that doesn't fit


@dataclass(frozen=True, kw_only=True)
class LoadedEnvironment:
    """A loaded environment of the package, ready to run episodes."""

    package: Any  # verifiers.v1
    environment: Any  # verifiers.v1.Env
    taskset: str  # its id
    trained: str  # the role that the run's model plays


def tasks(id: str, select: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield rows for a task source (``source = "function"``): the tasks of the taskset ``id``, in its order, with all
    that their episodes need. ``settings``: the taskset's further settings; ``select``: the package's SelectConfig
    (include, exclude, shuffle, seed, skip, limit). Raises ConfigurationError for a missing package or taskset, unknown
    settings, a taskset without an end, and tasks that can't be serialised."""
    package = _package(f"the taskset {id!r}")
    try:
        config = package.taskset_config_type(id).model_validate({"id": id, **settings})
        taskset = package.load_taskset(config).select(package.SelectConfig.model_validate(select or {}))
    except (Exception, SystemExit) as error:  # the boundary to third-party code
        raise _refused(f"the taskset {id!r}", error) from error
    if not taskset.bounded:
        raise ConfigurationError(f"the taskset {id!r} is infinite: limit it with select = {{ limit = N }}")
    excluded = [name for name, field in type(taskset).task_type().data_type().model_fields.items() if field.exclude]
    if excluded:
        raise ConfigurationError(f"the taskset {id!r} keeps {', '.join(excluded)} out of a task's record")
    for task in taskset:
        task_fields = task.data.model_dump(mode="json", exclude_defaults=True)
        prompt = task.data.prompt_text or f"{id} {task.key}"  # a user of the environment's may open the conversation
        yield {"prompt": prompt, COLUMN: {"taskset": id, "data": task_fields}}


def load(settings: Mapping[str, Any]) -> LoadedEnvironment:
    """Load the environment that ``settings`` describes (the package's EnvConfig, as a table). Its harnesses run on this
    machine unless they are configured otherwise. Raises ConfigurationError for a missing package, taskset or
    environment, unknown settings, several roles or none for the run's model, and retries of whole episodes."""
    package = _package("environment.name = 'verifiers'")
    try:
        config = package.resolve_env_config(settings)
        configs = {name: value for name, value in config if isinstance(value, package.AgentConfig)}
        local_configs = {
            name: spec.model_copy(update={"runtime": package.SubprocessConfig()})
            for name, spec in configs.items()
            if isinstance(spec.runtime, package.PrimeConfig) and "runtime" not in (settings.get(name) or {})
        }
        environment = package.load_environment(config.model_copy(update=local_configs))
    except (Exception, SystemExit) as error:  # the boundary to third-party code
        raise _refused(KEY, error) from error
    trained = [name for name, spec in configs.items() if spec.client is None]
    if len(trained) != 1:
        raise ConfigurationError(
            f"{KEY}: the model in training plays the role that has no client of its own: of {', '.join(configs)} these "
            f"have none: {', '.join(trained) or 'no role'}; exactly one is needed"
        )
    retry_settings = {"retries": config.retries, f"{trained[0]}.retries": configs[trained[0]].retries}
    for name, value in retry_settings.items():
        if value != package.RetryConfig():
            raise ConfigurationError(
                f"{KEY}.{name}: an attempt that is repeated would be trained with the other's reward; leave it out, "
                "rollout.retries is for what failed from outside"
            )
    return LoadedEnvironment(package=package, environment=environment, taskset=config.taskset.id, trained=trained[0])


def player(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]:
    """Return the agent function that runs an episode of the environment in ``settings``. Called with a task, in the
    rollout's process, it returns the reward or ends the process. Raises ConfigurationError as `load`."""
    loaded = load(settings)

    async def play(task: Mapping[str, Any]) -> dict[str, Any]:
        _forget_task()
        _cancelled_by_sigterm()
        environment = loaded.environment
        episode_task = package_task(loaded, task)
        async with environment.serving():
            episode = await environment.run_episode(episode_task, _context(loaded.package))
        return outcome(loaded, episode)

    return play


def package_task(loaded: LoadedEnvironment, task: Mapping[str, Any]) -> Any:
    """Convert one of our tasks, made from a row of `tasks`, to the package's. Raises ValueError for any other task."""
    row = task["metadata"].get(COLUMN)
    if not isinstance(row, Mapping) or row.get("taskset") != loaded.taskset:
        taskset_text = f"of {row['taskset']!r}" if isinstance(row, Mapping) and "taskset" in row else "of no taskset"
        raise ValueError(f"task {task['task_id']} is {taskset_text}, and {KEY}.taskset.id = {loaded.taskset!r}")
    taskset = loaded.environment.taskset
    task_class = type(taskset).task_type()
    return task_class(task_class.data_type().model_validate(row["data"]), taskset.config.task)


def outcome(loaded: LoadedEnvironment, episode: Any) -> dict[str, Any]:
    """Return an episode's reward. A failed episode ends the process instead, with an exit code that tells whether
    infrastructure failed; an episode that ran out of context has the reward it got, most often 0."""
    errors: list[Any] = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    out_of_context = bool(errors) and _NO_CONTEXT in errors[-1].message
    if not episode.ok and not out_of_context:
        _end(errors)
    traces: Sequence[Any] = [trace for trace in episode.traces if trace.agent.name == loaded.trained]
    if len(traces) != 1:
        print(f"the role {loaded.trained!r} was played {len(traces)} times: a rollout has one reward", file=sys.stderr)
        sys.exit(1)
    return {"reward": float(traces[0].reward)}


def _end(errors: Iterable[Any]) -> None:
    """Exit with a code that tells whether infrastructure failed."""
    last_error = None
    for last_error in errors:
        print(last_error.traceback or "", file=sys.stderr)
    if last_error is None:
        print("the episode failed and doesn't say why", file=sys.stderr)
        sys.exit(1)
    print(f"{last_error.type}: {' '.join(last_error.message.split())}", file=sys.stderr)
    status = last_error.status_code
    denied = status is not None and 400 <= status < 500 and status not in _TRY_AGAIN  # what it asked for isn't possible
    is_outside = last_error.type in _OUTSIDE and not _UNREADABLE.search(last_error.message)
    raised_error = raised_in(last_error.traceback or "")
    is_retryable = not denied and (is_outside or (raised_error is not None and is_infrastructure(raised_error)))
    sys.exit(EX_TEMPFAIL if is_retryable else 1)


def raised_in(traced: str) -> BaseException | None:
    """Return the exception of the user's code that an error of the package was raised from, or else that error itself:
    with its class and errno only, for there is just the traceback's text. None: the text names no known class."""
    raised = None
    for match in _RAISED.finditer(traced.split(_CAUSED)[-2:][0]):
        module, _, name = match["kind"].rpartition(".")
        kind = getattr(sys.modules.get(module or "builtins"), name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):  # the last counts, earlier ones are contexts
            errno_match = issubclass(kind, OSError) and _ERRNO.search(match["text"] or "")
            raised = OSError(int(errno_match[1]), "") if errno_match else kind.__new__(kind)
    return raised


def _context(package: Any) -> Any:
    """Return the package's context for this rollout's model and address. The package reads the key from the process
    environment."""
    client = package.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    return package.ModelContext(model=os.environ["HEADWAY_MODEL"], client=client)


def _forget_task() -> None:
    """Remove the task's file, which has the answer: tools that the model calls may see this process's files."""
    Path(os.environ.pop("HEADWAY_TASK")).unlink()


def _cancelled_by_sigterm() -> None:
    """Cancel the running task on SIGTERM, so that its runtime (a container, say) ends too."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _package(needed_by: str) -> Any:
    import_extra("verifiers", "verifiers", needed_by)
    return import_extra("verifiers.v1", "verifiers", needed_by)  # not in versions before


def _refused(subject: str, error: BaseException) -> ConfigurationError:
    lines = [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines()]
    return ConfigurationError(f"{subject}: {type(error).__name__}: {'; '.join(filter(None, lines))}")
