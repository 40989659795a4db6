"""Steps of ``gpu_measure.py`` that measure rates: engines, trainer, weight updates, the asynchronous run."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.parts.gpu_checks import exact_decoder
from benchmarks.parts.gpu_load import (
    Context,
    Settings,
    configuration,
    copy_bandwidth,
    experiment,
    for_each_size,
    give,
    lack,
    load_of,
    memory_gb,
    model_folder,
    profile,
    random_decoder,
    requests,
    synchronise,
    timed,
    weight_bytes,
)
from benchmarks.parts.weight_reader import device_memory
from headway.algorithms.samples import lay_out
from headway.generator.engines.engine import Engine
from headway.generator.engines.select import build_engine
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.torch.engine import TorchEngine
from headway.kernels.device_queries import query_gpus
from headway.models.configuration import DecoderConfig
from headway.models.loading import DTYPES, load_model, weights_of
from headway.records.generation import UpdateMode, VersionSpan
from headway.records.ledger import LedgerLine, StepRecord
from headway.records.rollout import Rollout, Sample
from headway.records.training import TrainBatch
from headway.trainer.service import TrainerService
from headway.weights.device_memory import CudaMemory
from headway.weights.shared_memory import Publisher

UPDATE_MODES: tuple[UpdateMode, ...] = ("keep", "recompute")
GRADIENT_LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}  # norm of the difference over that of the float64 gradient
BEHAVIOUR = -11.9  # log-probability of random tokens under a policy: far below any of the model's
WEIGHT_CAP = 2.0  # of `reinforce`

# --- engines -------------------------------------------------------------------------------------------------


def engine_step(settings: Settings) -> None:
    """TorchEngine's rates beside the bandwidth limit: requests x bandwidth / bytes of weights and KV of a step."""
    bandwidth = copy_bandwidth(settings)
    give(copy_gb_per_s=round(bandwidth / 1e9, 1))

    def measure(size: str) -> None:
        decoder = random_decoder(settings, size)
        prompt, response = settings.lengths
        c, table = decoder.config, dict[str, Any]()
        kv_bytes = 2 * c.layers * c.kv_heads * c.head_dim * decoder.dtype.itemsize  # of a token
        for rows in settings.concurrencies[: 3 if size == "4B" else 4]:
            engine = TorchEngine(decoder, slots=rows, max_context_tokens=prompt + response + 1)
            measured = decode_rates(settings, engine, decoder.config, rows)
            limit = rows * bandwidth / (weight_bytes(decoder) + rows * (prompt + response / 2) * kv_bytes)
            share = round(measured["decode_tokens_per_s"] / limit, 4)
            table[str(rows)] = measured | {"limit": round(limit), "share": share, "memory_gb": memory_gb(settings)}
            give(**{size: table})
        rows = settings.concurrencies[1]
        engine = TorchEngine(decoder, slots=rows, max_context_tokens=prompt + response + 1)
        engine.submit(requests(decoder.config, rows, prompt, response))
        for _ in range(3):
            engine.step()
        give(**{f"{size}, a step of {rows} by the profiler": profile(settings, engine.step)})

    for_each_size(settings, settings.sizes("0.6B", "4B"), measure)


def decode_rates(settings: Settings, engine: Engine[Any], config: DecoderConfig, rows: int) -> dict[str, float]:
    """Tokens/s while all requests decode, milliseconds until all have their first token, tokens/s of everything. Once
    unmeasured before. Raises RuntimeError for missing tokens or log-probabilities."""
    prompt, response = settings.lengths
    rates = dict[str, float]()
    for length in (max(2, response // 8), response):
        before = engine.statistics().generated_tokens
        engine.submit(requests(config, rows, prompt, length))
        synchronise(settings)
        started = time.perf_counter()
        while engine.step() and engine.statistics().waiting:
            pass
        synchronise(settings)
        first_s = time.perf_counter() - started
        first_tokens = engine.statistics().generated_tokens - before
        steps = max(1, length - first_tokens // rows - 1)
        decode_s = timed(settings, engine.step, calls=steps) * steps
        decoded = engine.statistics().generated_tokens - before - first_tokens
        while engine.step():
            pass
        synchronise(settings)
        whole_s = time.perf_counter() - started
        deltas = engine.take_deltas()
        tokens = sum(len(delta.ids) for delta in deltas)
        if tokens != rows * length or engine.statistics().generated_tokens - before != tokens:
            raise RuntimeError(f"{tokens} tokens came instead of {rows * length}")
        if not all(math.isfinite(logprob) and logprob <= 0 for delta in deltas for logprob in delta.logprobs):
            raise RuntimeError("a log-probability isn't a finite number below 0")
        rates = {
            "decode_tokens_per_s": round(decoded / decode_s, 1),
            "first_ms": round(1000 * first_s, 2),
            "tokens_per_s": round(tokens / whole_s, 1),
        }
    return rates


def vllm_step(settings: Settings) -> None:
    """vLLM in this process: an update with its probe before any load, the engine's loads, and one under load."""
    arguments: dict[str, Any] = {}
    if settings.device == "cuda":
        # The runner that can resume requests; no kernels that are compiled at the start.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    (size,) = settings.sizes("0.6B")
    prompt, response = settings.lengths
    path, rows = model_folder(settings, size), settings.concurrencies[-1]
    chosen = EngineSettings(
        model_path=str(path),
        dtype=settings.dtype,
        slots=rows,
        max_context_tokens=max(64, prompt + response + 1),
        engine="vllm",
        engine_arguments=arguments,
    )
    started, context = time.perf_counter(), Context(settings.device)
    engine = build_engine(chosen, context)  # pyright: ignore[reportArgumentType]
    start_s = time.perf_counter() - started
    weights, table = weights_of(load_model(path, settings.dtype, settings.device)), dict[str, Any]()
    give(version=importlib.import_module("vllm").__version__, start_s=round(start_s, 1))
    with Publisher(settings.run_id, dtype=DTYPES[settings.dtype]) as publisher:
        first = engine.apply(publisher.publish(1, weights), "keep")  # raises WeightsMismatch if its probe differs
        give(idle_update={"pause_s": round(first.pause_s, 3), "fetch_s": round(first.fetch_s, 3)})
        for count in settings.concurrencies:
            table[str(count)] = decode_rates(settings, engine, configuration(size), count)
            give(**{size: table})
        engine.submit(requests(configuration(size), settings.concurrencies[-2], prompt, response))
        for _ in range(response // 2):
            engine.step()
        applied = engine.apply(publisher.publish(2, another_version(weights, 2)), "keep")
        while engine.step():
            pass
    update = {
        "in_flight": applied.in_flight,
        "pause_s": round(applied.pause_s, 3),
        "fetch_s": round(applied.fetch_s, 3),
    }
    give(update_under_load=update)
    if {delta.version for delta in engine.take_deltas() if delta.ids} != {1, 2}:
        raise RuntimeError("no token of a version, though an update came in the middle")


def another_version(weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    return {name: tensor * (1 + version / 64) for name, tensor in weights.items()}


# --- trainer -------------------------------------------------------------------------------------------------


def trainer_step(settings: Settings) -> None:
    """The gradient of prompts shared by samples against float64, then steps on sequences of equal lengths."""
    for dtype in ("float32", "bfloat16") if settings.device == "cuda" else ("float32",):
        error = gradient_error(settings, dtype)
        give(**{f"gradient_error_{dtype}": float(f"{error:.2g}")})
        if not error <= GRADIENT_LIMITS[dtype]:
            raise RuntimeError(f"the gradient in {dtype} differs by {error} of its norm from float64's")

    def measure(size: str) -> None:
        trained = {"gradient_checkpointing": "selective" if size == "4B" else "none"}
        keys = experiment(settings, size, f"trainer-{size}", trainer=trained).model_dump(mode="json")
        service = TrainerService(Context(settings.device), experiment=keys, run_id=settings.run_id)
        peak = service.measure_peak()
        table: dict[str, Any] = {"peak_tflops_per_s": round(peak / 1e12, 4)}
        total, lengths = (512, (16, 64)) if settings.quick else (65_536, (2048,) if size == "4B" else (128, 2048))
        warm, count = (1, 2) if size == "4B" else (2, 3)
        for length in lengths:
            make = partial(train_batch, configuration(size), length, total // length)
            reports = [service.train_step(lay_out(make(service.version))) for _ in range(warm + count)]
            if any(report.skipped or not math.isfinite(report.metrics["grad_norm"]) for report in reports):
                raise RuntimeError(f"a step was skipped: {[report.reason for report in reports]}")
            seconds = sum(report.compute_s for report in reports[warm:])
            flops = sum(report.flops for report in reports[warm:])
            table[str(length)] = {
                "tokens_per_s": round(sum(report.computed_tokens for report in reports[warm:]) / seconds, 1),
                "tflops_per_s": round(flops / seconds / 1e12, 4),
                "mfu": round(flops / seconds / peak, 4),
                "memory_gb": memory_gb(settings),
            }
            give(**{size: table})
        batch = lay_out(train_batch(configuration(size), lengths[-1], total // lengths[-1] // 4, service.version))
        give(**{f"{size}, a quarter step by the profiler": profile(settings, lambda: service.train_step(batch))})
        service.close()

    for_each_size(settings, settings.sizes("0.6B", "4B"), measure)


def gradient_error(settings: Settings, dtype: str) -> float:
    """The norm of the gradient's difference to float64's, where it is computed one sample at a time."""
    sections: dict[str, Any] = {"algorithm": {"loss": "reinforce"}, "trainer": {"dtype": dtype}}
    keys = experiment(settings, "tiny", f"gradient-{dtype}", **sections).model_dump(mode="json")
    service = TrainerService(Context(settings.device), experiment=keys, run_id=settings.run_id)
    batch = train_batch(configuration("tiny"), 24, 16, service.version)
    service.forward_backward(lay_out(batch))
    exact = exact_decoder(settings, weights_of(service.learner.model))
    for sample in batch.samples:
        rollout = sample.rollout
        ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids], device=settings.device)
        logits = exact.head(exact.forward_packed(ids, [len(ids)]))[len(rollout.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[len(rollout.prompt_ids) :, None])
        weights = (logprobs - BEHAVIOUR).exp().clamp(max=WEIGHT_CAP).detach()
        (-sample.advantage * weights * logprobs).sum().backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}
    actual = {name: parameter.grad for name, parameter in service.learner.model.named_parameters()}
    service.close()
    squares = [((actual[name].double() - grad).square().sum(), grad.square().sum()) for name, grad in expected.items()]
    return math.sqrt(float(sum(pair[0] for pair in squares)) / float(sum(pair[1] for pair in squares)))


def train_batch(config: DecoderConfig, length: int, count: int, version: int) -> TrainBatch:
    """``count`` samples of ``length`` tokens, an eighth of them the prompt; every 8 share one."""
    prompt = max(1, length // 8)
    rng = random.Random(version)
    samples: list[Sample] = []
    for index in range(count):
        shared = random.Random(index // 8)
        response = length - prompt
        rollout = Rollout(
            group=index // 8,
            member=index % 8,
            prompt_ids=tuple(shared.randrange(config.vocabulary_size) for _ in range(prompt)),
            response_ids=tuple(rng.randrange(config.vocabulary_size) for _ in range(response)),
            response_logprobs=(BEHAVIOUR,) * response,
            response_mask=(True,) * response,
            versions=(VersionSpan(version=version, tokens=response),),
        )
        samples.append(Sample(rollout=rollout, advantage=1.0 if index % 2 else -1.0))
    return TrainBatch(step=version, samples=tuple(samples))


# --- weights -------------------------------------------------------------------------------------------------


def publish_step(settings: Settings) -> None:
    """Seconds per GB to publish, fetch and apply versions while requests run; every tensor is compared afterwards."""
    (size,) = settings.sizes("0.6B")
    rows, (prompt, response) = settings.concurrencies[-2], settings.lengths
    decoder = random_decoder(settings, size)
    source, repeats = weights_of(random_decoder(settings, size)), 2 if settings.quick else 4
    engine = TorchEngine(decoder, slots=rows, max_context_tokens=prompt + response + 1)
    host = torch.zeros(1 << 20 if settings.quick else 1 << 28)
    for name, buffer in (("pageable", host), *([("pinned", host.pin_memory())] if settings.device == "cuda" else [])):
        copy_s = min(timed(settings, lambda b=buffer: b.to(settings.device, copy=True)) for _ in range(3))
        give(**{f"{name} host memory to the device, s/GB": round(copy_s / (4e-9 * host.numel()), 4)})
    if settings.device == "cpu":
        lack("by CUDA IPC", "no GPU: a stand-in of shared memory")
    give(**{"in the device's memory, s/GB": exported_rates(settings, source, repeats)})
    memory = CudaMemory.of(next(iter(source.values())).device)
    with Publisher(settings.run_id, dtype=DTYPES[settings.dtype], memory=memory) as publisher:
        for mode in UPDATE_MODES:
            best: dict[str, float] = {}
            for repeat in range(repeats):
                version = repeat + 1 + repeats * UPDATE_MODES.index(mode)
                tensors = another_version(source, version)
                running = requests(decoder.config, rows, prompt, response)
                engine.submit(running)
                for _ in range(response // 8):
                    engine.step()
                synchronise(settings)
                published = publisher.publish(version, tensors)
                started = time.perf_counter()
                applied = engine.apply(published, mode)
                synchronise(settings)
                seconds = time.perf_counter() - started
                engine.step()
                engine.abort([request.request_id for request in running])
                engine.take_deltas()
                differing = [
                    name for name, tensor in weights_of(decoder).items() if not torch.equal(tensor, tensors[name])
                ]
                if differing or applied.in_flight != rows:
                    raise RuntimeError(
                        f"{applied.in_flight} of {rows} in flight; differing after version {version}: {differing}"
                    )
                if repeat == 0:
                    continue  # new memory pages
                seconds_of = {
                    "publish": published.publish_s,
                    "snapshot": published.snapshot_s,
                    "hash": published.hash_s,
                    "fetch": applied.fetch_s,
                    "pause": applied.pause_s,
                    "latency": published.publish_s + seconds,
                }
                size_gb = published.size_bytes / 1e9
                best = {
                    key: min(round(value / size_gb, 4), best.get(key, math.inf)) for key, value in seconds_of.items()
                }
            give(**{f"{mode}, s/GB": best}, gb=round(size_gb, 4), in_flight=rows)


def exported_rates(settings: Settings, source: Mapping[str, Tensor], repeats: int) -> dict[str, float]:
    """Seconds per GB of versions that stay in the device's memory, where a reader's process copies and checks them."""
    memory, best = device_memory(settings.device, settings.folder), dict[str, float]()
    command = [sys.executable, "-m", "benchmarks.parts.weight_reader", settings.device, settings.folder]
    options: dict[str, Any] = {"dtype": DTYPES[settings.dtype], "memory": memory, "exports": True}
    with (
        subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader,
        Publisher(settings.run_id, 2, **options) as publisher,
    ):
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(1, repeats + 3):
            published = publisher.publish(version, another_version(source, version))
            if not published.handle:
                raise torch.OutOfMemoryError("no memory on the device for two versions")
            print(msgspec.json.encode(published).decode(), file=reader.stdin, flush=True)
            if not (line := reader.stdout.readline()):
                raise RuntimeError(f"the reader of version {version} ended")
            seconds_of = {"publish": published.publish_s, "snapshot": published.snapshot_s, "hash": published.hash_s}
            seconds_of |= json.loads(line)
            if version > 2:  # new memory
                gb = published.size_bytes / 1e9
                best = {key: min(round(value / gb, 4), best.get(key, math.inf)) for key, value in seconds_of.items()}
    return best


# --- the run -------------------------------------------------------------------------------------------------


class GpuUse:
    """Samples the share of time in which the GPU computes, as the driver has it."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # monotonic seconds, percent
        gpus = query_gpus()
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        chosen = ["-i", gpus[0].uuid] if gpus else []
        self._process = subprocess.Popen([*query, *chosen], stdout=subprocess.PIPE, text=True) if gpus else None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in (self._process and self._process.stdout) or ():
            if line.strip().isdecimal():
                self._samples.append((time.monotonic(), float(line)))

    def idle_share(self, first: float, last: float) -> float | None:
        """The share of time from ``first`` to ``last`` in which nothing was computed; None without samples."""
        used = [percent for moment, percent in self._samples if first <= moment <= last]
        return round(1 - sum(used) / len(used) / 100, 4) if used else None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def loop_step(settings: Settings) -> None:
    """The orchestrator over worker processes that share the device, forced log-normal lengths; budgets 2 and 0."""
    from parts.pipeline_load import Shape
    from parts.pipeline_system import measure

    (size,) = settings.sizes("0.6B")
    load = load_of(settings, size)
    shape = Shape(0, 0, 0, 0, load.prompt_tokens, load.median_tokens, 0.894, load.longest_tokens)
    began, use = time.monotonic(), GpuUse()
    if settings.device == "cpu":
        lack("idle share of the GPU", "no GPU")
    try:
        for budgets_left, budget in ((2, 2), (1, 0)):
            limit_s = (settings.limit_s - (time.monotonic() - began)) / budgets_left - 5
            ends: list[tuple[float, StepRecord]] = []

            def note(line: LedgerLine, ends: list[tuple[float, StepRecord]] = ends) -> None:
                if isinstance(line, StepRecord):
                    ends.append((time.monotonic(), line))

            wanted = experiment(settings, size, f"loop-{budget}", queue={"budget": budget})
            try:
                asyncio.run(asyncio.wait_for(measure(wanted, shape, load.steps, on_line=note), max(1.0, limit_s)))
            except TimeoutError:
                lack(
                    f"budget {budget}: {load.steps} steps",
                    f"{len(ends)} steps with the first {budget + 1} in {limit_s:.0f} s",
                )
            if len(ends) > 1:
                give(**{f"budget {budget}": loop_numbers(ends[min(budget, len(ends) - 2) :], budget, use)})
    finally:
        use.close()


def loop_numbers(ends: Sequence[tuple[float, StepRecord]], budget: int, use: GpuUse) -> dict[str, Any]:
    """The numbers of the steps after the first of ``ends``. Raises RuntimeError for samples beyond the budget."""
    records = [record for _, record in ends[1:]]
    seconds, samples = records[-1].time_s - ends[0][1].time_s, sum(record.samples for record in records)
    staleness = int(max(record.trajectory_staleness.max for record in records))
    if staleness > budget or not samples or any(record.skipped for record in records):
        raise RuntimeError(f"staleness {staleness} at budget {budget}, {samples} samples, or a step was skipped")

    def share(name: str) -> float:
        return round(sum(getattr(record, name) for record in records) / seconds, 4)

    trained = sum(record.tokens.trained_per_s * record.step_s for record in records if record.tokens)
    return {
        "steps": len(records),
        "samples_per_s": round(samples / seconds, 2),
        "trained_tokens_per_s": round(trained / seconds, 1),
        "step_s": round(seconds / len(records), 3),
        "gpu_idle_share": use.idle_share(ends[0][0], ends[-1][0]),
        "trainer_wait_share": share("trainer_wait_s"),
        "trainer_compute_share": share("trainer_compute_s"),
        "generator_wait_share": round(sum(record.generator_wait_ratio for record in records) / len(records), 4),
        "publish_share": share("publish_s"),
        "apply_pause_share": share("apply_pause_s"),
        "mfu_step": round(sum(record.mfu_step for record in records) / len(records), 4),
        "max_staleness": staleness,
    }
