"""What the record of rollouts costs: CPU of the orchestrator and of the trainer that it takes, as a share of theirs.

    python benchmarks/recording.py [--rounds 3] [--samples 4096] [--quick]

The orchestrator runs under the load of `orchestrator.py` (groups of 8, 32 prompt and 128 response tokens, a delta every
16 tokens), in turns with the record and without. `orchestrator` is the CPU time inside the recorder (its thread's
clock) over the CPU time of the process without it, both a sample; `paired` compares whole processes, and on a machine
with other work says more of that work than of the record. The trainer is the real one, over a random model of
`--width`, with the same samples: the CPU time inside its recorder over that of the steps.

Last line, one JSON object: `recording_cost` (the larger of `orchestrator` and `trainer`), `paired`, `recorder_us` and
`trainer_us` a sample, `bytes_per_sample` of the record on disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orchestrator
import torch
from parts.orchestrator_replay import PROMPT_TOKENS, RESPONSE_TOKENS

from headway.algorithms.samples import lay_out
from headway.models.configuration import DecoderConfig
from headway.models.loading import build, save_model
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.training import TrainBatch
from headway.runtime.devices import parse_device
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.rollouts.segments import stored_bytes
from headway.trainer.service import TrainerService
from headway.trainer.token_recorder import TokenRecorder

TARGET = 0.02


class Stopwatch:
    """Adds up the CPU time of this thread inside methods of a class; nested calls count once."""

    def __init__(self, kind: type, *names: str) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in names:
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return method(*arguments, **named)
            self._inside, started_s = True, time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - started_s
                self._inside = False

        return timed


def measure_orchestrator(rounds: int, samples: int) -> dict[str, Any]:
    """Rounds of a run with the record and one without."""
    watch = Stopwatch(RolloutRecorder, "finished", "unfinished", "ended", "flush")
    shares, pairs, inside = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orchestrator.prepare(folder)
        for number in range(rounds):
            marks: list[float] = []

            def at(begins: bool, marks: list[float] = marks) -> None:
                marks.append(watch.seconds)

            spent = {}
            for rollouts in ("all", "none") if number % 2 else ("none", "all"):
                marks.clear()
                mark = orchestrator.one_run(folder, f"{rollouts}-{number}", samples, at, rollouts)
                spent[rollouts] = mark.cpu_s / mark.samples
                if rollouts == "all":
                    inside.append((marks[1] - marks[0]) / mark.samples)
            shares.append(inside[-1] / spent["none"])
            pairs.append(spent["all"] / spent["none"] - 1)
            print(
                f"round {number + 1}: {1e6 * inside[-1]:.1f} us a sample in the recorder, {1e6 * spent['none']:.0f} us "
                f"without it: {shares[-1]:.4f}; pair {pairs[-1]:+.3f}",
                flush=True,
            )
    return {
        "orchestrator": round(statistics.median(shares), 4),
        "paired": round(statistics.median(pairs), 3),
        "recorder_us": round(1e6 * statistics.median(inside), 2),
    }


def batch_of(step: int) -> TrainBatch:
    """The benchmark's batch: 32 groups of 8."""
    chance = np.random.default_rng(step)
    samples = []
    for group in range(orchestrator.GROUPS_PER_STEP):
        prompt = TokenIds(chance.integers(0, 400, PROMPT_TOKENS))
        for member in range(orchestrator.GROUP):
            rollout = Rollout(
                group=group,
                member=member,
                prompt_ids=prompt,
                response_ids=TokenIds(chance.integers(0, 400, RESPONSE_TOKENS)),
                response_logprobs=TokenLogprobs.filled(-6.0, RESPONSE_TOKENS),
                response_mask=TokenMask.filled(True, RESPONSE_TOKENS),
                versions=(VersionSpan(version=step, tokens=RESPONSE_TOKENS),),
            )
            samples.append(Sample(rollout=rollout, advantage=float(chance.standard_normal())))
    return TrainBatch(step=step, samples=tuple(samples))


def measure_trainer(steps: int, width: int) -> dict[str, Any]:
    """Steps of a real trainer that records."""
    watch = Stopwatch(TokenRecorder, "record")
    torch.set_num_threads(1)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 400, "hidden_size": width,
        "intermediate_size": 3 * width, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": width // 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(DecoderConfig.from_mapping(config))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        save_model(model, folder / "model")
        raw = orchestrator.experiment(folder, "run").model_dump(mode="json")
        (folder / "run").mkdir()

        class Context:
            device, log = parse_device("cpu:1"), logging.getLogger("benchmark")

        service = TrainerService(Context, experiment=raw, run_id="recording")
        service.train_step(lay_out(batch_of(0)))
        assert service.version == 1, "the step was skipped"
        before_s, started_s = watch.seconds, time.process_time()
        for step in range(1, steps + 1):
            service.train_step(lay_out(batch_of(step)))
        inside_s, whole_s = watch.seconds - before_s, time.process_time() - started_s
        service.close()
        size = stored_bytes(folder / "run" / "rollouts")
    samples = steps * orchestrator.BATCH
    print(f"trainer: {1e6 * inside_s / samples:.1f} us a sample in its recorder of {1e6 * whole_s / samples:.0f}")
    return {
        "trainer": round(inside_s / (whole_s - inside_s), 4),
        "trainer_us": round(1e6 * inside_s / samples, 2),
        "trainer_bytes_per_sample": round(size / (samples + orchestrator.BATCH)),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4096, help="trained samples of a round")
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    parser.add_argument("--width", type=int, default=64, help="of the trainer's model")
    parser.add_argument("--quick", action="store_true", help="one short round: does it work?")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rounds, chosen.samples, chosen.steps = 1, 512, 1
    found = measure_trainer(chosen.steps, chosen.width)
    found |= measure_orchestrator(chosen.rounds, chosen.samples)
    found = {"recording_cost": max(found["orchestrator"], found["trainer"]), **found}
    print(f"recording_cost: {found['recording_cost']} (target: at most {TARGET:g})")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
