"""What policies in simulators learn, beside stable-baselines3's, with and without correction of stale fragments.

    python benchmarks/embodied_learning.py --peer /path/of/an/environment/with/stable_baselines3/bin/python
    python benchmarks/embodied_learning.py --parts reach

Every training of one seed is a cell, a JSON file of the folder ``--keep``; those that are there aren't run again, so an
interrupted benchmark continues. 16 lanes, fragments of 128 steps, minibatches of 256, 10 passes, 64 x 64 units. Parts:

- `HalfCheetah-v5`, `Hopper-v5`: mean return of the last 100 episodes after ``--steps`` environment steps, of each seed:
  `sb3` (stable-baselines3's PPO), `eta0`, `eta2` (V-trace), and, after a third of the steps, `uncorrected` (eta = 2
  without correction, which `headway check` refuses). Interquartile means over seeds, with 95 % intervals by a bootstrap
  over seeds; of `eta2` the paired difference to `eta0`.
- `reach`, `pick_place`: success rate on held-out seeds in Meta-World by EnvPool; best and last evaluation of each seed.

Prints each cell, and as the last line one JSON object: the intervals, and for each condition whether it holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disabled")

import numpy as np

from headway.config.load import validate
from headway.config.simulation import EmbodiedAlgorithmConfig, SimulatorExperiment
from headway.embodied.driver import train
from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger

Cell = dict[str, Any]
STEP_TRANSITIONS = 16 * 128
OVERLAPPING: dict[str, Any] = {"queue": {"budget": 2}, "algorithm": {"correction": "vtrace"}}
REACHED, REACH_LIMIT_S = 0.9, 1200.0
LARGEST_LOSS = 0.1  # of eta0's return, which eta2 may be worse
RESAMPLES = 10_000
PEER = """
import json, sys
import numpy as np, torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
class Returns(BaseCallback):
    history = []
    def _on_step(self):
        return True
    def _on_rollout_end(self):
        episodes = [float(episode["r"]) for episode in self.model.ep_info_buffer]
        self.history.append([self.num_timesteps, float(np.mean(episodes)) if episodes else None])
environment, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
lanes = VecNormalize(make_vec_env(environment, 16, seed=seed))
model = PPO("MlpPolicy", lanes, n_steps=128, batch_size=256, n_epochs=10, seed=seed, device="cpu")
model.learn(steps, callback=Returns())
print(json.dumps(Returns.history))
"""


def experiment(folder: str, environment: str, seed: int, steps: int, **sections: dict[str, Any]) -> SimulatorExperiment:
    raw: dict[str, Any] = {
        "run": {"directory": f"{folder}/run", "steps": -(-steps // STEP_TRANSITIONS), "seed": seed},
        "simulator": {"environment": environment},
        "checkpoint": {"every_steps": 100_000},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate(raw, "benchmark", SimulatorExperiment)


def returns_of(folder: str) -> list[tuple[int, float]]:
    """Environment steps, and the mean return of the last 100 episodes, behind each training step."""
    history, transitions = list[tuple[int, float]](), 0
    for line in read_ledger(f"{folder}/run"):
        if isinstance(line, StepRecord) and line.episodes:
            transitions += line.episodes.transitions
            history.append((transitions, line.episodes.return_mean))
    return history


def locomotion_cell(arguments: argparse.Namespace, environment: str, method: str, seed: int) -> Cell:
    steps = arguments.steps // 3 if method == "uncorrected" else arguments.steps
    if method == "sb3":
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        command = [str(arguments.peer), "-c", PEER, environment, str(steps), str(seed)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        history = json.loads(done.stdout.splitlines()[-1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            chosen = experiment(folder, environment, seed, steps, **({} if method == "eta0" else OVERLAPPING))
            if method == "uncorrected":  # not by its key, which is refused
                chosen = chosen.model_copy(update={"algorithm": EmbodiedAlgorithmConfig()})
            train(chosen)
            history = returns_of(folder)
    third = next(mean for transitions, mean in history if transitions >= arguments.steps // 3)
    return {"return": history[-1][1], "return_at_a_third": third, "history": history[::10]}


def meta_world_cell(arguments: argparse.Namespace, environment: str, _: str, seed: int) -> Cell:
    with tempfile.TemporaryDirectory() as folder:
        sections: dict[str, dict[str, Any]] = {
            "run": {"time_limit_s": REACH_LIMIT_S},
            "simulator": {"backend": "envpool", "arguments": {"partially_observable": False}, "block_lanes": 16},
            "evaluation": {"every_steps": 25, "episodes": 48, "video": False},
        }
        sections |= OVERLAPPING
        summary = train(experiment(folder, environment, seed, arguments.reach_steps, **sections))
        lines = read_ledger(f"{folder}/run")
    rates = [line.solve_rate for line in lines if isinstance(line, EvaluationRecord)]
    return {"best_success": max(rates), "success": rates[-1], "rates": rates, "seconds": summary.duration_s}


def interquartile_mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean without the lowest and highest quarter, rounded down to whole values."""
    ordered = np.sort(np.asarray(values, np.float64))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(values: Sequence[float]) -> Cell:
    """The interquartile mean, and low and high of its 95 % interval: bootstrap over seeds."""
    numbers = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.quantile([interquartile_mean(numbers[row]) for row in drawn], (0.025, 0.975))
    return {"mean": interquartile_mean(numbers), "low": float(low), "high": float(high)}


def locomotion(cells: dict[str, list[Cell]]) -> Cell:
    """The intervals of the methods, and the conditions that those with results meet."""
    ends = {name: [cell["return"] for cell in each] for name, each in cells.items()}
    report: Cell = {name: interval(numbers) for name, numbers in ends.items()}
    if "sb3" in ends:  # within noise of the peer, or better
        report["eta0_as_good_as_sb3"] = report["eta0"]["high"] >= report["sb3"]["low"]
    report["eta2_difference"] = interval([two - none for two, none in zip(ends["eta2"], ends["eta0"], strict=True)])
    report["eta2_as_good_as_eta0"] = report["eta2_difference"]["low"] >= -LARGEST_LOSS * abs(report["eta0"]["mean"])
    report["eta0_at_a_third"] = interval([cell["return_at_a_third"] for cell in cells["eta0"]])
    report["uncorrected_is_worse"] = report["uncorrected"]["high"] < report["eta0_at_a_third"]["low"]
    return report


def meta_world(cells: dict[str, list[Cell]]) -> Cell:
    """The success rates of the seeds."""
    rates = [cell["success"] for cell in cells["eta2"]]
    return {"success": rates, "reached": min(rates) >= REACHED, "seconds": [cell["seconds"] for cell in cells["eta2"]]}


Part = tuple[str, Callable[[argparse.Namespace, str, str, int], Cell], Callable[[dict[str, list[Cell]]], Cell]]
PARTS: dict[str, Part] = {
    "HalfCheetah-v5": ("HalfCheetah-v5", locomotion_cell, locomotion),
    "Hopper-v5": ("Hopper-v5", locomotion_cell, locomotion),
    "reach": ("MetaWorld/Reach-v3", meta_world_cell, meta_world),
    "pick_place": ("MetaWorld/Pick-Place-v3", meta_world_cell, meta_world),
}


def run_cells(arguments: argparse.Namespace, part: str) -> dict[str, list[Cell]]:
    """The cells of a part by method, in the order of seeds; one seed of all methods after the other."""
    environment, train_cell, summarise_cells = PARTS[part]
    is_locomotion = summarise_cells is locomotion
    methods = ["eta0", "eta2", "uncorrected", *(["sb3"] if arguments.peer else [])] if is_locomotion else ["eta2"]
    cells: dict[str, list[Cell]] = {method: [] for method in methods}
    for seed in range(arguments.seeds if is_locomotion else arguments.reach_seeds):
        for method in methods:
            file = arguments.keep / f"{part}-{method}-{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(train_cell(arguments, environment, method, seed)), encoding="utf-8")
            cell = json.loads(file.read_text(encoding="utf-8"))
            cells[method].append(cell)
            print(
                f"{part} {method} seed {seed}: { ({k: cell[k] for k in cell if k not in ('history', 'rates')}) }",
                flush=True,
            )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peer", type=Path, help="Python of an environment with stable-baselines3 and mujoco")
    parser.add_argument("--keep", type=Path, default=Path(__file__).parent / "results" / "embodied-learning")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--reach-seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300_000, help="Environment steps of a training.")
    parser.add_argument("--reach-steps", type=int, default=4_000_000, help="... in Meta-World, at most 20 minutes.")
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    print(json.dumps({part: PARTS[part][2](run_cells(arguments, part)) for part in arguments.parts}))


if __name__ == "__main__":
    main()
