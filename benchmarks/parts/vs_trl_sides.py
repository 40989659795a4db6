"""The two sides of the TRL comparison: Headway's experiment, and how TRL's interpreter is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.runtime.devices import ALLOCATOR_ENVIRONMENT

HERE = Path(__file__).resolve().parents[1]
GROUP = 8
BATCH = 64
CLIP = 0.2
BETA2 = 0.99
PEER_START_S, PEER_STEP_S = 120.0, 20.0  # more than this is taken for a hang


class PeerFailed(RuntimeError):
    """TRL's side ended otherwise than well."""


def experiment(
    directory: Path,
    *,
    model: Path,
    tasks: Path,
    reward: str,
    tokens: tuple[int, int],
    steps: int,
    budget: int,
    changes: dict[str, dict[str, Any]],
) -> Experiment:
    """Headway's settings: what trl_peer.configuration says to TRL. ``tokens``: most of a prompt and of a response."""
    raw: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory), "steps": steps},
        "model": {"path": str(model)},
        "tasks": {"train": {"path": str(tasks)}},
        "verifier": {"name": "parts.trl_task:verify", "parameters": {"reward": reward}},
        "rollout": {"group_size": GROUP, "max_prompt_tokens": tokens[0], "max_response_tokens": tokens[1]},
        "generator": {"devices": ["cpu:0"]},
        "queue": {"groups_per_step": BATCH // GROUP, "budget": budget, "filter_zero_variance": False},
        "algorithm": {"loss": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP, "advantage": "group_mean_std"},
        "trainer": {"devices": ["cpu:1"], "learning_rate": 1e-5, "betas": (0.9, BETA2), "micro_batch_tokens": 8192},
        "checkpoint": {"every_steps": 1_000_000},
        "evaluation": {"test": "never"},
        "ledger": {"trackers": []},
    }
    for section, keys in changes.items():
        raw[section] = raw.get(section, {}) | keys
    return validate_experiment(raw, "benchmark")


def headway(*arguments: str) -> str:
    """A `headway` command in a process of its own: the orchestrator, which is this process, never loads torch."""
    done = subprocess.run([sys.executable, "-m", "headway.cli.main", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"headway {arguments[0]} ended with {done.returncode}")
    return done.stdout


def run_peer(python: str, settings_path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One run of trl_peer.py; its result. Raises PeerFailed with the end of its output."""
    settings_path.write_text(json.dumps(settings))
    log = settings_path.with_suffix(".log")
    limit_s = PEER_START_S + PEER_STEP_S * settings["steps"]
    command = [python, str(HERE / "trl_peer.py"), str(settings_path)]
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=file, text=True, timeout=limit_s, env=peer_environment()
            )
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"TRL did not end within {limit_s:.0f} s:\n{log.read_text()[-3000:]}") from None
        except OSError as error:
            raise SystemExit(f"--peer-python {python}: {error.strerror}") from None
    if done.returncode:
        raise PeerFailed(f"TRL ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peer_environment() -> dict[str, str]:
    """The allocator settings Headway's workers have; none of our own modules."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | ALLOCATOR_ENVIRONMENT
