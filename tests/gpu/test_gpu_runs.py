"""Whole runs on one GPU, which generator and trainer share: `make test-gpu`, on a machine that has one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.numpy import load_file
from tiny_hub import write_hub_inputs

from headway.flow.run import Flow, run
from headway.flow.worker import Worker
from headway.kernels.device_queries import query_gpus
from headway.models.initialise import initialise_model
from headway.orchestrator.preflight.memory import CUDA_CONTEXT_BYTES
from headway.trainer.checkpoints import checkpoint_path

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not query_gpus(), reason="this machine has no GPU"),  # with one, a CPU build of torch fails
]
STEPS = 4
LIMIT_S = 200.0
# Largest difference of two log-probabilities of a token that trainer and engine compute with the same weights.
MOST_APART = {"float32": 1e-3, "bfloat16": 0.2}


def written(folder: Path, dtype: str = "float32", **sections: Any) -> Path:
    """An experiment in ``folder``, on its model and tasks, made here where there are none."""
    if not (folder / "model").exists():
        tiny_run.write_inputs(folder)
    given: dict[str, Any] = {
        "run": {"steps": STEPS} | sections.pop("run", {}),
        "generator": {"devices": ["cuda:0"], "dtype": dtype} | sections.pop("generator", {}),
        "trainer": {"devices": ["cuda:0"], "dtype": dtype, "learning_rate": 1e-2} | sections.pop("trainer", {}),
    }
    return tiny_run.write_experiment(folder, **given, **sections)


def trained(config: Path, *arguments: str, steps: int = STEPS, **how: Any) -> list[Any]:
    """The steps of a run that ends well."""
    command = tiny_run.train(config, *arguments, limit_s=LIMIT_S, **how)
    assert command.process.returncode == 0, command.output + tiny_run.tail_of(command.run)
    tiny_run.require_whole(command.run, steps, drained=False)
    tiny_run.require_nothing_left(command)
    return tiny_run.steps_of(command.run)


def require_agreement(steps: list[Any], dtype: str) -> None:
    fresh = [step for step in steps if step.metrics and step.tokens.staleness.max == 0]
    told = [step.metrics["mismatch_max"] for step in fresh]
    print(f"mismatch_max, {dtype}: {max(told):.2e}")
    assert max(told) < MOST_APART[dtype]


@pytest.mark.parametrize("dtype", list(MOST_APART))
def test_a_run_is_killed_resumed_and_complete(tmp_path: Path, dtype: str) -> None:
    config = written(tmp_path, dtype)
    assert tiny_run.train(config, fault="batch-committed:2", limit_s=LIMIT_S).process.returncode == -signal.SIGKILL
    require_agreement(trained(config, "--resume"), dtype)


def test_sides_in_turns_free_the_gpu_and_train_the_same_weights(tmp_path: Path) -> None:
    final = []
    for name, offload in (("stay", False), ("turns", True)):
        folder = tmp_path / name
        folder.mkdir()
        config = written(folder, run={"deterministic": True, "offload": offload}, queue={"budget": 0})
        trained(config)
        final.append(load_file(checkpoint_path(folder / "run", STEPS) / "model" / "model.safetensors"))
    assert all((final[0][name] == final[1][name]).all() for name in final[0])
    for kind in ("offload", "onload"):
        told = tiny_run.events_of(tmp_path / "turns" / "run", kind)
        assert sorted(event.worker for event in told) == ["generator-0", "trainer"]
        assert all(event.data["moved_bytes"] > 0 for event in told)


@pytest.mark.parametrize("kind", ["Olmo2", "FalconH1", "DeepseekV3"])
def test_an_architecture_of_transformers(tmp_path: Path, kind: str) -> None:
    write_hub_inputs(tmp_path, kind)
    queue = {"budget": 0, "filter_zero_variance": False}
    steps = trained(written(tmp_path, model={"implementation": "transformers"}, queue=queue))
    require_agreement(steps, "float32")


@pytest.mark.parametrize("implementation", ["headway", "transformers"])
def test_an_adapter(tmp_path: Path, implementation: str) -> None:
    if implementation == "transformers":
        write_hub_inputs(tmp_path, "Olmo2")
    model = {"implementation": implementation, "adapter": {"rank": 4, "alpha": 8.0}}
    steps = trained(written(tmp_path, model=model, generator={"update_mode": "finish"}))
    require_agreement(steps, "float32")
    adapter = load_file(checkpoint_path(tmp_path / "run", STEPS) / "adapter" / "adapter_model.safetensors")
    assert any(one.any() for name, one in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("dtype", list(MOST_APART))
def test_experts_are_replayed(tmp_path: Path, dtype: str) -> None:
    tiny_run.write_inputs(tmp_path)
    shutil.rmtree(tmp_path / "model")
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "intermediate": 24}
    initialise_model(tmp_path / "model", prompts, family="qwen3_moe", character_level=True, **sizes)
    steps = [step for step in trained(written(tmp_path, dtype, generator={"update_mode": "abort"})) if step.metrics]
    print("disagree without replay:", [round(step.metrics["experts_disagree"], 4) for step in steps])
    assert all(step.metrics["experts_disagree_replayed"] == 0.0 for step in steps)
    assert max(step.metrics["experts_disagree"] for step in steps) > 0.0
    require_agreement(steps, dtype)


class Neighbour(Worker):
    """A worker that swaps a tensor on its GPU, and one in memory, with another worker."""

    async def swap(self, other: str, seed: int) -> tuple[list[float], list[float], str]:
        own = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))
        await self.send({"there": own.to("cuda:0"), "here": own[:1000].clone()}, other)
        got = await self.recv(other)
        sums = [float(got["there"].double().sum()), float(got["here"].double().sum())]
        return [float(own.double().sum()), float(own[:1000].double().sum())], sums, str(got["there"].device)


def test_workers_of_one_gpu_swap_tensors_by_cuda_ipc(tmp_path: Path) -> None:
    async def workflow(flow: Flow) -> None:
        left, right = await flow.workers("left", Neighbour), await flow.workers("right", Neighbour)
        for seed in range(3):
            first, second = left.on(0).swap("right-0", seed), right.on(0).swap("left-0", 10 + seed)
            (sent, got, device), (other_sent, other_got, other_device) = await first, await second
            assert (device, other_device) == ("cuda:0", "cuda:0")
            assert got == pytest.approx(other_sent, abs=1e-3)
            assert other_got == pytest.approx(sent, abs=1e-3)

    run(workflow, {"left": "cuda:0", "right": "cuda:0"}, directory=tmp_path / "run")
    events = (tmp_path / "run" / "workflow.jsonl").read_text()
    assert all(f"{pair}: cuda ipc" in events for pair in ("left-0 -> right-0", "right-0 -> left-0"))


def test_the_driver_lists_it_and_a_context_fits_its_allowance() -> None:
    listed = query_gpus()
    assert listed
    assert (listed[0].name, listed[0].vendor) == ("cuda:0", "nvidia")
    assert listed[0].model == torch.cuda.get_device_name(0)
    assert listed[0].architecture == "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    assert listed[0].memory_bytes == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.05)  # makes a context here
    if (before := (query_gpus() or listed)[0].memory_used_bytes) > 1 << 30:
        pytest.skip("other processes use the GPU")
    code = "import torch; x = torch.ones(64, 64, device='cuda', dtype=torch.bfloat16); print((x @ x)[0].sum()); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"tensor(4096")
        taken = (query_gpus() or listed)[0].memory_used_bytes - before
        process.kill()
    print(f"context and libraries of a process: {taken / 2**20:.0f} MiB")
    assert 0 < taken < CUDA_CONTEXT_BYTES
