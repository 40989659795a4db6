"""The parts of ``gpu.py``, each run in a process of its own: ``python gpu_parts.py PART SETTINGS``."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts.gpu_load import (
    CHARACTERS,
    Context,
    Settings,
    concurrencies,
    decode_lengths,
    experiment,
    give,
    load_of,
    memory,
    requests,
    show,
    synchronise,
    timed,
    weight_bytes,
)

from headway.algorithms.samples import lay_out
from headway.config.schema import Experiment
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.service import GeneratorService
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.loading import DTYPES, build, load_model, save_model, weights_of
from headway.records.generation import UpdateMode, VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import encoder
from headway.records.training import TrainBatch
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer
from headway.trainer.service import TrainerService
from headway.weights.shared_memory import Publisher

UPDATE_MODES: tuple[UpdateMode, ...] = ("keep", "recompute")


# --- model -------------------------------------------------------------------------------------------------


def model(settings: Settings) -> None:
    """Random weights, made on the device, written as a model folder with a small tokenizer."""
    made = build(settings.configuration(), settings.dtype, settings.device)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    tokenizer = Path(settings.folder) / "tokenizer"
    train_byte_fallback_tokenizer([CHARACTERS], 512, tokenizer, character_level=True)
    seconds = timed(settings, lambda: save_model(made, settings.model, tokenizer))
    rng = random.Random(0)
    prompts = ["".join(rng.choices(CHARACTERS, k=load_of(settings).prompt_tokens)) for _ in range(512)]
    lines = [json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts]
    (Path(settings.folder) / "tasks.jsonl").write_text("".join(lines))
    parameters = sum(parameter.numel() for parameter in made.parameters())
    size = f"{parameters / 1e9:.3f} G parameters, {weight_bytes(made) / 1e9:.2f} GB"
    show(f"{size}, written in {seconds:.1f} s; torch {torch.__version__}")
    give(parameters=parameters, write_s=round(seconds, 2), torch=torch.__version__)


# --- engine ------------------------------------------------------------------------------------------------


def copy_bandwidth(settings: Settings) -> float:
    """Bytes per second, read and written, of the best of several large copies on the device."""
    count = (1 << 31 if settings.device == "cuda" else 1 << 26) // 4
    source, target = (torch.zeros(count, device=settings.device) for _ in range(2))
    best = min(timed(settings, lambda: target.copy_(source)) for _ in range(5))
    return 2 * 4 * count / best


def engine(settings: Settings) -> None:
    """TorchEngine's decode rates beside the bandwidth limit; `whole` counts prompts' time too, as the peer's do."""
    decoder = load_model(settings.model, settings.dtype, settings.device)
    bandwidth = copy_bandwidth(settings)
    show(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s, read and written")
    give(copy_bandwidth_gb_per_s=round(bandwidth / 1e9, 1))
    prompt, response = decode_lengths(settings)
    config = decoder.config
    kv_bytes = 2 * config.layers * config.kv_heads * config.head_dim * decoder.dtype.itemsize  # of one token
    rates: dict[str, float] = {}
    whole: dict[str, float] = {}
    shares: dict[str, float] = {}
    for concurrent in concurrencies(settings):
        per_s, prefill_s, whole_per_s = decode_rate(settings, decoder, concurrent, prompt, response)
        read = weight_bytes(decoder) + concurrent * (prompt + response / 2) * kv_bytes
        limit = concurrent * bandwidth / read
        rates[str(concurrent)], shares[str(concurrent)] = round(per_s, 1), round(per_s / limit, 4)
        whole[str(concurrent)] = round(whole_per_s, 1)
        show(
            f"{concurrent:4} concurrent  {per_s:10.0f} tokens/s decoding  limit {limit:10.0f}  share "
            f"{per_s / limit:.3f}  first tokens after prompts of {prompt} {1000 * prefill_s:.1f} ms, prompts included "
            f"{whole_per_s:.0f} tokens/s; {memory(settings)}"
        )
        give(decode_tokens_per_s=rates, share_of_limit=shares, tokens_per_s=whole)


def decode_rate(
    settings: Settings, decoder: Decoder, concurrent: int, prompt: int, response: int
) -> tuple[float, float, float]:
    """(tokens/s while all requests are running, seconds until all have their first token, tokens/s of everything).
    Once unmeasured before."""
    torch_engine = TorchEngine(decoder, slots=concurrent, max_context_tokens=prompt + response + 1)

    def admit() -> int:
        count = 1
        while torch_engine.step() and torch_engine.statistics().waiting:
            count += 1
        return count

    def steps(count: int) -> None:
        for _ in range(count):
            torch_engine.step()

    first_s = rest_s = whole_s = 1.0
    together = 1
    for wanted in (max(2, response // 8), response):
        torch_engine.submit(requests(decoder.config, concurrent, prompt, wanted))
        synchronise(settings)
        started = time.perf_counter()
        together = max(1, wanted - admit())  # steps until the first to be admitted ends
        synchronise(settings)
        first_s = time.perf_counter() - started
        rest_s = timed(settings, partial(steps, together))
        while torch_engine.step():
            pass
        torch_engine.take_deltas()
        synchronise(settings)
        whole_s = time.perf_counter() - started
    return concurrent * together / rest_s, first_s, concurrent * response / whole_s


def transformers_generate(settings: Settings) -> None:
    """The same load through transformers' generate: one padded call for all requests."""
    peer, how, prompt, response = transformers_peer(settings)

    def run(ids: list[list[int]]) -> int:
        with torch.inference_mode():
            made = peer.generate(torch.tensor(ids, device=settings.device), generation_config=how)
        return made[:, prompt:].numel()

    peer_rates(settings, run, prompt, response)


def transformers_continuous(settings: Settings) -> None:
    """The same load through transformers' continuous batching, its manager kept."""
    from transformers import ContinuousBatchingConfig

    peer, how, prompt, response = transformers_peer(settings)
    bounded = None  # its own choice of memory on a GPU; on a CPU that would be the whole machine's
    if settings.device == "cpu":
        bounded = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    manager = peer.init_continuous_batching(generation_config=how, continuous_batching_config=bounded)
    manager.start()

    def run(ids: list[list[int]]) -> int:
        manager.add_requests(inputs=ids, max_new_tokens=response)
        done, tokens = 0, 0
        while done < len(ids):
            result = manager.get_result(timeout=5)
            if result is None and not manager.is_running():
                raise RuntimeError("the manager's thread has ended")
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                done, tokens = done + 1, tokens + len(result.generated_tokens)
        return tokens

    try:
        peer_rates(settings, run, prompt, response)
    finally:
        manager.stop(block=True)


def transformers_peer(settings: Settings) -> tuple[Any, Any, int, int]:
    """transformers' model, how it is to generate, and the tokens of a prompt and of a response."""
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    transformers.logging.set_verbosity_error()
    show(f"transformers {transformers.__version__}")
    give(version=transformers.__version__)
    loaded: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=DTYPES[settings.dtype])
    prompt, response = decode_lengths(settings)
    # No token ends a response, and the whole vocabulary is sampled from: transformers' own defaults are top-k of 50.
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": -1, "pad_token_id": 0}
    how = GenerationConfig(**plain, max_new_tokens=response)
    return loaded.to(settings.device).eval(), how, prompt, response


def peer_rates(settings: Settings, run: Callable[[list[list[int]]], int], prompt: int, response: int) -> None:
    """Tokens/s of one of the peer's ways, prompts included."""
    rates: dict[str, float] = {}
    for concurrent in concurrencies(settings):
        wanted = requests(settings.configuration(), concurrent, prompt, response)
        ids = [list(request.prompt_ids) for request in wanted]
        run(ids)  # once unmeasured
        counts: list[int] = []
        seconds = timed(settings, lambda i=ids, c=counts: c.append(run(i)))
        if counts != [concurrent * response]:
            raise RuntimeError(f"{counts[0]} tokens came instead of {concurrent * response}")
        rates[str(concurrent)] = round(counts[0] / seconds, 1)
        show(f"{concurrent:4} concurrent  {counts[0] / seconds:10.0f} tokens/s, prompts included")
        give(tokens_per_s=rates)


# --- trainer -----------------------------------------------------------------------------------------------


def trainer(settings: Settings) -> None:
    """Training steps on sequences of equal length."""
    wanted = experiment(settings, "trainer")
    service = TrainerService(Context(settings.device), experiment=wanted.model_dump(mode="json"), run_id="gpu-trainer")
    peak = service.measure_peak()
    show(f"matrix products {peak / 1e12:.4g} TFLOP/s at {settings.dtype}")
    give(peak_tflops_per_s=round(peak / 1e12, 4))
    mfu: dict[str, float] = {}
    rates: dict[str, float] = {}
    lengths = (16, 64) if settings.quick else (128, 2048)
    tokens = 512 if settings.quick else 65_536
    for length in lengths:
        for warm in (True, True, False, False, False):
            batch = train_batch(service.version, settings.configuration(), length, tokens // length)
            step = service.train_step(lay_out(batch))
            if warm:
                flops = seconds = count = 0.0
                continue
            flops, seconds, count = flops + step.flops, seconds + step.compute_s, count + step.computed_tokens
        mfu[str(length)], rates[str(length)] = round(flops / seconds / peak, 4), round(count / seconds, 1)
        show(
            f"sequences of {length:5}: {count / seconds:10.0f} tokens/s computed, {flops / seconds / 1e12:.3g} model "
            f"TFLOP/s = {flops / seconds / peak:.3f} of the peak; {memory(settings)}"
        )
        give(mfu=mfu, tokens_per_s=rates)
    service.close()


def train_batch(version: int, config: DecoderConfig, length: int, count: int) -> TrainBatch:
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
            response_logprobs=(-11.9,) * response,
            response_mask=(True,) * response,
            versions=(VersionSpan(version=version, tokens=response),),
        )
        samples.append(Sample(rollout=rollout, advantage=1.0 if index % 2 else -1.0))
    return TrainBatch(step=version, samples=tuple(samples))


# --- update ------------------------------------------------------------------------------------------------


def update(settings: Settings) -> None:
    """Publish, fetch and apply weights while requests are running, through the generator's own service."""
    concurrent = 4 if settings.quick else 64
    prompt, response = decode_lengths(settings)
    source = weights_of(load_model(settings.model, settings.dtype, settings.device))
    context: Any = Context(settings.device)
    service = GeneratorService(
        context,
        model_path=str(settings.model),
        dtype=settings.dtype,
        slots=concurrent,
        max_context_tokens=prompt + response + 1,
    )
    host = torch.zeros(1 << 20 if settings.quick else 1 << 28)
    host_s = min(timed(settings, lambda: host.to(settings.device, copy=True)) for _ in range(3))
    show(f"copying ordinary host memory to the device: {host_s / (4e-9 * host.numel()):.3f} s/GB")
    publisher = Publisher("gpu-update", dtype=DTYPES[settings.dtype])
    result: dict[str, dict[str, float]] = {}
    try:
        for mode in UPDATE_MODES:
            for repeat in range(4):
                version = repeat + 1 + 10 * UPDATE_MODES.index(mode)
                synchronise(settings)
                published = publisher.publish(version, source)
                service.submit(encoder().encode(requests(settings.configuration(), concurrent, prompt, response)))
                for _ in range(response // 2):
                    service.tick()
                seconds = timed(settings, lambda p=published, m=mode: taken.append(service.update_weights(p, m)))
                while service.tick():
                    pass
                if repeat == 0:
                    continue  # new memory pages
                size_gb = published.size_bytes / 1e9
                applied = taken[-1]
                per_gb = {
                    "publish_s_per_gb": published.publish_s / size_gb,
                    "fetch_s_per_gb": applied.fetch_s / size_gb,
                    "pause_s_per_gb": applied.pause_s / size_gb,
                    "latency_s_per_gb": (published.publish_s + seconds) / size_gb,
                }
                earlier = result.get(mode, per_gb)
                result[mode] = {key: round(min(value, earlier[key]), 4) for key, value in per_gb.items()}
            shown = ", ".join(f"{key.removesuffix('_s_per_gb')} {value:.3f}" for key, value in result[mode].items())
            show(f"{mode:10} {applied.in_flight} requests in flight, {size_gb:.3f} GB; s/GB, best of 3: {shown}")
            give(**result, in_flight=applied.in_flight)
    finally:
        publisher.close()


taken: list[Any] = []  # what update_weights returned


# --- loop --------------------------------------------------------------------------------------------------


def loop(settings: Settings) -> None:
    """The real orchestrator over real processes on one device."""
    from parts.pipeline_load import Shape
    from parts.pipeline_system import Steady, measure

    load = load_of(settings)
    shape = Shape(0, 0, 0, 0, load.prompt_tokens, load.median_tokens, 0.894, load.longest_tokens)
    began = time.monotonic()
    for budget in (2,) if settings.quick else (2, 0):
        left_s = settings.limit_s - (time.monotonic() - began) - 10
        wanted = experiment(settings, f"loop-{budget}", budget=budget)
        try:
            steady: Steady = asyncio.run(asyncio.wait_for(measure(wanted, shape, load.steps), max(1.0, left_s)))
        except TimeoutError:
            show(f"budget {budget}: not measured within {left_s:.0f} s; {_steps_done(wanted)}")
            give(**{f"budget_{budget}": {"failed": f"no end within {left_s:.0f} s; {_steps_done(wanted)}"}})
            continue
        steps = len(steady.records)
        found = {
            "samples_per_s": round(steady.per_s, 2),
            "trained_tokens_per_s": round(steady.per_s * steady.mean_length, 1),
            "step_s": round(steady.seconds / steps, 3),
            "trainer_wait_share": round(steady.total("trainer_wait_s") / steady.seconds, 4),
            "trainer_compute_share": round(steady.total("trainer_compute_s") / steady.seconds, 4),
            "generator_wait_share": round(steady.total("generator_wait_ratio") / steps, 4),
            "publish_s": round(steady.total("publish_s") / steps, 4),
            "apply_pause_s": round(steady.total("apply_pause_s") / steps, 4),
            "mfu_step": round(steady.total("mfu_step") / steps, 4),
            "max_staleness": steady.max_staleness(),
            "mean_length": round(steady.mean_length, 1),
        }
        show(f"budget {budget}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
        give(**{f"budget_{budget}": found})


def _steps_done(wanted: Experiment) -> str:
    from headway.records.ledger import StepRecord
    from headway.telemetry.ledger import read_ledger

    steps = [line for line in read_ledger(Path(wanted.run.directory)) if isinstance(line, StepRecord)]
    if not steps:
        return "no step was done"
    samples = sum(step.samples for step in steps)
    return f"{len(steps)} steps, {samples / steps[-1].time_s:.2f} samples/s since the start"


PARTS: dict[str, Callable[[Settings], None]] = {
    "model": model,
    "engine": engine,
    "transformers generate": transformers_generate,
    "transformers continuous": transformers_continuous,
    "trainer": trainer,
    "update": update,
    "loop": loop,
}


def main() -> None:
    settings = Settings(**json.loads(sys.argv[2]))
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("RuntimeError: torch sees no CUDA device")
    if settings.device == "cpu":
        torch.set_num_threads(1)
    PARTS[sys.argv[1]](settings)


if __name__ == "__main__":
    main()
