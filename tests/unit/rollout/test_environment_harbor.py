"""Harbor's tests run what the agent wrote: what may be believed of the rewards that are there then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from boxed import Box, Boxed

from headway.records.errors import ConfigurationError
from headway.records.sandbox import ExecResult, SandboxError
from headway.rollout.environments.harbor_tasks import read_task

CONFIG = "[verifier]\ntimeout_sec = 20.0\n"
KILLED = ExecResult(exit_code=None, signal=9)
FAILED = ExecResult(exit_code=1)
FINE = ExecResult(exit_code=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "task.toml": CONFIG,
        "instruction.md": "Write add.py.\n",
        "environment/Dockerfile": "FROM base\nWORKDIR /work/app\nCOPY data ./data\n",
        "environment/data/numbers.txt": "1 2 3\n" * 100,
        "tests/test.sh": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def scored(folder: Path, wrote: Mapping[str, str], ended: ExecResult = FINE, *, before: bool = False) -> Any:
    """What a rollout is worth whose tests left ``wrote``; ``before``: after another, of which they said something."""
    rollouts = 0

    def does(box: Box, argv: Any, options: Any) -> ExecResult | None:
        nonlocal rollouts
        if argv[-1] == "/tests/test.sh":
            rollouts += 1
            if before and rollouts == 1:
                box.files["/logs/verifier/reward.txt"] = b"1", 0o644
                return FINE
            box.files |= {f"/logs/verifier/reward.{kind}": (text.encode(), 0o644) for kind, text in wrote.items()}
            return ended
        return None

    boxed = Boxed("harbor", {"harbor": {"folder": str(folder)}}, Box(does))
    boxed.begin()
    if before:
        assert boxed.score()["reward"] == 1.0
        boxed.box.files.pop("/logs/verifier/reward.txt")
    found = boxed.score()
    if ended.exit_code is not None:
        *_, (last, options) = boxed.box.commands
        assert (last, options["alone"]) == (["true"], True), "what they left running is ended before that is read"
    return found


@pytest.mark.parametrize(
    ("wrote", "reward"),
    [
        ({"txt": "0.5\n"}, 0.5),
        ({"json": '{"reward": 0.25, "speed": 7}'}, 0.25),
        ({"json": "1", "txt": "0"}, 0.0),
        ({"json": "0", "txt": "1"}, 0.0),
        ({"json": "x", "txt": "0"}, 0.0),
        ({"json": "[" * 100_000, "txt": "0"}, 0.0),
        ({"json": f"1{'0' * 400}", "txt": "0"}, 0.0),
        ({"json": '{"\\ud800": 1}', "txt": "0"}, 0.0),
        ({"json": "0.5", "txt": ""}, 0.5),
    ],
)
def test_of_two_rewards_the_lower_counts_and_garbage_beside_one_does_not(
    wrote: dict[str, str], reward: float, folder: Path
) -> None:
    assert scored(folder, wrote)["reward"] == reward


def test_other_numbers_are_kept(folder: Path) -> None:
    assert scored(folder, {"json": '{"reward": 1, "speed": 7}', "txt": "1"})["rewards"] == {"speed": 7}


@pytest.mark.parametrize(
    ("wrote", "ended", "told"),
    [
        ({}, KILLED, "ended by signal 9"),
        ({"txt": "1"}, KILLED, "ended by signal 9"),
        ({"txt": "1"}, ExecResult(exit_code=None, signal=9, timed_out=True), "stopped after 20 s"),
        ({"txt": "1"}, ExecResult(exit_code=None, signal=9, oom=True), "no memory"),
        ({}, FAILED, "exit code 1: the tests wrote neither"),
        ({"json": "x"}, FAILED, "exit code 1: "),
    ],
)
def test_tests_that_did_not_come_to_their_end_are_worth_nothing(
    wrote: dict[str, str], ended: ExecResult, told: str, folder: Path
) -> None:
    found = scored(folder, wrote, ended, before=True)
    assert found["reward"] == 0.0
    assert found["tests"].startswith(told)


@pytest.mark.parametrize("wrote", [{}, {"txt": "one"}, {"json": "{}"}])
def test_tests_that_come_to_their_end_without_a_reward_are_broken(wrote: dict[str, str], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"reward|float"):
        scored(folder, wrote)
    with pytest.raises(ValueError, match=r"reward|float"):
        scored(folder, wrote, FINE, before=True)
    with pytest.raises(ValueError, match=r"reward|float"):
        scored(folder, wrote, FAILED)  # they have never said anything: no network, say


def test_a_task_whose_files_do_not_fit_is_nobodys_failure(folder: Path) -> None:
    boxed = Boxed("harbor", {"harbor": {"folder": str(folder)}}, Box(room=100))
    with pytest.raises(SandboxError, match=r"begins with needs more than sandbox.limits.disk_bytes") as caught:
        boxed.begin()
    assert (caught.value.failure.cause, caught.value.failure.reward_valid) == ("environment", False)


def test_all_commands_of_one_answer_share_its_time(folder: Path) -> None:
    def sleepy(box: Box, argv: Any, options: Any) -> ExecResult | None:
        return ExecResult(exit_code=None, timed_out=True, duration_s=options["timeout_s"]) if "sleep" in argv else None

    boxed = Boxed("harbor", {"harbor": {"folder": str(folder)}}, Box(sleepy), timeout_s=40.0, turn_s=100.0)
    boxed.begin()
    told = boxed.call(*[("bash", {"command": "sleep"})] * 5)
    assert told[2] == "[stopped after 20 s]"
    assert told[3:] == ["error: the commands of one answer have 100 s together, and these are over"] * 2


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "line", ['ENTRYPOINT ["/start.sh"]', "entrypoint /start.sh", "HEALTHCHECK --interval=5s \\\n  CMD curl localhost"]
)
def test_an_image_that_does_something_at_its_start_is_refused_by_name(line: str, named: bool, folder: Path) -> None:
    """Also where it is built elsewhere, of that file."""
    if named:
        (folder / "task.toml").write_text(f'{CONFIG}[environment]\ndocker_image = "mine:1"\n')
    (folder / "environment" / "Dockerfile").write_text(f"FROM base\n{line}\n")
    name = line.split()[0].upper()
    with pytest.raises(ConfigurationError, match=rf"Dockerfile:2: {name} .*: its image has a start-up command"):
        read_task(folder)


@pytest.mark.parametrize("line", ["ENTRYPOINT []", "HEALTHCHECK NONE", 'CMD ["bash"]', "ENTRYPOINT x\nENTRYPOINT [ ]"])
def test_an_image_that_does_nothing_at_its_start(line: str, folder: Path) -> None:
    (folder / "environment" / "Dockerfile").write_text(f"FROM base\n{line}\n")
    assert read_task(folder).image == "base"
