"""Settings, model sizes, loads and the experiment that the steps of ``gpu_measure.py`` share."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_measure import GIVEN, LACKING
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.loading import build, save_model
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.devices import Device
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

# Qwen3's sizes; both tie the output head to the embedding.
SIZES: dict[str, dict[str, int]] = {
    "0.6B": {"layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "intermediate": 3072},
    "4B": {"layers": 36, "width": 2560, "heads": 32, "kv_heads": 8, "intermediate": 9728},
    "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "intermediate": 128},
}
# Of a forward pass: activations are kept for the backward, and master weights and moments take 16 bytes a parameter.
MICRO_BATCH_TOKENS = {"0.6B": 16_384, "4B": 2048, "tiny": 16_384}
CHARACTERS = "0123456789+-= abcdef"


class NotRun(Exception):
    """The step can't be run here; its message is the reason."""


class Context:
    """What a worker object sees of its process."""

    def __init__(self, device: str) -> None:
        self.device = Device(kind="cuda" if device == "cuda" else "cpu", first=0, last=0)
        self.log = logging.getLogger("gpu")

    def emit(self, event: Any) -> None:
        """No one listens."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A step's settings, from ``gpu_measure.py``."""

    device: str  # cuda | cpu
    quick: bool
    folder: str  # of models and runs, shared by all steps
    limit_s: float  # the process is killed then
    start_s: float | None  # from the call to the first line
    fault: bool  # break what is measured

    @property
    def run_id(self) -> str:
        """Of published weights: no other call's."""
        return Path(self.folder).name

    @property
    def dtype(self) -> str:
        """Of the generator's weights and the trainer's products; on a CPU, which may lack bfloat16, float32."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return (1, 4) if self.quick else (1, 16, 64, 256)

    @property
    def lengths(self) -> tuple[int, int]:
        """Prompt and response tokens of the engines' loads."""
        return (8, 16) if self.quick else (128, 256)

    def sizes(self, *names: str) -> tuple[str, ...]:
        return ("tiny",) if self.quick else names


def give(**numbers: Any) -> None:
    """Report numbers as soon as they are known."""
    print(GIVEN + json.dumps(numbers), flush=True)


def lack(part: str, why: str) -> None:
    """Report a part of a step that isn't run."""
    print(LACKING + json.dumps({part: why}), flush=True)


def synchronise(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def timed(settings: Settings, work: Callable[[], object], calls: int = 1) -> float:
    """Seconds that a call of ``work`` takes on the device, ``calls`` at once."""
    synchronise(settings)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    synchronise(settings)
    return (time.perf_counter() - started) / calls


def copy_bandwidth(settings: Settings) -> float:
    """Bytes per second, read and written, of the best of several large copies on the device."""
    count = (1 << 31 if settings.device == "cuda" else 1 << 26) // 4
    source, target = (torch.full((count,), float(n), device=settings.device) for n in range(2))
    best = min(timed(settings, lambda: target.copy_(source)) for _ in range(5))
    if not torch.equal(source, target):
        raise RuntimeError("a copy on the device differs from its source")
    return 2 * 4 * count / best


def for_each_size(settings: Settings, sizes: Sequence[str], work: Callable[[str], None]) -> None:
    """Measure each model size; one that doesn't fit the card's memory is lacking."""
    for size in sizes:
        if settings.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            work(size)
        except torch.OutOfMemoryError as error:
            lack(size, f"doesn't fit the card's memory: {str(error).splitlines()[0][:200]}")


def memory_gb(settings: Settings) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 1e9, 1) if settings.device == "cuda" else None


def profile(settings: Settings, work: Callable[[], object], rows: int = 15) -> dict[str, Any]:
    """One call of ``work`` by torch's profiler: launches, milliseconds of the device (of a CPU: operators), and the
    ``rows`` that take most: name, calls, milliseconds."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    on_gpu = settings.device == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as run:
        work()
        synchronise(settings)
    kind, unit = (DeviceType.CUDA, "self_device_time_total") if on_gpu else (DeviceType.CPU, "self_cpu_time_total")
    events = sorted(
        ((getattr(e, unit), e) for e in run.key_averages() if e.device_type == kind), key=lambda pair: -pair[0]
    )
    top = [f"{event.key[:80]}: {event.count} calls, {time_us / 1000:.3f} ms" for time_us, event in events[:rows]]
    return {"launches": sum(e.count for _, e in events), "ms": round(sum(t for t, _ in events) / 1000, 3), "top": top}


# --- models --------------------------------------------------------------------------------------------------


def configuration(size: str) -> DecoderConfig:
    head_dim, vocabulary = (32, 512) if size == "tiny" else (128, 151_936)
    fixed = {"max_positions": 8192, "rope_theta": 1e6, "eos_token_id": 2, "pad_token_id": 0}
    return DecoderConfig(**SIZES[size], head_dim=head_dim, vocabulary_size=vocabulary, **fixed)


def random_decoder(settings: Settings, size: str, dtype: str | None = None) -> Decoder:
    """A model with random weights, made on the device."""
    decoder = build(configuration(size), dtype or settings.dtype, settings.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return decoder


def model_folder(settings: Settings, size: str) -> Path:
    """The folder of a random model, which the first step that needs it writes, with ``tasks.jsonl`` beside it."""
    folder = Path(settings.folder) / size
    if not (folder / "tasks.jsonl").exists():
        train_byte_fallback_tokenizer([CHARACTERS], 512, folder / "tokenizer", character_level=True)
        save_model(random_decoder(settings, size), folder / "model", folder / "tokenizer")
        rng = random.Random(0)
        prompts = ["".join(rng.choices(CHARACTERS, k=load_of(settings, size).prompt_tokens)) for _ in range(512)]
        lines = [json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts]
        (folder / "tasks.jsonl").write_text("".join(lines))
    return folder / "model"


def weight_bytes(decoder: Decoder) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())


# --- loads ---------------------------------------------------------------------------------------------------


def requests(config: DecoderConfig, count: int, prompt: int, response: int) -> list[GenerationRequest]:
    """Distinct prompts, no stop tokens."""
    rng = random.Random(count)
    return [
        GenerationRequest(
            request_id=f"{response}-{index}",
            prompt_ids=tuple(rng.randrange(3, config.vocabulary_size) for _ in range(prompt)),
            sampling=SamplingParameters(max_tokens=response, seed=index),
        )
        for index in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the loop generates and trains."""

    prompt_tokens: int = 128
    median_tokens: int = 192
    longest_tokens: int = 1024
    group: int = 8
    groups: int = 16  # of a step
    slots: int = 128
    micro_batch_tokens: int
    steps: int = 6  # measured


def load_of(settings: Settings, size: str) -> Load:
    tokens = MICRO_BATCH_TOKENS[size]
    if not settings.quick:
        return Load(micro_batch_tokens=tokens)
    lengths = {"prompt_tokens": 8, "median_tokens": 6, "longest_tokens": 24}
    return Load(**lengths, group=4, groups=2, slots=8, steps=2, micro_batch_tokens=2048)


def experiment(settings: Settings, size: str, name: str, **sections: dict[str, Any]) -> Experiment:
    """Generator and trainer on the same device; lengths are forced. ``sections``: further keys."""
    load, folder = load_of(settings, size), model_folder(settings, size).parent
    common = {"devices": ["cuda:0" if settings.device == "cuda" else "cpu:0"], "dtype": settings.dtype}
    limits = {"max_prompt_tokens": load.prompt_tokens, "max_response_tokens": load.longest_tokens}
    keys: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name), "steps": 100_000},
        "model": {"path": str(folder / "model")},
        "tasks": {"train": {"path": str(folder / "tasks.jsonl"), "columns": {"answer": ""}}},
        # Random responses end in a low digit now and then: rewards and gradients are not all zero.
        "verifier": {"name": "regex", "parameters": {"pattern": "[0-4][^0-9]*$"}},
        "rollout": {"group_size": load.group, **limits},
        "generator": {"slots": load.slots, **common},
        "queue": {"groups_per_step": load.groups, "filter_zero_variance": False},
        "trainer": {"learning_rate": 1e-6, "micro_batch_tokens": load.micro_batch_tokens, **common},
        "checkpoint": {"every_steps": 1_000_000},
        "evaluation": {"test": "never"},
        "ledger": {"trackers": []},
    }
    for section, further in sections.items():
        keys[section] = keys.get(section, {}) | further
    return validate_experiment(keys, "benchmark")
