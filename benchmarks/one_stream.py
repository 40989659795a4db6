"""Whether runs of one stream compute what they computed at another commit: digests for every preset.

    python benchmarks/one_stream.py            # at this commit
    PYTHONPATH=OTHER python benchmarks/one_stream.py   # the package of another checkout

For each preset without a critic: 20 steps on recorded batches of 6 groups of 4 (uneven lengths, masked tokens, several
versions, a branched and a truncated rollout, a padded group), then a digest of the weights, of the steps' losses and of
the advantages; and the bytes a token of the batches as they are sent to a rank, with those without a preset. One
thread, float32. The last line is one JSON object; equal lines mean equal bits.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from tiny_trainer import VOCABULARY, Context, make_experiment, make_model

from headway.algorithms.groups.batches import build_batch
from headway.algorithms.samples import lay_out
from headway.config.load import validate_experiment
from headway.config.presets import PRESETS
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import TokenIds
from headway.trainer.service import TrainerService

STEPS, GROUPS, MEMBERS, LONGEST = 20, 6, 4, 40
SETTINGS = {"trainer": {"optimizer_steps_per_batch": 2, "micro_batch_tokens": 160}}


def main() -> int:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headway-one-stream-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        for preset in ("", *(name for name, keys in PRESETS.items() if keys["algorithm"]["advantage"] != "gae")):
            figures[preset or "default"] = digests(folder, model, preset)
            print(preset or "default", figures[preset or "default"], file=sys.stderr)
    print(json.dumps(figures))
    return 0


def digests(folder: Path, model: str, preset: str) -> dict[str, Any]:
    algorithm = {"preset": preset} if preset else {}
    raw = make_experiment(model, folder / f"run-{preset}", algorithm=algorithm, **SETTINGS)
    experiment = validate_experiment(raw | {"rollout": {"max_response_tokens": LONGEST}}, "one_stream")
    trainer = TrainerService(Context(), experiment=experiment.model_dump(mode="json"), run_id="one-stream")
    losses, advantages, sent_bytes, tokens = list[float](), list[float](), 0, 0
    for step in range(STEPS):
        batch = build_batch(step, [recorded_group(step, index) for index in range(GROUPS)], experiment)
        advantages += [sample.advantage for sample in batch.samples]
        flat = lay_out(batch)
        sent_bytes += array_bytes(flat)
        tokens += flat.tokens
        losses.append(trainer.train_step(flat).metrics["loss"])
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in trainer.learner.weights().values())
    return {
        "weights": digest(weights),
        "losses": digest(np.array(losses).tobytes()),
        "advantages": digest(np.array(advantages).tobytes()),
        "bytes_per_token": round(sent_bytes / tokens, 6),
    }


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def array_bytes(flat: Any) -> int:
    """The bytes of a batch's arrays, without the names of its fields."""
    values = [value for value in vars(flat).values() if value is not None]
    return len(pickle.dumps(values, protocol=5))


def recorded_group(step: int, index: int) -> FinishedGroup:
    random = np.random.default_rng([step, index])
    number = step * GROUPS + index
    prompt = tuple(random.integers(0, VOCABULARY, int(random.integers(1, 9))).tolist())
    group = Group(
        index=number,
        task=Task(task_id=str(number), prompt=""),
        prompt_ids=TokenIds(prompt),
        size=MEMBERS,
        admitted_version=step,
        admitted_s=0.0,
    )
    members = tuple(recorded_rollout(random, group, member, step) for member in range(MEMBERS))
    return FinishedGroup(group=group, rollouts=members)


def recorded_rollout(random: np.random.Generator, group: Group, member: int, step: int) -> Rollout:
    length = int(random.integers(2, LONGEST + 1))
    parts = sequence(random, length, step)
    branches = ()
    if group.index % 3 == 0 and member == 1:
        prompt = (*group.prompt_ids, *parts["response_ids"][: length // 2])
        branches = (Branch(prompt_ids=prompt, **sequence(random, 7, step)),)
    return Rollout(
        group=group.index,
        member=member,
        prompt_ids=group.prompt_ids,
        reward=round(float(random.random()), 2),
        finish_reason="length" if length == LONGEST or member == 3 else "stop",
        copies=2 if group.index % 4 == 0 and member == 2 else 1,
        branches=branches,
        **parts,
    )


def sequence(random: np.random.Generator, length: int, step: int) -> dict[str, Any]:
    older = length // 2
    spans = (VersionSpan(version=max(0, step - 1), tokens=older), VersionSpan(version=step, tokens=length - older))
    return {
        "response_ids": tuple(random.integers(0, VOCABULARY, length).tolist()),
        "response_logprobs": tuple((-3.4 + 0.3 * random.standard_normal(length)).tolist()),
        "response_mask": (True, *(random.random(length - 1) < 0.85).tolist()),
        "versions": tuple(span for span in spans if span.tokens),
    }


if __name__ == "__main__":
    raise SystemExit(main())
