"""Writes demonstrations of reaching as a folder of LeRobot's format: of each episode, observations and actions.

The expert moves its hand towards the goal, with noise, and in some decisions anywhere: that goals are worth reaching is
for reinforcement learning to find out.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

EPISODES, LANES, STEPS, REPEAT = 192, 64, 56, 8
METRES_PER_STEP = 0.0115  # of an action of 1
NOISE, ANYWHERE = 0.5, 0.4  # deviation of an action, and share of decisions that are uniform


def demonstrate(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Observations [t, lanes, 39] and actions [t, lanes, 4] of one episode of every lane, and their success rate."""
    import envpool  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options: dict[str, Any] = {"partially_observable": False, "max_episode_steps": STEPS, "num_threads": 1}
        seeds = [seed + lane for lane in range(LANES)]
        simulator = envpool.make("MetaWorld/Reach-v3", env_type="gymnasium", num_envs=LANES, seed=seeds, **options)
    rng = np.random.default_rng(seed)
    observation, _ = simulator.reset()
    observations, actions, succeeded = [], [], np.zeros(LANES, bool)
    for step in range(STEPS):
        if step % REPEAT == 0:
            way = (observation[:, 36:39] - observation[:, :3]) / (REPEAT * METRES_PER_STEP)
            action = np.concatenate([way, np.zeros((LANES, 1))], 1) + NOISE * rng.standard_normal((LANES, 4))
            is_lost = rng.random(LANES) < ANYWHERE
            action[is_lost] = rng.uniform(-1, 1, (int(is_lost.sum()), 4))
            action = action.clip(-1, 1).astype(np.float32)
        observations.append(observation)
        actions.append(action)
        observation, _, _, _, infos = simulator.step(action)
        succeeded |= infos["success"].astype(bool)
    simulator.close()
    return np.stack(observations), np.stack(actions), float(succeeded.mean())


def write(folder: Path) -> None:
    """Write `EPISODES` episodes."""
    (folder / "data" / "chunk-000").mkdir(parents=True, exist_ok=True)
    (folder / "meta").mkdir(exist_ok=True)
    rates = []
    for part in range(EPISODES // LANES):
        observations, actions, rate = demonstrate(1_000_000 + part * LANES)
        rates.append(rate)
        columns = {
            "observation.state": list(observations.swapaxes(0, 1).reshape(LANES * STEPS, -1)),
            "action": list(actions.swapaxes(0, 1).reshape(LANES * STEPS, -1)),
            "episode_index": np.repeat(np.arange(part * LANES, (part + 1) * LANES), STEPS),
            "frame_index": np.tile(np.arange(STEPS), LANES),
        }
        parquet.write_table(pa.table(columns), folder / "data" / "chunk-000" / f"file-{part:03d}.parquet")
    info = {"codebase_version": "v3.0", "fps": 80, "total_episodes": EPISODES, "total_frames": EPISODES * STEPS}
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    print(f"{EPISODES} episodes, of which {np.mean(rates):.3f} succeed")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
