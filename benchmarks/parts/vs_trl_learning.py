"""The learning part of the TRL comparison: mean reward per sample trained, from one cold start."""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from headway.orchestrator.train import train
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger
from headway.telemetry.rollouts.reader import RolloutRecord
from parts.vs_trl_sides import BATCH, BETA2, CLIP, GROUP, HERE, experiment, headway, run_peer

ARITHMETIC = HERE.parent / "examples" / "arithmetic"
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 160
# The same for both. TRL is on-policy; Headway's samples are up to the budget old.
LEARNING_RATE = 2.5e-4
WARMUP_STEPS = 20
QUARTERS = 4


def learn(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All seeds on both sides, alternating which goes first; returns the result."""
    steps = arguments.steps or 100
    if steps < QUARTERS:
        raise SystemExit(f"--steps {steps}: at least {QUARTERS}, to have a last quarter")
    cold = cold_start(arguments.cold_start or folder / "cold")
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for seed in arguments.seeds:
        sides = [("Headway", ours), ("TRL", theirs)] if arguments.peers else [("Headway", ours)]
        for name, found in sides if seed % 2 == 0 else sides[::-1]:
            run = learn_headway if name == "Headway" else learn_peer
            rewards, note = run(arguments, folder, cold, seed, steps)
            found.append(quarters(rewards))
            shown = " ".join(f"{value:.3f}" for value in found[-1])
            print(f"seed {seed}  {name:8} mean reward by quarters: {shown}   {note}", flush=True)
    result: dict[str, Any] = {"samples": steps * BATCH, "seeds": arguments.seeds}
    for name, found in (("headway", ours), ("trl", theirs)):
        if found:
            result[f"reward_{name}"] = [round(values[-1], 4) for values in found]
    if ours and theirs:
        differences = [a[-1] - b[-1] for a, b in zip(ours, theirs, strict=True)]
        result["reward_difference"] = round(statistics.mean(differences), 4)
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            result["reward_difference_standard_error"] = round(error, 4)
    return result


def quarters(rewards: list[float]) -> list[float]:
    """Means over the quarters of a run's steps (the last has what is left over)."""
    part = len(rewards) // QUARTERS
    starts = [part * i for i in range(QUARTERS)]
    return [statistics.mean(rewards[a:b]) for a, b in zip(starts, [*starts[1:], len(rewards)], strict=True)]


def cold_start(folder: Path) -> Path:
    """``folder`` with ``model`` and ``tasks.jsonl``: the quickstart's cold start (about a minute on two cores)."""
    if (folder / "model" / "config.json").exists():
        return folder
    tasks, initial = folder / "tasks", folder / "init"
    subprocess.run([sys.executable, str(ARITHMETIC / "make_tasks.py"), str(tasks)], check=True)
    headway("init-model", str(initial), "--texts", str(tasks / "sft.jsonl"), "--character-level")
    headway(
        *("sft", str(ARITHMETIC / "experiment.toml"), "--quiet", f"--model.path={initial}"),
        *(f"--sft.data={tasks}/sft.jsonl", f"--sft.output={folder}/model"),
        *(f"--tasks.{name}.path={tasks}/{name}.jsonl" for name in ("train", "validation", "test")),
    )
    (tasks / "train.jsonl").rename(folder / "tasks.jsonl")
    return folder


def learn_headway(
    arguments: argparse.Namespace, folder: Path, cold: Path, seed: int, steps: int
) -> tuple[list[float], str]:
    """Mean reward of every batch's worth of groups in the order of their admission (in that of training the longest
    responses, which solve least, would come last), and a remark."""
    directory = folder / f"run-{seed}"
    settings = experiment(
        directory,
        model=cold / "model",
        tasks=cold / "tasks.jsonl",
        reward="last_number",
        tokens=(PROMPT_TOKENS, RESPONSE_TOKENS),
        steps=steps,
        budget=arguments.budget,
        changes={
            "run": {"seed": seed},
            "ledger": {"trackers": []},
            "trainer": {"learning_rate": LEARNING_RATE, "warmup_steps": WARMUP_STEPS},
        },
    )
    summary = train(settings)
    records = [line for line in read_ledger(directory) if isinstance(line, StepRecord)]
    staleness = statistics.mean(record.trajectory_staleness.mean for record in records)
    oldest = summary.max_trajectory_staleness
    note = f"{summary.trained_per_s:.1f} samples/s, staleness mean {staleness:.1f}, max {oldest}"
    record = RolloutRecord(directory)
    trained = {group for group, end in record.endings().items() if end.ending == "trained"}
    rows = [row for _, batch in record.batches(["group", "reward"]) for row in batch.to_pylist()]
    samples = sorted((row["group"], row["reward"]) for row in rows if row["group"] in trained)
    assert len(samples) == steps * BATCH, f"{len(samples)} samples were trained"
    rewards = [reward for _, reward in samples]
    return [statistics.mean(rewards[i : i + BATCH]) for i in range(0, len(rewards), BATCH)], note


def learn_peer(
    arguments: argparse.Namespace, folder: Path, cold: Path, seed: int, steps: int
) -> tuple[list[float], str]:
    """Mean reward of each step's batch, and a remark."""
    rows = (cold / "tasks.jsonl").read_text().splitlines()
    offset = seed * steps * BATCH // GROUP % len(rows)  # every seed its own tasks
    tasks = folder / f"tasks-{seed}.jsonl"
    tasks.write_text("\n".join(rows[offset:] + rows[:offset]) + "\n")
    found = run_peer(
        arguments.peer_python,
        folder / f"peer-{seed}.json",
        {
            "model": str(cold / "model"),
            "tasks": str(tasks),
            "reward": "last_number",
            "steps": steps,
            "warmup_steps": 2,
            "max_completion": RESPONSE_TOKENS,
            "seed": seed,
            "learning_rate": LEARNING_RATE,
            "lr_warmup_steps": WARMUP_STEPS,
            "clip": CLIP,
            "betas": (0.9, BETA2),
        },
    )
    return found["rewards"], f"{found['samples_per_s']:.1f} samples/s"
