"""`headway sft` with kernel tasks as its validation: the shares of what compiles, is correct, is faster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_run
from kernel_service import REFERENCE, candidate, served_kernels
from talking_model import TEMPLATE

from headway.kernels.scores import mean_over_tasks
from headway.models.initialise import initialise_model
from headway.records.kernels import KernelTask
from headway.trainer.checkpoints import read_state

pytestmark = pytest.mark.real
# what is learned for each of two tasks: correct and faster; compiles, but wrong
ANSWERS = {
    "one": f"```python\n{candidate(speedup=2.0)}```",
    "two": f"```python\n{candidate(fault='timeout')}```",
}
STEPS = 60


def write(folder: Path, address: str, **sections: Any) -> Path:
    """An experiment over a new model, in ``folder``."""
    kernels = {name: KernelTask(name=name, source=REFERENCE, backend="torch") for name in ANSWERS}
    rows = [
        {"prompt": f"Write {name}.", "metadata": {"kernel": msgspec.to_builtins(one)}} for name, one in kernels.items()
    ]
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks.jsonl").write_text(json.dumps(rows[0] | {"prompt": "Write three."}) + "\n")
    talks = [
        [{"role": "user", "content": f"Write {name}."}, {"role": "assistant", "content": answer}]
        for name, answer in ANSWERS.items()
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    texts = [message["content"] for talk in talks for message in talk] + ["system\nuser\nassistant\ntool\n"]
    shape: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "intermediate": 128}
    initialise_model(folder / "raw", texts, 300, family="llama", max_positions=512, character_level=True, **shape)
    (folder / "raw" / "chat_template.jinja").write_text(TEMPLATE)
    given: dict[str, Any] = {
        "model": {"path": str(folder / "raw"), "template": "chat"},
        "tasks.validation": {"path": str(folder / "validation.jsonl")},
        "rollout": {"max_prompt_tokens": 120, "max_response_tokens": 120},
        "evaluation": {"temperature": 0.0},
        "environment": {"name": "kernel", "parameters": {"addresses": [address], "turns": 1, "timeout_s": 30.0}},
        "sft": {
            "data": str(folder / "talks.jsonl"),
            "output": str(folder / "model"),
            "steps": STEPS,
            "batch_sequences": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 5,
            "evaluate_every_steps": STEPS // 2,
        },
    }
    return tiny_run.write_experiment(folder, **(given | sections))


@pytest.mark.slow
def test_shares_of_kernels_are_measured_and_kept_beside_the_loss(tmp_path: Path) -> None:
    async def main() -> dict[str, Any]:
        async with served_kernels() as served:
            config = write(tmp_path, served.address)
            # the first evaluation finds a model that has learned nothing yet
            output = await asyncio.to_thread(
                tiny_run.output_of, "sft", config, "--json", "--sft.evaluate_every_steps=1", "--sft.steps=1"
            )
            first = json.loads(output)
            second = json.loads(await asyncio.to_thread(tiny_run.output_of, "sft", config, "--json"))
            assert {one.source for one in served.judge.seen} <= {candidate(speedup=2.0), candidate(fault="timeout")}
            return {"first": first, "second": second}

    found = asyncio.run(main())
    none, half, both = (mean_over_tasks(values) for values in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0]))
    assert none is not None
    assert half is not None
    assert both is not None
    for name in ("compiles", "correct", "faster"):
        assert found["first"]["kernels"][name] == {
            "value": 0.0,
            "interval": list(none.interval),
            "count": 0,
            "rollouts": 2,
            "untimed": 0,
        }
    result = found["second"]
    assert [one["step"] for one in result["evaluations"]] == [STEPS // 2, STEPS]
    assert result["evaluations"][-1]["loss_mean"] < result["evaluations"][0]["loss_mean"]
    shares = result["evaluations"][-1]["kernels"]
    assert shares == result["kernels"]
    assert (shares["compiles"]["value"], shares["compiles"]["interval"]) == (1.0, list(both.interval))
    for name in ("correct", "faster"):
        assert (shares[name]["value"], shares[name]["count"], shares[name]["interval"]) == (0.5, 1, list(half.interval))
    kept = read_state(tmp_path / "model").metrics
    assert kept["loss_mean"] == result["evaluations"][-1]["loss_mean"]
    assert (kept["compiles"], kept["faster"], kept["faster_count"], kept["faster_rollouts"]) == (1.0, 0.5, 1, 2)


@pytest.mark.slow
def test_services_and_tasks_that_will_not_do_are_refused_before_training(tmp_path: Path) -> None:
    config = write(tmp_path, "http://127.0.0.1:9")
    for command in ("sft", "check"):
        said = tiny_run.refused(command, config)
        assert "no kernel service for back end torch: http://127.0.0.1:9: ConnectError" in " ".join(said.split())
    (tmp_path / "validation.jsonl").write_text('{"prompt": "Write one.", "answer": "1"}\n')
    assert "metadata.kernel is no kernel task" in tiny_run.refused("sft", config)
    (tmp_path / "validation.jsonl").write_text("")
    assert "validation.jsonl" in tiny_run.refused("sft", config)
    assert not (tmp_path / "model").exists()
