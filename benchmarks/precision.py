"""How far are the trainer's log-probabilities in bfloat16 from those that the engine sampled with?

    python benchmarks/precision.py [--against REV] [--tokens 2000] [--quick]

Random Qwen3-style models, one of 43 M parameters and one with 16 experts (4 of a token), with a scaled head, so that
next tokens are not equally likely, and uneven norms. The torch engine samples `--tokens` tokens at T = 1 by decoding on
its cache; the trainer computes the same tokens as it does in training, packed. Printed is the absolute difference of
the two log-probabilities of a token, in nats: its mean and its largest value. A mixture's trainer routes each token
itself (`own routers`), and over the engine's experts (`replayed`).

`--against REV`: the same by the code of this revision, from `git archive`, on the same files.
Last line, one JSON object: of `after` (this checkout) and `before` (REV), by model and kind, `mean` and `largest`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch

from headway.algorithms.samples import build_arrays, slice_micro_batch
from headway.config.model import ModelConfig
from headway.config.schema import TrainerConfig
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.configuration import DecoderConfig, ExpertMixture
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, load_model, save_model
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.records.rollout import Rollout, Sample
from headway.records.token_block import TokenBlock
from headway.records.training import TrainBatch
from headway.trainer.learner import Learner
from headway.trainer.ranks import Ranks

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS, ROWS = 16, 16
HEAD_SCALE = 4.0
DENSE = DecoderConfig(
    vocabulary_size=16384,
    width=512,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1600,
    max_positions=512,
    tied=False,
)
MIXTURE = dataclasses.replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    width=256,
    layers=6,
    intermediate=512,
    mixture=ExpertMixture(experts=16, per_token=4, intermediate=512),
)
MODELS = {"dense": DENSE, "mixture": MIXTURE}
QUICK = {name: dataclasses.replace(c, vocabulary_size=256, width=64, layers=2) for name, c in MODELS.items()}


def write_models(folder: Path, configs: dict[str, DecoderConfig]) -> None:
    for name, config in configs.items():
        model = build(config)
        initialise_parameters(model, 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            assert model.head_weight is not None
            model.head_weight.mul_(HEAD_SCALE)
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        save_model(model, folder / name)
        print(f"{name}: {sum(one.numel() for one in model.parameters()) / 1e6:.1f} M parameters", flush=True)


def sampled(folder: Path, tokens: int) -> list[Rollout]:
    """Sample ``tokens`` tokens by the engine, in `ROWS` rows at once."""
    model = load_model(folder, "bfloat16")
    row_tokens = -(-tokens // ROWS)
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.config.vocabulary_size, (ROWS, PROMPT_TOKENS)).tolist()
    engine = TorchEngine(
        model,
        slots=ROWS,
        max_context_tokens=PROMPT_TOKENS + row_tokens,
        return_experts=model.config.mixture is not None,
    )
    engine.submit(
        [
            GenerationRequest(
                request_id=str(row),
                prompt_ids=tuple(prompt),
                sampling=SamplingParameters(temperature=1.0, max_tokens=row_tokens, seed=row),
            )
            for row, prompt in enumerate(prompts)
        ]
    )
    blocks = [TokenBlock() for _ in prompts]
    while engine.step():
        for delta in engine.take_deltas():
            if delta.data:
                blocks[int(delta.request_id)].append(delta.data, delta.version)
            blocks[int(delta.request_id)].append_rows(delta.token_rows)
    return [
        Rollout(
            group=row,
            member=0,
            prompt_ids=prompts[row],
            response_ids=block.ids,
            response_logprobs=block.logprobs,
            response_mask=block.mask,
            versions=block.versions,
            token_rows=block.token_rows,
        )
        for row, block in enumerate(blocks)
    ]


def differences(folder: Path, rollouts: list[Rollout], *, replayed: bool) -> dict[str, float]:
    """Compare the engine's log-probabilities with the trainer's, computed in one micro-batch with gradients."""
    settings = TrainerConfig(dtype="bfloat16")
    learner = Learner(ModelConfig(path=str(folder)), settings, torch.device("cpu"), Ranks(), replays=replayed)
    arrays = build_arrays(TrainBatch(step=0, samples=tuple(Sample(rollout=one, advantage=0.0) for one in rollouts)))
    batch = slice_micro_batch(arrays, np.arange(arrays.samples))
    logprobs_m = learner.logprobs(batch, arrays, 1.0).logprobs_m.detach().numpy()
    difference_m = np.abs(logprobs_m - arrays.behaviour_logprobs_n[batch.targets_m])
    return {"mean": round(float(difference_m.mean()), 5), "largest": round(float(difference_m.max()), 4)}


def measure(folder: Path, tokens: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)  # as a replica on one core, with the native kernels
    figures: dict[str, dict[str, float]] = {}
    for name in MODELS:
        rollouts = sampled(folder / name, tokens)
        kinds = {"mixture, own routers": False, "mixture, replayed": True} if name == "mixture" else {name: False}
        for kind, replayed in kinds.items():
            figures[kind] = differences(folder / name, rollouts, replayed=replayed)
    return figures


def measured_elsewhere(revision: str, folder: Path, tokens: int) -> dict[str, dict[str, float]]:
    """Run `measure` with the package as it was at ``revision``."""
    command = ["git", "-C", str(ROOT), "archive", revision, "headway"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as checkout:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(checkout, filter="data")
        script = [sys.executable, __file__, "--measure", str(folder), "--tokens", str(tokens)]
        environment = os.environ | {"PYTHONPATH": checkout}
        done = subprocess.run(script, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def print_figures(side: str, figures: dict[str, dict[str, float]]) -> None:
    for kind, figure in figures.items():
        print(f"{side:8s} {kind:22s} mean {figure['mean']:.5f}  largest {figure['largest']:.4f} nats", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="REV", help="revision of this repository to measure as well")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="small models, 160 tokens")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tokens = 160 if arguments.quick else arguments.tokens
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, tokens)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_models(folder, QUICK if arguments.quick else MODELS)
        figures = {"after": measure(folder, tokens)}
        print_figures("after", figures["after"])
        if arguments.against:
            figures["before"] = measured_elsewhere(arguments.against, folder, tokens)
            print_figures("before", figures["before"])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
