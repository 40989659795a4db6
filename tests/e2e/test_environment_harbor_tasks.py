"""Harbor's task folders: what is read of them, and rollouts in real sandboxes whose agents try to cheat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environment_player import Player, call, played, service

from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.environments.harbor_tasks import read_task, reward_of, tasks

pytestmark = pytest.mark.real

TEST = """\
if [ "$(cat answer.txt 2>/dev/null)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
DOCKERFILE = """\
# a base
FROM base:1
WORKDIR /work/app
ENV LEVEL=3 \\
  COLOUR=red
COPY data ./data
CMD bash
"""
CONFIG = """\
schema_version = "1.4"
[task]
name = "own/copy"
[verifier]
timeout_sec = 20.0
env = { WANTED = "42" }
[agent]
timeout_sec = 60.0
[environment]
cpus = 1
env = { MODE = "fast" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tasks" / "copy"
    for name, text in {
        "task.toml": CONFIG,
        "instruction.md": "Copy the number in data/number.txt to answer.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/number.txt": "42\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "cp data/number.txt answer.txt\n",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def harbor(**parameters: Any) -> Any:
    return service({"allow_unbounded": True}, name="harbor", parameters=parameters)


def run(folder: Path, *commands: str) -> tuple[Player, Any]:
    """What each command printed is in the player's messages; and the verdict."""
    [row] = tasks(str(folder))
    task = Task(task_id="t", prompt=row["prompt"], metadata={"harbor": row["harbor"]})

    async def main() -> tuple[Player, Any]:
        episodes = harbor()
        player = Player(episodes, task)
        await player.begin()
        try:
            for command in commands:
                await player.answer(call("bash", json.dumps({"command": command})))
            await player.answer("Done.")
            return player, (await episodes.score(player.name)).verdict
        finally:
            await episodes.end(player.name)
            await episodes.shut_down()
            await episodes._pool._backend.close()

    return played(main)


def test_what_is_read(folder: Path) -> None:
    task = read_task(folder)
    assert (task.name, task.image, task.workdir) == ("own/copy", "base:1", "/work/app")
    assert task.environment == {"LEVEL": "3", "COLOUR": "red", "MODE": "fast"}
    assert [there for _, there in task.files] == ["/work/app/data/number.txt"]
    assert [there for _, there in task.tests] == ["/tests/test.sh"]
    assert (task.verifier_s, task.test_environment) == (20.0, {"WANTED": "42"})
    [row] = tasks(str(folder.parent))
    assert row["prompt"].startswith("Copy the number")
    with pytest.raises(ConfigurationError, match=r"its image is 'base:1', and sandbox.image is: other"):
        list(tasks(str(folder), images=["other"]))


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        ("environment/Dockerfile", "FROM base\nRUN apt-get install -y git\n", "Dockerfile:2: RUN apt-get"),
        ("environment/Dockerfile", "FROM base AS one\n", "images aren't built here"),
        ("environment/Dockerfile", "FROM base\nCOPY ../secret /x\n", "images aren't built here"),
        ("environment/docker-compose.yaml", "services: {}\n", "docker-compose"),
        ("task.toml", "[[steps]]\nname = 'one'\n", "several steps"),
        ("task.toml", "[verifier]\nenv = { KEY = '${OPENAI_API_KEY}' }\n", "nothing of this machine's"),
        ("task.toml", "[environment]\nos = 'windows'\n", "other than Linux"),
        ("task.toml", "[", "TOMLDecodeError"),
    ],
)
def test_what_cannot_be_had_is_refused(file: str, text: str, what: str, folder: Path) -> None:
    (folder / file).write_text(text)
    with pytest.raises(ConfigurationError, match=what):
        list(tasks(str(folder)))


def test_a_task_is_solved(folder: Path) -> None:
    player, verdict = run(folder, "ls data; echo $LEVEL $MODE; pwd", "cp data/number.txt answer.txt")
    assert player.messages[""][3]["content"] == "number.txt\n3 fast\n/work/app"
    assert (verdict.reward, verdict.solved, verdict.failure) == (1.0, True, None)


def test_a_task_is_not_solved(folder: Path) -> None:
    _, verdict = run(folder, "echo 41 > answer.txt")
    assert (verdict.reward, verdict.solved, verdict.failure) == (0.0, False, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
        "(while true; do echo '{\"reward\": 1}' > /logs/verifier/reward.json; done) >/dev/null 2>&1 &",
        "setsid sh -c 'while true; do echo 1 > /logs/verifier/reward.json; done' >/dev/null 2>&1 &",
        "rm -rf /logs/verifier; mkdir -p /tmp/mine; echo 1 > /tmp/mine/reward.json; ln -s /tmp/mine /logs/verifier",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh",
        "mkdir -p /tests/test.sh",
        "mkdir -p /tests/x; touch /tests/x/y; chmod 000 /tests/x",
        "dd if=/dev/zero of=/work/full bs=1M 2>/dev/null; echo 1 > /logs/verifier/reward.txt",
    ],
)
def test_an_agent_cannot_write_its_own_reward(cheat: str, folder: Path) -> None:
    _, verdict = run(folder, cheat)
    assert verdict.failure is None
    assert (verdict.reward, verdict.solved) == (0.0, False)


def test_tests_that_may_take_too_long_are_known_at_once(folder: Path) -> None:
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 600.0\n")
    task = Task(task_id="t", prompt="", metadata={"harbor": {"folder": str(folder)}})
    reply = played(Player(harbor(), task).begin_reply)
    assert reply.failure is not None
    assert "environment.timeout_s = 300 s" in reply.failure.cause


def test_tests_that_write_nothing_fail_the_rollout(folder: Path) -> None:
    (folder / "tests" / "test.sh").write_text("exit 0\n")
    _, verdict = run(folder, "true")
    assert verdict.failure is not None
    assert "wrote neither" in verdict.failure.cause


@pytest.mark.parametrize(
    ("json_file", "text_file", "reward"),
    [
        (None, b" 0.5\n", 0.5),
        (b'{"reward": 0.25, "speed": 1}', b"1", 0.25),
        (b'{"a": 1, "b": 0}', None, 0.5),
        (b"2", None, 2),
    ],
)
def test_reward_files(json_file: Any, text_file: Any, reward: float) -> None:
    assert reward_of(json_file, text_file)["reward"] == reward


@pytest.mark.parametrize(
    "files", [(None, None), (b"{}", None), (b'{"reward": "1"}', None), (None, b"nan"), (b"1e999", None)]
)
def test_reward_files_that_are_none(files: Any) -> None:
    with pytest.raises(ValueError, match=r"reward|empty"):
        reward_of(*files)
