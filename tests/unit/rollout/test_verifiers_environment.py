"""Episodes of the package verifiers as rewards, failures and their causes; nothing of the package is needed here."""

from __future__ import annotations

import errno
import sys
import traceback
import urllib.error
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from headway.config.endpoint import EnvironmentConfig
from headway.records.errors import ConfigurationError, InfrastructureError
from headway.rollout.verifiers_environment import LoadedEnvironment, load, outcome, package_task, tasks

LOADED = LoadedEnvironment(package=None, environment=None, taskset="sums", trained="solver")


def error(kind: str, message: str = "", status_code: int | None = None) -> Any:
    return SimpleNamespace(type=kind, message=message, status_code=status_code, traceback="Traceback of it")


def trace(reward: float = 0.0, *errors: Any, name: str = "solver") -> Any:
    return SimpleNamespace(reward=reward, errors=list(errors), agent=SimpleNamespace(name=name))


def episode(*traces: Any, ok: bool = True, errors: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(ok=ok, traces=list(traces), errors=list(errors))


def test_rewards_of_the_role_that_is_trained() -> None:
    assert outcome(LOADED, episode(trace(1.5))) == {"reward": 1.5}
    assert outcome(LOADED, episode(trace(3, name="judge"), trace(0.25))) == {"reward": 0.25}
    # an earlier attempt's error that was got over is no failure
    assert outcome(LOADED, episode(trace(1, error("TaskError")))) == {"reward": 1.0}


@pytest.mark.parametrize("traces", [(), (trace(1, name="judge"),), (trace(1), trace(0))])
def test_episodes_with_no_or_several_rewards(traces: tuple[Any, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        outcome(LOADED, episode(*traces))
    assert ended.value.code == 1
    assert "the role 'solver' was played" in capsys.readouterr().err


def test_running_out_of_context_is_no_failure() -> None:
    refused = error("ProviderError", 'upstream 400: {"error": {"code": "context_length_exceeded"}}', 400)
    assert outcome(LOADED, episode(trace(0.0, refused), ok=False)) == {"reward": 0.0}


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (error("TaskError", "boom"), 1),
        (error("HarnessError", "exited 1"), 1),
        (error("EnvError"), 1),
        (error("SandboxError"), 75),
        (error("InterceptionError"), 75),
        (error("ProviderError", "upstream 500", 500), 75),
        (error("ProviderError", "upstream 429", 429), 75),
        (error("ProviderError", "upstream 400: response_format", 400), 1),  # it would be refused again
        (error("ProviderError", "upstream 403", 403), 1),
    ],
)
@pytest.mark.parametrize("of_episode", [False, True])
def test_whose_fault_it_is(found: Any, code: int, of_episode: bool, capsys: pytest.CaptureFixture[str]) -> None:
    failed = episode(ok=False, errors=(found,)) if of_episode else episode(trace(0.0, found), ok=False)
    with pytest.raises(SystemExit) as ended:
        outcome(LOADED, failed)
    assert ended.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Traceback of it", f"{found.type}: {found.message}"]  # the last one is the failure's cause


def _traced(error: Exception, kind: type[Exception] = RuntimeError) -> str:
    try:
        try:
            try:
                raise KeyError("x")
            except KeyError:
                raise error  # noqa: B904  its context isn't its cause
        except Exception as cause:
            raise kind("reward right: it failed") from cause
    except Exception as raised:
        return "".join(traceback.format_exception(raised))


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConnectionRefusedError(111, "Connection refused"), 75),
        (TimeoutError(), 75),
        (OSError(errno.ENOSPC, "No space left on device"), 75),
        (InfrastructureError("no search"), 75),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), 75),
        (FileNotFoundError(2, "No such file or directory", "answer.txt"), 1),
        (ValueError("many\nlines: of\ntext"), 1),
        (ZeroDivisionError(), 1),
    ],
)
@pytest.mark.parametrize("kind", ["TaskError", "EnvError", "HarnessError"])
def test_what_a_users_code_raised_goes_by_the_rule(raised: Exception, code: int, kind: str) -> None:
    found = SimpleNamespace(type=kind, message="reward right", status_code=None, traceback=_traced(raised))
    with pytest.raises(SystemExit) as ended:
        outcome(LOADED, episode(trace(0.0, found), ok=False))
    assert ended.value.code == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("read 'answer.txt': [Errno 2] No such file or directory: '/x/answer.txt'", 1),
        ("read '/app': head: error reading '/app': Is a directory", 1),
        ("read 'answer.txt': over the 100 byte limit", 1),
        ("read 'answer.txt': the container is gone", 75),
        ("docker run failed: No such file or directory", 75),
    ],
)
def test_a_file_that_the_policy_did_not_write_is_its_own_doing(message: str, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        outcome(LOADED, episode(trace(0.0, error("SandboxError", message)), ok=False))
    assert ended.value.code == code


def test_an_episode_that_says_nothing() -> None:
    with pytest.raises(SystemExit) as ended:
        outcome(LOADED, episode(trace(), ok=False))
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("metadata", "whose"), [({}, "of no taskset"), ({"verifiers": {"taskset": "others", "data": {}}}, "of 'others'")]
)
def test_tasks_of_something_else(metadata: dict[str, Any], whose: str) -> None:
    with pytest.raises(ValueError, match=f"task t is {whose}, and environment.parameters.taskset.id = 'sums'"):
        package_task(LOADED, {"task_id": "t", "metadata": metadata})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    how = r"needs the package verifiers \(.*\): pip install 'headway\[verifiers\]'"
    with pytest.raises(ConfigurationError, match="environment.name = 'verifiers' " + how):
        load({"taskset": {"id": "sums"}})
    with pytest.raises(ConfigurationError, match="the taskset 'sums' " + how):
        next(tasks("sums"))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"name": "verifiers"}, "needs parameters = "),
        ({"name": "verifiers", "parameters": {"taskset": "sums"}}, "needs parameters = "),
        ({"name": "verifiers", "parameters": {"taskset": {"id": "sums"}}, "agent": "a:b"}, "agent has no effect"),
        ({"name": "agent", "agent": "a:b", "parameters": {"x": 1}}, "parameters have no effect with name = 'agent'"),
        ({"agent": "a:b"}, "valid: name = 'agent'"),
        ({"name": "agent"}, "needs agent = "),
        ({"name": "agent", "agent": []}, "needs agent = "),
    ],
)
def test_settings_that_contradict_each_other(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        EnvironmentConfig(**keys)
    assert EnvironmentConfig(name="verifiers", parameters={"taskset": {"id": "sums"}}).calls
