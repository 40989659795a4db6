"""Recipes of the tinker cookbook, unmodified, on `headway serve-tinker`: 60 steps each, and what they learn by them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cookbook
import numpy as np
import pytest
from cookbook import BASE, run_recipe
from served_tinker import service, write_settings

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(not cookbook.PYTHON.is_file(), reason="no tinker cookbook: make install-cookbook"),
]
STEPS = 60
CORRECT, DIVERGENCE = "env/all/correct", "sdft/reverse_kl_mean"
SUMS: dict[str, Any] = {
    "env": "arithmetic",
    "renderer_name": "qwen3_instruct",
    "groups_per_batch": 8,
    "group_size": 8,
    "max_tokens": 5,
    "learning_rate": 2e-3,
    "max_steps": STEPS,
    "eval_every": 0,
    "save_every": 0,
    "loss_fn": "importance_sampling",
}


class Served(NamedTuple):
    folder: Path
    address: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("recipes")
    cookbook.write_base(folder)
    cookbook.write_data(folder)
    with service(write_settings(folder, BASE, slots=64), cwd=folder) as (_, address):
        yield Served(folder, address)


def rise(rows: list[dict[str, Any]], name: str) -> float:
    """By how many standard errors the mean of a metric is higher in the last third than in the first."""
    values = np.array([row[name] for row in rows if name in row])
    assert len(values) >= STEPS - 1, f"{name} in {len(values)} of {len(rows)} rows; {sorted(rows[-1])}"
    return change(values[: len(values) // 3], values[-(len(values) // 3) :], name)


def change(first: Sequence[float], last: Sequence[float], name: str) -> float:
    """By how many standard errors the mean of the second ones is higher."""
    means, variances = (np.mean(first), np.mean(last)), (np.var(first, ddof=1), np.var(last, ddof=1))
    error = np.sqrt(variances[0] / len(first) + variances[1] / len(last))
    print(f"{name}: {means[0]:.4f} -> {means[1]:.4f}, {(means[1] - means[0]) / error:.1f} standard errors")
    return float((means[1] - means[0]) / error)


def test_the_packages_are_what_their_wheels_have() -> None:
    assert not cookbook.changed_packages(["tinker", "tinker_cookbook"])


@pytest.mark.parametrize(
    ("log", "options"),
    [
        ("synchronous", {}),
        ("asynchronous", {"loss_fn": "ppo", "max_steps_off_policy": 2}),
        ("streaming", {"stream_minibatch_config__groups_per_batch": 8, "stream_minibatch_config__num_minibatches": 2}),
    ],
)
def test_math_rl_solves_more_sums(served: Served, log: str, options: dict[str, Any]) -> None:
    rows = run_recipe(*served_as(served, "math_rl.train"), log, **SUMS | options)
    assert 0.05 <= rows[0][CORRECT] <= 0.6
    assert rise(rows, CORRECT) >= 2


def test_rl_loop_solves_more_sums(served: Served) -> None:
    options: dict[str, Any] = {"batch_size": 8, "group_size": 8, "learning_rate": 2e-3, "max_tokens": 8}
    options |= {"save_every": 20, "max_steps": STEPS, "loss_fn": "importance_sampling"}
    assert rise(run_recipe(*served_as(served, "rl_loop"), "rl_loop", **options), "reward/total") >= 2


def test_rl_with_a_reference_solves_more_sums(served: Served) -> None:
    options: dict[str, Any] = {"kl_penalty_coef": 0.02, "kl_reference_config__base_model": BASE, "max_tokens": 5}
    sums: dict[str, Any] = {"batch_size": 8, "group_size": 8, "n_batches": STEPS, "model_name_for_tokenizer": BASE}
    sums |= {"renderer_name": SUMS["renderer_name"]}
    options |= {"dataset_builder": "tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder"}
    options |= {f"dataset_builder__{name}": value for name, value in sums.items()}
    options |= {"learning_rate": 2e-3, "loss_fn": "importance_sampling", "save_every": 0, "max_steps": STEPS}
    rows = run_recipe(*served_as(served, "rl_basic"), "reference", **options)
    assert rise(rows, CORRECT) >= 2
    assert all(row["kl_policy_base"] > 0 for row in rows[STEPS // 2 : STEPS])


def test_supervised_recipes_lower_their_losses(served: Served) -> None:
    options: dict[str, Any] = {"batch_size": 16, "learning_rate": 1e-3, "max_steps": STEPS, "save_every": 20}
    rows = run_recipe(*served_as(served, "sl_loop"), "sl_loop", **options)
    assert rise(rows, "train_mean_nll") <= -2
    options |= {"dataset": "no_robots", "renderer_name": "qwen3_instruct", "eval_every": 0}
    rows = run_recipe(*served_as(served, "chat_sl.train"), "chat_sl", **options)
    assert rise(rows, "train_mean_nll") <= -2


def test_dpo_prefers_what_is_preferred(served: Served) -> None:
    options: dict[str, Any] = {"renderer_name": "qwen3_instruct", "batch_size": 8, "learning_rate": 1e-3}
    options |= {"max_steps": STEPS, "dataset": "hhh", "lora_rank": None}
    rows = run_recipe(*served_as(served, "preference.dpo.train"), "dpo", **options)
    assert rise(rows, "dpo_loss") <= -2


def test_distillation_comes_closer_to_a_trained_teacher(served: Served) -> None:
    teacher = trained_teacher(served)
    options: dict[str, Any] = {"renderer_name": "qwen3_instruct", "teacher_model": BASE, "teacher_checkpoint": teacher}
    options |= {"groups_per_batch": 8, "group_size": 4, "learning_rate": 2e-3, "max_tokens": 8, "max_steps": STEPS}
    options |= {"dataset": "deepmath", "eval_every": 0, "save_every": 0}
    rows = run_recipe(*served_as(served, "distillation.on_policy_distillation"), "distillation", **options)
    assert rise(rows, "teacher_kl") <= -2


def test_self_distillation_learns_many_targets_of_a_position(served: Served) -> None:
    """Its own metrics have no loss of the targets, so it is judged by how far the reversed recipe, whose loss is a
    custom one, begins from the teacher after it, and without it."""
    options: dict[str, Any] = {"renderer_name": "qwen3_instruct", "groups_per_batch": 8, "learning_rate": 1e-3}
    options |= {"max_tokens": 16, "topk": 8, "max_steps": STEPS, "eval_every": 0, "max_context_length": 480}
    run_recipe(*served_as(served, "sdft.train"), "sdft", **options, save_every=20)
    rows = run_recipe(*served_as(served, "sdft.train"), "reversed", **options, reverse=True, save_every=0)
    assert rise(rows, DIVERGENCE) <= -2
    options |= {"load_checkpoint_path": checkpoint_of(served, "sdft", "state_path"), "max_steps": 20}
    after = run_recipe(*served_as(served, "sdft.train"), "after", **options, reverse=True, save_every=0)
    assert change([row[DIVERGENCE] for row in rows[:20]], [row[DIVERGENCE] for row in after[:20]], DIVERGENCE) <= -2


def test_a_killed_recipe_resumes_with_its_optimiser(served: Served) -> None:
    options: dict[str, Any] = SUMS | {"save_every": 5, "max_steps": 20, "behavior_if_log_dir_exists": "resume"}
    program = cookbook.start_recipe(*served_as(served, "math_rl.train"), "resumed", **options)
    while len(cookbook.metrics_of(served.folder / "resumed")) < 12:
        assert program.poll() is None, (served.folder / "resumed.txt").read_text()[-4000:]
        time.sleep(0.05)
    program.send_signal(signal.SIGKILL)
    program.wait()
    rows = run_recipe(*served_as(served, "math_rl.train"), "resumed", **options)
    assert [row["progress/batch"] for row in rows[:20]] == list(range(20))  # it drops what came after the checkpoint
    first, last = (checkpoints_of(served, "resumed")[number]["state_path"] for number in (0, -1))
    assert first.split("/")[2] != last.split("/")[2]  # a model of its own, which has taken ten of the optimiser's steps
    state = served.folder / "store" / "checkpoints" / last.removeprefix("tinker://") / "state.json"
    assert json.loads(state.read_text())["version"] == 20


def served_as(served: Served, recipe: str) -> tuple[Path, str, str]:
    return served.folder, recipe, served.address


def checkpoints_of(served: Served, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (served.folder / log / "checkpoints.jsonl").read_text().splitlines()]


def checkpoint_of(served: Served, log: str, name: str) -> str:
    """The path of a recipe's newest checkpoint; ``name``: state_path or sampler_path."""
    return next(row[name] for row in reversed(checkpoints_of(served, log)) if row.get(name))


def trained_teacher(served: Served) -> str:
    """The sampler's path of a checkpoint that chat_sl has trained."""
    options: dict[str, Any] = {"batch_size": 16, "learning_rate": 2e-3, "max_steps": 40, "save_every": 20}
    options |= {"dataset": "no_robots", "renderer_name": "qwen3_instruct", "eval_every": 0}
    run_recipe(*served_as(served, "chat_sl.train"), "teacher", **options)
    return checkpoint_of(served, "teacher", "sampler_path")
