"""How fast is a training step, beside a plain loop and with prompts shared by their group?

    python benchmarks/trainer.py [--quick]

1. Against a plain loop. The same Qwen3-style weights in transformers: forward of [B, 128] token ids through SDPA,
   cross-entropy, backward, fused AdamW; nothing is padded and nothing is packed. Headway's side is its whole
   `train_step` over B samples that feed 128 tokens each: layout, decoupled PPO, entropy, gradient norm, AdamW, metrics.
   Both sides in the same process, threads and allocator settings, in turn; the loop's bfloat16 is autocast.
   `mfu`: model FLOP (forward and backward, causal) per second over that of a square matrix product.
   `mfu_over_plain`: median over rounds of the two steps' times; at least 1.
2. Shared prompts. The same batch with trainer.shared_prefix off and on, groups of 8; `speedup` is the median over
   rounds, its limit the ratio of FLOP computed; `of_bound`, their quotient, at least 0.7. The gradients are equal:
   `gradient_difference` is the largest difference over the largest gradient, in float32.
3. Trees. The same of an agent's rollouts, whose branches share the turns before them: a trunk of 8 turns, and after
   each but the last a branch of one more. `tree_over_apart` is the speed-up, `tree_bound` the ratio of FLOP computed,
   `tree_speedup` the smallest quotient of the two, at least 0.7.
4. Every family by both implementations, float32, the same batch (16 documents of 32 to 256 tokens) without shared
   prompts. `transformers_over_headway`: median over rounds of the speeds' ratio; the seconds of forward, backward and
   the rest of a step (losses, gradient norm, AdamW) say where they part.

Runs once on one core and once on two (as many as there are); bfloat16 only where the processor computes it faster than
float32 (without bfloat16 instructions it takes hundreds of times as long). Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.trainer_implementations import implementations
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from headway.algorithms.samples import build_arrays, lay_out
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, save_model
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, Rollout, Sample
from headway.records.training import TrainBatch
from headway.runtime.devices import machine_cores, parse_device
from headway.trainer.peak_flops import measure_peak_flops
from headway.trainer.service import TrainerService

TOKENS = 128  # fed of each sequence of the plain comparison
GROUP = 8


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    sequences: int  # of one step
    rounds: int


MODELS = {
    "2.4M": Model(width=256, layers=4, heads=4, kv_heads=2, intermediate=512, vocabulary=512, sequences=32, rounds=5),
    "48M": Model(width=768, layers=7, heads=12, kv_heads=4, intermediate=2048, vocabulary=4096, sequences=8, rounds=3),
}
QUICK = {"tiny": Model(width=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocabulary=64, sequences=2, rounds=2)}
PROMPTS = {"128:128": (128, 128), "512:128": (512, 128)}  # prompt and completion tokens
QUICK_PROMPTS = {"16:16": (16, 16)}
AGENT = {"prompt": 128, "turns": 8, "answer": 48, "reply": 32}  # tokens, turns of the trunk, tokens of a turn's parts
QUICK_AGENT = {"prompt": 16, "turns": 3, "answer": 8, "reply": 8}
AGENT_BUDGET = 4096  # tokens of a micro-batch


class Context:
    """What a worker object sees of its process."""

    log = getLogger("benchmark")

    class device:
        threads = None

        @staticmethod
        def torch_device() -> str:
            return "cpu"


def write_model(size: Model, folder: Path) -> DecoderConfig:
    config = DecoderConfig(
        vocabulary_size=size.vocabulary,
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=64,
        intermediate=size.intermediate,
        max_positions=2048,
    )
    model = build(config)
    initialise_parameters(model, 0)
    save_model(model, folder)
    return config


def trainer(
    folder: Path,
    dtype: str,
    micro_batch_tokens: int,
    shared_prefix: bool = True,
    model: dict[str, Any] | None = None,
    **more: Any,
) -> TrainerService:
    keys = {"dtype": dtype, "learning_rate": 1e-4, "micro_batch_tokens": micro_batch_tokens}
    experiment = {
        "run": {"directory": str(folder / "run")},
        "model": model or {"path": str(folder)},
        "tasks": {"train": {"path": "unused.jsonl"}},
        "trainer": {**keys, "shared_prefix": shared_prefix, **more},
    }
    return TrainerService(Context, experiment=experiment, run_id=f"benchmark-{os.getpid()}")


def batch(
    step: int, groups: int, members: int, prompt: int, responses: int | Sequence[int], vocabulary: int
) -> TrainBatch:
    """Random tokens; ``responses``: the length of all, or of each sample."""
    random = np.random.default_rng(step)
    samples: list[Sample] = []
    for group in range(groups):
        prompt_ids = tuple(random.integers(0, vocabulary, prompt).tolist())
        for member in range(members):
            response = responses if isinstance(responses, int) else responses[group * members + member]
            rollout = Rollout(
                group=group,
                member=member,
                prompt_ids=prompt_ids,
                response_ids=tuple(random.integers(0, vocabulary, response).tolist()),
                response_logprobs=tuple((-6.0 + 0.1 * random.standard_normal(response)).tolist()),
                response_mask=(True,) * response,
                versions=(VersionSpan(version=0, tokens=response),),
            )
            samples.append(Sample(rollout=rollout, advantage=float(random.standard_normal())))
    return TrainBatch(step=step, samples=tuple(samples))


def agent(step: int, vocabulary: int, members: int, *, prompt: int, turns: int, answer: int, reply: int) -> TrainBatch:
    """A group of an agent's rollouts: after each answer but the last a branch leaves the trunk, in which the agent gets
    another reply and answers once more. Random tokens."""
    random = np.random.default_rng(step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocabulary, count).tolist())

    def sequence(kind: Callable[..., Any], prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Any:
        mask = (((True,) * answer + (False,) * reply) * turns)[: len(response_ids)]
        logprobs = tuple((-6.0 + 0.1 * random.standard_normal(len(mask))) * np.array(mask))
        versions = (VersionSpan(version=0, tokens=len(mask)),)
        return kind(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_logprobs=logprobs,
            response_mask=mask,
            versions=versions,
        )

    question, samples = tokens(prompt), list[Sample]()
    for member in range(members):
        trunk, branches = tokens(answer), list[Branch]()
        for _ in range(turns - 1):
            branches.append(sequence(Branch, question + trunk + tokens(reply), tokens(answer)))
            trunk += tokens(reply) + tokens(answer)
        rollout = sequence(
            functools.partial(Rollout, group=0, member=member, branches=tuple(branches)), question, trunk
        )
        samples.append(Sample(rollout=rollout, advantage=float(random.standard_normal())))
    return TrainBatch(step=step, samples=tuple(samples))


class PlainLoop:
    """What one would write by hand with transformers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
        self.model.config.use_cache = False
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        self.autocast = dtype == "bfloat16"

    def step(self, ids: torch.Tensor) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss.detach())


def dtypes() -> list[str]:
    """What is worth training in on this processor."""
    peaks = {name: measure_peak_flops("cpu", getattr(torch, name), size=256) for name in ("float32", "bfloat16")}
    print(
        f"{torch.get_num_threads()} thread(s), products of 256 x 256: float32 {peaks['float32'] / 1e9:.0f}, "
        f"bfloat16 {peaks['bfloat16'] / 1e9:.1f} GFLOP/s"
    )
    return ["float32", "bfloat16"] if peaks["bfloat16"] > peaks["float32"] else ["float32"]


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def against_plain(size: Model, dtype: str) -> dict[str, Any]:
    """Paired rounds of Headway's step and the plain loop's; the first, unmeasured round checks equal weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        config = write_model(size, folder)
        ours, plain = trainer(folder, dtype, size.sequences * TOKENS), PlainLoop(folder, dtype)
        step = 0

        def train() -> None:
            nonlocal step
            report = ours.train_step(lay_out(batch(step, size.sequences, 1, 1, TOKENS, size.vocabulary)))
            assert report.tokens == report.computed_tokens == size.sequences * TOKENS
            step += 1

        def loop() -> None:
            ids = np.random.default_rng(step).integers(0, size.vocabulary, (size.sequences, TOKENS + 1))
            plain.step(torch.from_numpy(ids))

        require_same_function(ours, plain, size)
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for number in range(size.rounds + 1):
            order = (("ours", train), ("plain", loop))
            for which, call in order if number % 2 else reversed(order):
                times[which].append(seconds(call))
        measured = {which: values[1:] for which, values in times.items()}
    flops = 3 * config.flops([TOKENS] * size.sequences)
    peak = measure_peak_flops("cpu", torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    ratios = [slow / fast for fast, slow in zip(measured["ours"], measured["plain"], strict=True)]
    best = {which: statistics.median(values) for which, values in measured.items()}
    return {
        "mfu": flops / best["ours"] / peak,
        "plain_mfu": flops / best["plain"] / peak,
        "tokens_per_s": size.sequences * TOKENS / best["ours"],
        "plain_tokens_per_s": size.sequences * TOKENS / best["plain"],
        "peak_gflops_per_s": peak / 1e9,
        "over_plain": spread(ratios),
    }


def require_same_function(ours: TrainerService, plain: PlainLoop, size: Model) -> None:
    """Both sides compute the same logits, or the comparison means nothing."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, size.vocabulary, 40))
    with torch.no_grad():
        difference = ours.learner.model(ids, [40]) - plain.model(input_ids=ids[None]).logits[0]
    limit = 1e-3 if ours.learner.dtype == torch.float32 else 0.2  # whose weights and stream are rounded
    assert float(difference.abs().max()) < limit, float(difference.abs().max())


def sharing(size: Model, dtype: str, make: Callable[[int], TrainBatch], budget: int, rounds: int) -> dict[str, Any]:
    """Paired rounds of one trainer that shares what samples begin with and one that doesn't, on batches by step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_model(size, folder)
        trainers = {on: trainer(folder, dtype, budget, on) for on in (False, True)}
        difference = gradient_difference(trainers, make(0))
        times: dict[bool, list[float]] = {False: [], True: []}
        flops: dict[bool, float] = {}
        for number in range(rounds + 1):
            given = make(number)
            for on in (False, True) if number % 2 else (True, False):
                started = time.perf_counter()
                flops[on] = trainers[on].train_step(lay_out(given)).flops
                times[on].append(time.perf_counter() - started)
    ratios = [slow / fast for fast, slow in zip(times[True][1:], times[False][1:], strict=True)]
    bound = flops[False] / flops[True]
    return {
        "speedup": spread(ratios),
        "bound": bound,
        "of_bound": statistics.median(ratios) / bound,
        "gradient_difference": difference,
    }


def gradient_difference(trainers: dict[bool, TrainerService], given: TrainBatch) -> float:
    gradients: list[torch.Tensor] = []
    for one in trainers.values():
        one.policy.accumulate_gradients(build_arrays(given))
        gradients.append(torch.cat([gradient.flatten() for gradient in one.learner.gradients()]))
        for parameter in one.learner.parameters:
            parameter.grad = None
    return float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())


def measure(threads: int, quick: bool) -> dict[str, Any]:
    """Everything at one number of threads, in this process."""
    torch.set_num_threads(threads)
    models, prompts = (QUICK, QUICK_PROMPTS) if quick else (MODELS, PROMPTS)
    chosen = dtypes()
    found: dict[str, Any] = {"plain": {}, "sharing": {}, "trees": {}, "implementations": {}}
    for name, size in models.items():
        for dtype in chosen:
            row = found["plain"][f"{name} {dtype} {threads}"] = against_plain(size, dtype)
            ratio = row["over_plain"]
            print(
                f"{name:5} {dtype:8} {threads} thread(s): {row['tokens_per_s']:8.0f} tokens/s, MFU {row['mfu']:.3f} of "
                f"{row['peak_gflops_per_s']:.0f} GFLOP/s; plain {row['plain_tokens_per_s']:8.0f}, "
                f"{row['plain_mfu']:.3f}; "
                f"ours / plain {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
                flush=True,
            )
    size = next(iter(models.values()))
    rounds = 2 if quick else 3
    for name, (prompt, response) in prompts.items():
        groups = 1 if quick else max(1, 4096 // (GROUP * (prompt + response)))
        shape = (groups, GROUP, prompt, response, size.vocabulary)
        budget = groups * GROUP * (prompt + response)  # all in one micro-batch, shared or not
        for dtype in chosen:
            row = sharing(size, dtype, lambda step, shape=shape: batch(step, *shape), budget, rounds)
            found["sharing"][f"{name} {dtype} {threads}"] = row
            show_sharing(f"prompt:completion {name} {dtype:8} {threads} thread(s), groups of {GROUP}", row)
    lengths, members = (QUICK_AGENT, 2) if quick else (AGENT, 6)
    for dtype in chosen:
        row = sharing(size, dtype, lambda step: agent(step, size.vocabulary, members, **lengths), AGENT_BUDGET, rounds)
        found["trees"][f"agent {dtype} {threads}"] = row
        show_sharing(f"agent's branches {dtype:8} {threads} thread(s), {members} rollouts, {lengths}", row)
    random = np.random.default_rng(0)
    documents = (random.integers(4, 9, 16) if quick else random.integers(32, 257, 16)).tolist()
    rows = implementations(
        lambda folder, **keys: trainer(folder, "float32", sum(documents) + 16, False, **keys),
        lambda number: batch(number, 16, 1, 1, documents, 512),
        seconds,
        2 if quick else 5,
        quick,
    )
    for family, row in rows:
        found["implementations"][f"{family} {threads}"] = row
        ratio, parts = row["speed"], row["seconds"]
        print(
            f"{family:9} {threads} thread(s): transformers {ratio['median']:.2f} times as fast as Headway's own "
            f"({ratio['min']:.2f} to {ratio['max']:.2f}); seconds of theirs / ours: "
            + ", ".join(
                f"{name} {parts['transformers'][name]:.3f} / {parts['headway'][name]:.3f}" for name in parts["headway"]
            ),
            flush=True,
        )
    return found


def show_sharing(what: str, row: dict[str, Any]) -> None:
    ratio = row["speedup"]
    print(
        f"{what}: shared {ratio['median']:.2f} times as fast ({ratio['min']:.2f} to {ratio['max']:.2f}), bound "
        f"{row['bound']:.2f}, share of it {row['of_bound']:.2f}; gradients differ by "
        f"{row['gradient_difference']:.1e} of the largest",
        flush=True,
    )


def in_a_process(threads: int) -> dict[str, Any]:
    """`measure` in a process pinned and configured as Headway pins and configures its trainer."""
    device = parse_device("cpu:0" if threads == 1 else f"cpu:0-{threads - 1}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--threads", str(threads), "--result", str(result)]
        subprocess.run(command, env=os.environ | device.environment(), check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model in this process: does it run?")
    parser.add_argument("--threads", type=int, help="measure in this process with so many threads")
    parser.add_argument("--result", type=Path, help="where that goes, as JSON")
    arguments = parser.parse_args()
    if arguments.result is not None:
        device = parse_device("cpu:0" if arguments.threads == 1 else f"cpu:0-{arguments.threads - 1}")
        device.apply()
        arguments.result.write_text(json.dumps(measure(arguments.threads, False)), encoding="utf-8")
        return
    if arguments.quick:
        found = [measure(1, True)]
    else:
        wanted = [arguments.threads] if arguments.threads else range(1, min(2, len(machine_cores())) + 1)
        found = [in_a_process(threads) for threads in wanted]
    plain = {name: row for part in found for name, row in part["plain"].items()}
    shared = {name: row for part in found for name, row in part["sharing"].items()}
    trees = {name: row for part in found for name, row in part["trees"].items()}
    exact = [row["gradient_difference"] for name, row in (shared | trees).items() if "float32" in name]
    result = {
        "mfu": {name: round(row["mfu"], 3) for name, row in plain.items()},
        "mfu_over_plain": {name: round(row["over_plain"]["median"], 3) for name, row in plain.items()},
        "mfu_over_plain_min": round(min(row["over_plain"]["median"] for row in plain.values()), 3),
        "shared_prefix_speedup": {name: round(row["speedup"]["median"], 3) for name, row in shared.items()},
        "shared_prefix_of_bound": {name: round(row["of_bound"], 3) for name, row in shared.items()},
        "shared_prefix_of_bound_min": round(min(row["of_bound"] for row in shared.values()), 3),
        "tree_over_apart": {name: round(row["speedup"]["median"], 3) for name, row in trees.items()},
        "tree_bound": {name: round(row["bound"], 3) for name, row in trees.items()},
        "tree_speedup": round(min(row["of_bound"] for row in trees.values()), 3),
        "gradient_difference_max": max(exact),
        "transformers_over_headway": {
            name: round(row["speed"]["median"], 3) for part in found for name, row in part["implementations"].items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
