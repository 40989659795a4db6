"""Published findings on placement and memory, asked of the rate models and the exact search.

What the sources don't say (batch sizes, length distributions, how long a simulator's step takes) is assumed here, in
one place, before anything is compared; rows over a range of assumptions show how much hangs on them. Efficiencies are
those of `headway/control/rates/specs.py`, the same for every row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from headway.control.placement.options import SearchSettings
from headway.control.placement.search import place
from headway.control.rates.generation import GenerationRecipe, ReplicaRates
from headway.control.rates.specs import DeviceFigures, ModelFigures, Parallelism, RatedDevice
from headway.control.rates.training import Simulator, TrainerRates, TrainingRecipe
from headway.models.sizes import sizes_from
from headway.planner.catalogue.read import Catalogue
from headway.planner.model_figures import model_figures
from headway.planner.stage_curves import ROOFLINE_ERROR
from headway.records.errors import ConfigurationError
from headway.records.plan import (
    DevicePool,
    Mode,
    PoolDevices,
    TimePoint,
    Workflow,
    WorkflowEdge,
    WorkflowLoop,
    WorkflowStage,
)

CONFIGS = Path(__file__).resolve().parents[2] / "tests" / "unit" / "models" / "published_configs.json"
# config.json of Qwen2.5-1.5B, as published
QWEN_1_5B = {
    "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}  # fmt: skip
SWITCH_S = 8.0  # assumed: weights and caches of a stage leave for host memory, another's come back
PROMPT = 500.0
LONGEST = 28_672
LENGTHS = {"median 6k": (6_000.0, 28_000.0), "median 9k": (9_000.0, 40_000.0)}  # (median, p99), lognormal, cut
RESPONSES = (512, 1024, 2048, 4096)  # of a step
SIMULATOR_STEPS_S = (0.2, 0.3, 0.45)  # of 256 environments on eight devices or on their host's cores


class Finding(NamedTuple):
    """One row: what was published, and what the models say."""

    name: str
    published: str
    computed: str
    deviation: float | None = None  # beyond the published range; None: not a number
    holds: bool = True


def model(name: str) -> ModelFigures:
    if name == "Qwen2.5-1.5B":
        return model_figures(sizes_from(QWEN_1_5B))
    config: dict[str, Any] = json.loads(CONFIGS.read_text(encoding="utf-8"))[name]
    return model_figures(sizes_from(config.get("config", config)))


def device(name: str, per_node: int = 8) -> RatedDevice:
    figures = Catalogue.read().entry("devices", name, DeviceFigures)
    return RatedDevice(name=name, figures=figures, per_node=per_node, network_bytes_per_s=50e9)


def lengths(median: float, p99: float) -> list[float]:
    spread = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
    drawn = (NormalDist().inv_cdf((index + 0.5) / 64) for index in range(64))
    return [min(float(LONGEST), median * math.exp(spread * z)) for z in drawn]


# --- stages of a reasoning step --------------------------------------------------------------------------


def generate_s(of: ModelFigures, on: RatedDevice, devices: int, items: int, drawn: Sequence[float]) -> float | None:
    found: list[float] = []
    for tensor in (1, 2, 4, 8):
        if devices % tensor == 0:
            replica = ReplicaRates(model=of, device=on, recipe=GenerationRecipe(parallelism=Parallelism(tensor=tensor)))
            try:
                found.append(replica.batch_s(math.ceil(items * tensor / devices), PROMPT, drawn))
            except ConfigurationError:
                continue
    return min(found, default=None)


def train_s(
    of: ModelFigures, on: RatedDevice, devices: int, tokens: float, mean: float, *, scoring: bool
) -> float | None:
    found: list[float] = []
    for tensor, context in product((1, 2, 4, 8), (1, 2, 4)):
        if devices % (tensor * context):
            continue
        spread = Parallelism(tensor=tensor, context=context)
        recipe = TrainingRecipe(parallelism=spread, logit_tokens=1024)
        trainer = TrainerRates(model=of, device=on, devices=devices, recipe=recipe)
        try:
            trainer.require_memory(LONGEST)
        except ConfigurationError:
            continue
        found.append(trainer.step_s(tokens, mean, scoring=scoring))
    return min(found, default=None)


def reasoning(of: ModelFigures, devices: int, items: int, drawn: Sequence[float]) -> dict[Mode, float]:
    """Seconds of a synchronous step by mode: generate, log-probabilities, train, in up to eight chunks."""
    on, mean = device("H100"), PROMPT + sum(drawn) / len(drawn)
    stages: dict[str, Callable[[int], float | None]] = {
        "generate": lambda count: generate_s(of, on, count, items, drawn),
        "log-probabilities": lambda count: train_s(of, on, count, items * mean, mean, scoring=True),
        "train": lambda count: train_s(of, on, count, items * mean, mean, scoring=False),
    }
    workflow = Workflow(
        items=items,
        granularities=(items // 8,),
        stages=tuple(
            # a chunk takes its share of the stage's time: samples stream out of one continuous batch
            WorkflowStage(name=name, times=tuple(_points(seconds, devices, items)), switch_s=SWITCH_S)
            for name, seconds in stages.items()
        ),
        edges=(
            WorkflowEdge(source="generate", to="log-probabilities"),
            WorkflowEdge(source="log-probabilities", to="train"),
        ),
    )
    return by_mode(workflow, DevicePool(classes=(PoolDevices(device="gpu", devices=devices, memory_bytes=1.0),)))


def _points(seconds: Callable[[int], float | None], devices: int, items: int) -> Iterator[TimePoint]:
    for count in range(8, devices + 1, 8):
        whole = seconds(count)
        if whole is not None:
            for part in (items // 8, items):
                yield TimePoint(device="gpu", devices=count, items=part, seconds=whole * part / items)


def by_mode(workflow: Workflow, pool: DevicePool) -> dict[Mode, float]:
    """Seconds of the best plan that is all temporal, that is all spatial, and of the best of any form."""
    found: dict[Mode, float] = {}
    for mode in ("temporal", "spatial"):
        try:
            found[mode] = place(workflow, pool, "time", SearchSettings(mode=mode)).seconds
        except ConfigurationError:
            continue
    best = place(workflow, pool, "time")
    found["hybrid"] = best.seconds
    return found


# --- embodied --------------------------------------------------------------------------------------------

ENVIRONMENTS, ROUNDS = 256, 64  # assumed: steps of an episode, in chunks of actions
IMAGE_TOKENS, ACTION_TOKENS = 290.0, 8.0  # of a vision-language-action model of 7 billion weights


def embodied(simulator_s: float, *, on_gpu: bool) -> dict[Mode, float]:
    """Seconds of a step: policy and simulator in turn for all rounds, then training, on eight H100."""
    of, on = model("Qwen/Qwen2.5-7B"), device("H100")
    replica = ReplicaRates(model=of, device=on)
    # published: simulators use less than 24 % of a GPU; so that share of their time falls with more devices, the rest
    # is their host's work, which grows with the environments whatever the devices are
    on_devices = Simulator(item_s=0.24 * simulator_s / (ENVIRONMENTS / 8))
    stages: dict[str, list[TimePoint]] = {"policy": [], "simulate": [], "train": []}
    tokens = ENVIRONMENTS * ROUNDS * (IMAGE_TOKENS + ACTION_TOKENS)
    for count, items in product((1, 2, 4, 6, 8), (ENVIRONMENTS // 4, ENVIRONMENTS // 2, ENVIRONMENTS)):
        each = math.ceil(items / count)
        prefill = each * IMAGE_TOKENS / replica.prefill_tokens_per_s(IMAGE_TOKENS)
        policy = prefill + ACTION_TOKENS * replica.step_s(each, IMAGE_TOKENS)
        stages["policy"].append(TimePoint(device="gpu", devices=count, items=items, seconds=policy))
        trainer = TrainerRates(model=of, device=on, devices=count, recipe=TrainingRecipe(logit_tokens=1024))
        train = trainer.step_s(tokens, IMAGE_TOKENS) * items / ENVIRONMENTS
        stages["train"].append(TimePoint(device="gpu", devices=count, items=items, seconds=train))
        if on_gpu:
            seconds = on_devices.step_s(items, count) + 0.76 * simulator_s * items / ENVIRONMENTS
            stages["simulate"].append(TimePoint(device="gpu", devices=count, items=items, seconds=seconds))
    if not on_gpu:
        for items in (ENVIRONMENTS // 4, ENVIRONMENTS // 2, ENVIRONMENTS):
            seconds = simulator_s * items / ENVIRONMENTS  # of all cores, whatever the GPUs do
            stages["simulate"].append(TimePoint(device="host", devices=1, items=items, seconds=seconds))
    workflow = Workflow(
        items=ENVIRONMENTS,
        granularities=(ENVIRONMENTS // 4, ENVIRONMENTS // 2),
        stages=tuple(
            WorkflowStage(name=name, times=tuple(points), switch_s=SWITCH_S if name == "train" else 0.02)
            for name, points in stages.items()
        ),
        edges=(
            WorkflowEdge(source="policy", to="simulate"),
            WorkflowEdge(source="simulate", to="policy", loop="episode"),
            WorkflowEdge(source="simulate", to="train"),
        ),
        loops=(WorkflowLoop(name="episode", rounds=ROUNDS),),
    )
    classes = (PoolDevices(device="gpu", devices=8, memory_bytes=1.0),)
    host = () if on_gpu else (PoolDevices(device="host", devices=1, memory_bytes=1.0),)
    return by_mode(workflow, DevicePool(classes=classes + host))


# --- memory, and the split of an asynchronous run --------------------------------------------------------

OFFLOADED = {"offloaded_bytes": 12.0, "offload_activations": True}
TRAINERS = {  # of the four published runs: model, device, devices, recipe
    "A": ("Qwen/Qwen3-235B-A22B", "H200", 64, {"parallelism": Parallelism(expert=8), **OFFLOADED}),
    "B": ("zai-org/GLM-5", "H200", 128, {"parallelism": Parallelism(context=2, expert=8), **OFFLOADED}),
    "C": ("Qwen/Qwen3-235B-A22B", "GB300", 32, {"parallelism": Parallelism(tensor=16, expert=32), **OFFLOADED}),
    "D": ("Qwen/Qwen3-235B-A22B", "H200", 32, {"parallelism": Parallelism(tensor=4, context=4, pipeline=2, expert=8)}),
}
# samples of a step, their mean length, and its seconds: of A by its consumption, of D less the 60 % that it waited
TRAINER_STEPS = {"A": (512, 18_294.0, 512 / 2.75), "D": (64, 20_164.0, 0.4 * 492.2)}
SEQUENCES = {"A": 32_768, "B": 65_536, "C": 131_072, "D": 32_768}


def trainer_of(run: str, **changes: Any) -> TrainerRates:
    name, kind, devices, recipe = TRAINERS[run]
    return TrainerRates(
        model=model(name),
        device=device(kind, per_node=72 if kind == "GB300" else 8),
        devices=devices,
        recipe=TrainingRecipe(**{**recipe, **changes}),
    )


def fits(trainer: TrainerRates, longest: int) -> str:
    """ "": it fits; else why not."""
    try:
        trainer.require_memory(longest)
    except ConfigurationError as error:
        return str(error)
    return ""


def split(devices: int) -> tuple[float, float]:
    """(best share of the devices for generating, its rate over that of three quarters) of an asynchronous run."""
    of, on, drawn = model("Qwen/Qwen2.5-7B"), device("H100"), lengths(*LENGTHS["median 9k"])
    mean = sum(drawn) / len(drawn)
    replica = ReplicaRates(model=of, device=on)
    slots = replica.concurrency(PROMPT + mean / 2)
    each = replica.rate(PROMPT, mean, slots)

    def rate(generating: int) -> float:
        seconds = train_s(of, on, devices - generating, 4096 * (PROMPT + mean), PROMPT + mean, scoring=False)
        scored = train_s(of, on, devices - generating, 4096 * (PROMPT + mean), PROMPT + mean, scoring=True)
        if seconds is None or scored is None:
            return 0.0
        return min(generating * each, 4096 / (seconds + scored))

    shares = {count: rate(count) for count in range(devices // 8, devices, max(1, devices // 16))}
    best = max(shares, key=lambda count: shares[count])
    return best / devices, shares[best] / rate(devices * 3 // 4)


# --- the rows --------------------------------------------------------------------------------------------


def findings() -> Iterator[Finding]:
    small = model("Qwen2.5-1.5B")
    for (name, drawn), items in product(LENGTHS.items(), RESPONSES):
        times = reasoning(small, 64, items, lengths(*drawn))
        gain = times["temporal"] / times["spatial"]
        slower = generate_s(small, device("H100"), 40, items, lengths(*drawn)) or math.inf
        slower /= generate_s(small, device("H100"), 64, items, lengths(*drawn)) or math.inf
        yield Finding(
            f"long contexts, 1.5B, {items:,} responses, {name}",
            "separate, 1.17-1.21 x; 40 of 64 devices generate 1.14 x as long",
            f"{'separate' if gain > 1 else 'shared'}, {gain:.2f} x; {slower:.2f} x as long",
            _beyond(gain, 1.17, 1.21),
            gain > 1,
        )
    for on_gpu, seconds in product((True, False), SIMULATOR_STEPS_S):
        times = embodied(seconds, on_gpu=on_gpu)
        best, spatial = times["hybrid"], times["spatial"]
        low, high = (1.61, 1.88) if on_gpu else (1.25, 2.13)
        name, published = ("on GPUs", "hybrid") if on_gpu else ("on CPUs", "devices shared")
        yield Finding(
            f"simulator {name}, {seconds:g} s a step",
            f"{published}, {low}-{high} x",
            f"{published if best < spatial else 'separate'}, {spatial / best:.2f} x over separate, "
            f"{times['temporal'] / best:.2f} x over taking turns",
            _beyond(spatial / best, low, high),
            best < spatial and (not on_gpu or best < times["temporal"]),
        )
    whole = TrainerRates(model=model("Qwen/Qwen3-32B"), device=device("H100"), devices=64)
    why = fits(whole, LONGEST)
    yield Finding("32B on 64 devices, whole logits (as veRL)", "out of memory", why or "fits", holds=bool(why))
    recipe = TrainingRecipe(logit_tokens=1024, parallelism=Parallelism(context=2))
    why = fits(TrainerRates(model=model("Qwen/Qwen3-32B"), device=device("H100"), devices=64, recipe=recipe), LONGEST)
    yield Finding("32B on 64 devices, logits in pieces, context 2", "fits", why or "fits", holds=not why)
    for run in TRAINERS:
        why = fits(trainer_of(run), SEQUENCES[run])
        yield Finding(f"trainer of run {run}", "fits", why or "fits", holds=not why)
    why = fits(trainer_of("A", offloaded_bytes=0.0, offload_activations=False), SEQUENCES["A"])
    yield Finding("trainer of run A without its offload", "does not fit", why or "fits", holds=bool(why))
    for run, (samples, length, published) in TRAINER_STEPS.items():
        found = trainer_of(run).step_s(samples * length, length)
        yield Finding(
            f"training step of run {run}",
            f"{published:.0f} s without its waits",
            f"{found:.0f} s by the roofline: it took {published / found:.2f} times as long",
            published / found - 1,
            abs(published / found - 1) <= ROOFLINE_ERROR,
        )
    for devices in (16, 64, 128, 512):
        share, gain = split(devices)
        yield Finding(
            f"asynchronous, 7B, {devices} devices",
            "75 % generate (by hand)",
            f"{share:.0%} generate: {gain:.2f} x the rate of 75 %",
        )


def _beyond(value: float, low: float, high: float) -> float:
    return max(low - value, value - high, 0.0)
