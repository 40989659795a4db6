"""Policies in simulators: rates beside stable-baselines3's, and what blocks, placement and driver cost.

    python benchmarks/embodied.py --peer /path/of/an/environment/with/stable_baselines3/bin/python
    python benchmarks/embodied.py --parts simulation auto driver double      # without a peer, some minutes
    python benchmarks/embodied.py --keep embodied.json                       # resumes what is in the file

HalfCheetah-v5 with 16 lanes, fragments of 128 steps, minibatches of 256, 10 passes, 64 x 64 units, cores 0, 1. Parts:

- `peer`: `steps_over_sb3` (eta = 2, V-trace) and `steps_over_sb3_synchronous` (eta = 0): environment steps/s, learning
  included, over stable-baselines3's PPO of the same sizes, at the best of {Dummy, Subproc} x {1, 2} threads of each
  round. Interleaved rounds; medians.
- `learn`: `time_to_500`: seconds of the peer to a mean return of 500 of the last 100 episodes over ours (eta = 2),
  medians over seeds.
- `simulation`: `simulation_over_bare`: steps/s of a block with random actions over those of its bare simulator.
- `double`: `double_buffering`: rounds/s of two workers that exchange messages for two halves of the lanes in turn, over
  those for all lanes at once. Both burn the CPU for equal times.
- `auto`: `auto_over_best`: steps/s of `--plan auto` over the best placement's, budget 0; `planned_over_best`: those of
  the placement that the search of `headway plan` chooses by the times of the first run.
- `tokens` (also `--tokens`): `lanes_over_one`: actions/s of a token policy with 16 lanes in one batch of an engine over
  those with one lane.
- `driver`: `driver_us_per_step`: CPU of the run's process for an environment step, in microseconds.

Prints what each part measured, and as the last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disabled")

import numpy as np
from parts.resumed import run_parts
from parts.token_lanes import rates

from headway.config.load import validate
from headway.config.simulation import SimulatorExperiment
from headway.control.placement.search import place
from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.driver import train
from headway.embodied.simulators.opening import open_simulator
from headway.flow.auto import execution_of
from headway.flow.run import Flow, run
from headway.flow.worker import Worker
from headway.records.ledger import StepRecord
from headway.records.plan import DevicePool, PoolDevices, TimePoint, Workflow, WorkflowEdge, WorkflowStage
from headway.runtime.stalls.watchdog import Watchdog
from headway.telemetry.ledger import read_ledger

Report = dict[str, Any]
WARM_STEPS = 3
OVERLAPPING: dict[str, Any] = {"queue": {"budget": 2}, "algorithm": {"correction": "vtrace"}}
PLACEMENTS = {
    "temporal": (["cpu:0"], ["cpu:0"]),
    "hybrid on the first core": (["cpu:0", "cpu:1"], ["cpu:0"]),
    "hybrid": (["cpu:0", "cpu:1"], ["cpu:1"]),
    "spatial": (["cpu:0"], ["cpu:1"]),
}
PEER = """
import json, sys, time
import gymnasium, numpy as np, torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
if __name__ == "__main__":
    vector, (threads, steps, seed), target = sys.argv[1], map(int, sys.argv[2:5]), float(sys.argv[5])
    torch.set_num_threads(threads)
    kind = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[vector]
    lanes = VecNormalize(make_vec_env("HalfCheetah-v5", 16, seed=seed, vec_env_cls=kind))
    model = PPO("MlpPolicy", lanes, n_steps=128, batch_size=256, n_epochs=10, seed=seed, device="cpu")
    began, reached = time.perf_counter(), None
    def watch(local, _):
        global reached
        returns = [episode["r"] for episode in model.ep_info_buffer or ()]
        if reached is None and len(returns) >= 16 and np.mean(returns) >= target:
            reached = time.perf_counter() - began
        return reached is None or target > 1e8
    model.learn(steps, callback=watch)
    print(json.dumps({"steps_per_s": model.num_timesteps / (time.perf_counter() - began), "reached_s": reached}))
"""


def experiment(directory: str, **sections: dict[str, Any]) -> SimulatorExperiment:
    raw: dict[str, Any] = {
        "run": {"directory": directory, "steps": 1},
        "simulator": {"environment": "HalfCheetah-v5", "lanes": 16, "block_lanes": 8, "steps_per_fragment": 128},
        "trainer": {"minibatch": 256, "passes": 10},
    }
    merged = {name: raw.get(name, {}) | sections.get(name, {}) for name in {**raw, **sections}}
    return validate(merged, "benchmark", SimulatorExperiment)


def steps_of_run(arguments: argparse.Namespace, **sections: dict[str, Any]) -> list[StepRecord]:
    """Train, and return the steps without those that start the run."""
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/run"
        train(experiment(directory, run={"steps": arguments.steps}, **sections))
        return [line for line in read_ledger(directory) if isinstance(line, StepRecord)][WARM_STEPS:]


def rate(steps: list[StepRecord]) -> float:
    """Environment steps/s."""
    return sum(step.episodes.transitions for step in steps if step.episodes) / sum(step.step_s for step in steps)


def peer_run(arguments: argparse.Namespace, vector: str, threads: int, steps: int, seed: int, target: float) -> Report:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = [vector, str(threads), str(steps), str(seed), str(target)]
    command = [str(arguments.peer), "-c", PEER, *options]
    if vector == "subproc":  # its processes import the script
        script = Path(tempfile.gettempdir()) / "headway_benchmark_peer.py"
        script.write_text(PEER, encoding="utf-8")
        command = [str(arguments.peer), str(script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def against_peer(arguments: argparse.Namespace) -> Report:
    ratios: dict[str, list[float]] = {"steps_over_sb3": [], "steps_over_sb3_synchronous": []}
    for number in range(arguments.rounds):
        peer_rates = {
            f"{vector}, {threads}": peer_run(arguments, vector, threads, arguments.steps * 2048, number, 1e9)[
                "steps_per_s"
            ]
            for vector in ("dummy", "subproc")
            for threads in (1, 2)
        }
        best = max(peer_rates.values())
        ours = {
            "steps_over_sb3": rate(steps_of_run(arguments, **OVERLAPPING)),
            "steps_over_sb3_synchronous": max(
                rate(steps_of_run(arguments, simulator={"devices": simulators}, trainer={"devices": learner}))
                for simulators, learner in PLACEMENTS.values()
            ),
        }
        for name, steps_per_s in ours.items():
            ratios[name].append(steps_per_s / best)
        print(f"round {number}: ours {ours}, peer {peer_rates}", flush=True)
    return {name: statistics.median(values) for name, values in ratios.items()} | {"ratios": ratios}


def learning(arguments: argparse.Namespace) -> Report:
    ours, theirs = list[float](), list[float]()
    for seed in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            train(experiment(f"{folder}/run", run={"steps": 150, "seed": seed}, **OVERLAPPING))
            steps = [line for line in read_ledger(f"{folder}/run") if isinstance(line, StepRecord)]
        reached = [
            step.time_s - steps[0].time_s
            for step in steps
            if step.episodes and step.episodes.return_mean >= arguments.target
        ]
        ours.append(min(reached, default=float("inf")))
        peer_seconds = peer_run(arguments, "dummy", 1, 600_000, seed, arguments.target)["reached_s"]
        theirs.append(float("inf") if peer_seconds is None else peer_seconds)
        print(f"seed {seed}: ours {ours[-1]:.1f} s, peer {theirs[-1]:.1f} s", flush=True)
    return {"time_to_500": statistics.median(theirs) / statistics.median(ours), "ours_s": ours, "peer_s": theirs}


class RandomActions:
    """A policy whose actions are its noise."""

    def act(self, observations_b: Any, noise_b: Any) -> tuple[Any, Any, Any]:
        zeros_b = np.zeros(len(noise_b), np.float32)
        return noise_b, zeros_b, zeros_b

    def take_tokens(self) -> None: ...


def simulation(arguments: argparse.Namespace) -> Report:
    settings = experiment("unused").simulator
    block_simulator, bare = (open_simulator(settings, 8, partial(seed_of, 0, number, 0)) for number in (0, 1))
    spaces = bare.spaces
    block = LaneBlock(block_simulator, RandomActions(), spaces, seed=0, number=0, steps=128, watchdog=Watchdog(60.0))
    actions_tb = np.random.default_rng(0).uniform(-1, 1, (128, 8, *spaces.actions.low.shape)).astype(np.float32)  # pyright: ignore
    bare.reset()
    block.collect(0)
    ratios: list[float] = []
    for _ in range(4 * arguments.rounds):
        began_s = time.process_time()
        block.collect(0)
        middle_s = time.process_time()
        for actions_b in actions_tb:
            bare.step(actions_b)
        ratios.append((time.process_time() - middle_s) / (middle_s - began_s))
    return {"simulation_over_bare": statistics.median(ratios)}


class Half(Worker):
    """Burns the CPU for each half of the lanes, in answer to a message."""

    def burn(self, seconds: float) -> None:
        end_s = time.process_time() + seconds
        while time.process_time() < end_s:
            pass

    async def lead(self, rounds: int, halves: int, seconds: float, other: str) -> float:
        pictures = np.zeros((64 // halves, 64, 64, 3), np.uint8)
        began_s = time.perf_counter()
        for half in range(halves):
            self.burn(seconds / halves)
            await self.send(pictures, other, str(half))
        for _ in range(rounds - 1):
            for half in range(halves):
                await self.recv(other, str(half))
                self.burn(seconds / halves)
                await self.send(pictures, other, str(half))
        for half in range(halves):
            await self.recv(other, str(half))
        return (time.perf_counter() - began_s) / rounds

    async def follow(self, rounds: int, halves: int, seconds: float, other: str) -> None:
        for _ in range(rounds):
            for half in range(halves):
                await self.recv(other, str(half))
                self.burn(seconds / halves)
                await self.send(half, other, str(half))


async def exchange(flow: Flow, rounds: int, seconds: float) -> list[float]:
    lead, follow = await flow.workers("simulate", Half), await flow.workers("policy", Half)
    measured: list[float] = []
    for halves in (1, 2, 1, 2, 1, 2):
        following = follow.on(0).follow(rounds, halves, seconds, "simulate-0")
        measured.append(await lead.on(0).lead(rounds, halves, seconds, "policy-0"))
        await following
    return measured


def double(arguments: argparse.Namespace) -> Report:
    measured = run(exchange, {"simulate": "cpu:0", "policy": "cpu:1"}, 50, 0.02)
    single_s, double_s = statistics.median(measured[::2]), statistics.median(measured[1::2])
    return {"double_buffering": single_s / double_s, "single_s": single_s, "double_s": double_s}


def planned_placement(steps: list[StepRecord]) -> str:
    """The placement of those measured that the search of `headway plan` chooses by the times of ``steps``."""
    blocks, devices = steps[0].groups, ["cpu:0", "cpu:1"]
    block_s = statistics.median(step.episodes.simulate_s for step in steps if step.episodes) / blocks
    learn_s = statistics.median(step.trainer_compute_s for step in steps)
    simulate = [
        TimePoint(device="core", devices=count, items=blocks, seconds=block_s * -(-blocks // count)) for count in (1, 2)
    ]
    learn = [TimePoint(device="core", devices=1, items=blocks, seconds=learn_s)]
    workflow = Workflow(
        items=blocks,
        granularities=(blocks,),
        stages=(WorkflowStage(name="simulate", times=tuple(simulate)), WorkflowStage(name="learn", times=tuple(learn))),
        edges=(WorkflowEdge(source="simulate", to="learn"),),
    )
    pool = DevicePool(classes=(PoolDevices(device="core", devices=2, memory_bytes=0.0),))
    plan = execution_of(place(workflow, pool), ["simulate", "learn"], blocks, devices)
    placed = [{*plan.stages[name].devices} for name in ("simulate", "learn")]
    return next(name for name, pair in PLACEMENTS.items() if [{*pair[0]}, {*pair[1]}] == placed)


def automatic(arguments: argparse.Namespace) -> Report:
    rates: dict[str, list[float]] = {name: [] for name in (*PLACEMENTS, "auto")}
    planned = ""
    for _ in range(arguments.rounds):
        for name, (simulators, learner) in PLACEMENTS.items():
            steps = steps_of_run(arguments, simulator={"devices": simulators}, trainer={"devices": learner})
            rates[name].append(rate(steps))
            planned = planned or planned_placement(steps)  # by the first one alone
        auto = {"control": {"mode": "act", "devices": "move"}}
        rates["auto"].append(
            rate(steps_of_run(arguments, **auto)[WARM_STEPS:])
        )  # three further steps measured the stages
        print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(medians[name] for name in PLACEMENTS)
    ratios = {"auto_over_best": medians["auto"] / best, "planned_over_best": medians[planned] / best}
    return {**ratios, "planned": planned, "steps_per_s": medians}


def driver(arguments: argparse.Namespace) -> Report:
    steps = steps_of_run(arguments, **OVERLAPPING)
    transitions = sum(step.episodes.transitions for step in steps if step.episodes)
    return {"driver_us_per_step": 1e6 * sum(step.orchestrator_cpu_s for step in steps) / transitions}


def tokens(arguments: argparse.Namespace) -> Report:
    return dict(rates(arguments.rounds))


PARTS = {
    "peer": against_peer,
    "learn": learning,
    "simulation": simulation,
    "double": double,
    "auto": automatic,
    "driver": driver,
    "tokens": tokens,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peer", type=Path, help="Python of an environment with stable-baselines3 and mujoco")
    parser.add_argument("--tokens", action="store_const", const=["tokens"], dest="parts", help="The part tokens alone.")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="Interleaved rounds of each part, seeds of `learn`.")
    parser.add_argument("--steps", type=int, default=30, help="Training steps of a run whose rate is measured.")
    parser.add_argument("--target", type=float, default=500.0, help="The return of `learn`.")
    arguments = parser.parse_args()
    if arguments.peer is None and {"peer", "learn"} & {*arguments.parts}:
        parser.error("--peer: the parts peer and learn need it")
    reports = run_parts(PARTS, arguments)
    print(json.dumps({name: value for report in reports.values() for name, value in report.items()}))


if __name__ == "__main__":
    main()
