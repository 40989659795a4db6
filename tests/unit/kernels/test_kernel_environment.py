"""The environment of kernels, over a served evaluator that does what a candidate's comments say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from environment_player import Player, played, service
from kernel_service import REFERENCE, candidate, served_kernels

from headway.kernels.tasks import kernel_task
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelTask
from headway.records.task import Task

KERNEL = KernelTask(name="t", source=REFERENCE, backend="torch")
TASK = Task(task_id="t", prompt="Make it faster.", metadata={"kernel": msgspec.to_builtins(KERNEL)})


def answered(**what: object) -> str:
    return f"Here it is.\n```python\n{candidate(**what)}```\n"


async def rewards(*answers: str, keys: Any = (), **parameters: Any) -> tuple[Player, Any]:
    """The rollout of these answers, and its score."""
    async with served_kernels(keys=keys) as served:
        told_it = {"addresses": [served.address], "timeout_s": 30.0, **parameters}
        environment = service(name="kernel", parameters=told_it)
        player = Player(environment, TASK)
        await player.play(answers)
        verdict = (await environment.score(player.name)).verdict
        await environment.shut_down()
    return player, verdict


@pytest.mark.parametrize(
    ("answers", "expected", "over"),
    [
        ([answered(fault="syntax_error"), answered(fault="timeout"), answered(speedup=1.1)], [0.0, 0.1, 0.4], "turns"),
        ([answered(speedup=2.0)], [1.3], "fast enough"),
        ([answered(speedup=9.0)], [2.3], "fast enough"),
        (["no program", answered(cheat="cached"), answered(speedup=0.5)], [0.0, 0.0, 0.3], "turns"),
    ],
)
def test_turns_have_the_ladders_rewards(answers: list[str], expected: list[float], over: str):
    async def main() -> None:
        player, verdict = await rewards(*answers)
        assert player.last.over == over
        assert verdict.reward == pytest.approx(max(expected))
        assert verdict.turn_rewards == pytest.approx(expected)
        assert [one["reward"] for one in verdict.detail["kernel_answers"]] == pytest.approx(expected)

    played(main)


def test_a_failed_answer_gets_feedback():
    async def main() -> None:
        player, _ = await rewards(answered(fault="syntax_error"), "none", answered())
        said = [message["content"] for message in player.messages[""] if message["role"] == "user"]
        assert "doesn't compile" in said[1]
        assert "no module with ModelNew" in said[2]

    played(main)


def test_a_service_failure_is_infrastructure():
    async def main() -> None:
        environment = service(name="kernel", parameters={"addresses": ["http://127.0.0.1:9"], "timeout_s": 1.0})
        player = Player(environment, TASK)
        await player.begin()
        await player.answer(answered())
        failure = player.last.failure
        assert failure is not None
        assert failure.infrastructure

    played(main)


def test_a_key_is_sent(tmp_path: Path):
    async def main() -> None:
        (tmp_path / "key").write_text("0123456789abcdef\n")
        _, verdict = await rewards(answered(), keys=["0123456789abcdef"], key_file=str(tmp_path / "key"), turns=1)
        assert verdict.reward == pytest.approx(0.8)

    played(main)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"addresses": []}, r"addresses of kernel services = \[\]"),
        ({"addresses": ["http://a:1"], "backend": "cobol"}, "backend"),
        ({"addresses": ["http://a:1"], "turns": 0}, "turns = 0: at least 1"),
        ({"addresses": ["http://a:1"], "key_file": "/none"}, "key_file = /none"),
    ],
)
def test_bad_parameters_are_refused_by_name(parameters: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        service(name="kernel", parameters=parameters)


def test_a_task_without_a_kernel_is_refused():
    with pytest.raises(ConfigurationError, match=r"task t: metadata\.kernel is no kernel task"):
        kernel_task(Task(task_id="t", prompt="p"))
    assert kernel_task(TASK).backend == "torch"
    assert kernel_task(TASK, "cpp").backend == "cpp"
