"""The same training step by both implementations of a model, family by family, and where their times part."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headway.algorithms.samples import lay_out
from headway.models.configuration import DecoderConfig, ExpertMixture, SlidingWindow
from headway.models.families import BY_NAME
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, save_model
from headway.records.training import TrainBatch
from headway.trainer.service import TrainerService

NAMES = ("headway", "transformers")


def configuration(family: str, quick: bool) -> DecoderConfig:
    """About 2.4 M weights, those of experts not counted; tiny if ``quick``."""
    row, width = BY_NAME[family], 32 if quick else 256
    keys: dict[str, Any] = {}
    layers = 2 if quick else 4
    if isinstance(row.windowed, int):
        covered = tuple(index for index in range(layers) if (index + 1) % row.windowed)
        keys["window"] = SlidingWindow(tokens=64, layers=covered)
    if row.local_rope:
        keys["local_rope_theta"] = 10_000.0
    if row.experts is not None:
        keys["mixture"] = ExpertMixture(experts=8, per_token=2, intermediate=width)
    return DecoderConfig(
        architecture=row.architecture,
        vocabulary_size=512,
        width=width,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=width // 4,
        intermediate=2 * width,
        max_positions=2048,
        qk_norm=row.qk_norm,
        attention_bias=bool(row.attention_bias),
        query_scale=float(width // 4) if row.query_scale else None,
        attention_softcap=50.0 if row.attention_softcap else None,
        final_softcap=30.0 if row.attention_softcap else None,
        **keys,
    )


def implementations(
    trainer: Callable[..., TrainerService],
    given: Callable[[int], TrainBatch],
    seconds: Callable[[Callable[[], object]], float],
    rounds: int,
    quick: bool,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """For every family: step speed of transformers over that of our own decoder, paired rounds, and the seconds of
    forward, backward and the rest of a step. ``trainer``: makes that of a model folder; ``given``: makes a batch."""
    for family in BY_NAME:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            model = build(configuration(family, quick))
            initialise_parameters(model, 0)
            save_model(model, folder)
            both = {kind: trainer(folder, model={"path": str(folder), "implementation": kind}) for kind in NAMES}
            times: dict[str, list[list[float]]] = {kind: [] for kind in NAMES}
            for number in range(rounds + 1):
                for kind in NAMES if number % 2 else reversed(NAMES):
                    times[kind].append(_parts(both[kind], given(number), seconds))
        steps = {kind: [parts[0] for parts in rows[1:]] for kind, rows in times.items()}
        ratios = [ours / theirs for ours, theirs in zip(steps["headway"], steps["transformers"], strict=True)]
        medians = {
            kind: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for kind, rows in times.items()
        }
        yield (
            family,
            {
                "speed": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
                "seconds": {
                    kind: dict(zip(("step", "forward", "backward", "rest"), row, strict=True))
                    for kind, row in medians.items()
                },
            },
        )


def _parts(one: TrainerService, batch: TrainBatch, seconds: Callable[[Callable[[], object]], float]) -> list[float]:
    """Seconds of a step; of them in its forward passes, its backward ones and elsewhere."""
    spent = {"logprobs": 0.0, "backward": 0.0}
    learner = one.learner
    for name in spent:
        method = getattr(learner, name)

        def timed(*args: Any, _name: str = name, _method: Callable[..., Any] = method, **keys: Any) -> Any:
            kept: list[Any] = []
            spent[_name] += seconds(lambda: kept.append(_method(*args, **keys)))
            return kept[0]

        setattr(learner, name, timed)
    try:
        whole = seconds(lambda: one.train_step(lay_out(batch)))
    finally:
        for name in spent:
            delattr(learner, name)
    return [whole, *spent.values(), whole - sum(spent.values())]
