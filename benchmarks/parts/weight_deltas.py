"""Versions of a model under training as deltas: their size beside their entropy, and what they cost on both sides."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import SIZES

from headway.algorithms.samples import lay_out
from headway.generator.service import GeneratorService
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, save_model
from headway.records.generation import GenerationRequest, PublishedWeights, SamplingParameters, VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.training import TrainBatch
from headway.runtime.nodes.handshake import make_key
from headway.trainer.service import TrainerService
from headway.weights.delta_codec import WORDS, encode
from headway.weights.mirror import MirrorService
from headway.weights.shared_memory import Publisher, Subscriber

RATES = (1e-6, 5e-6, 1e-5)  # learning rates
TOKENS = 512  # of a step, at least
LINK_BYTES_PER_S = 100e6 / 8
LATER = 6  # steps from this one on are measured: the first ones of Adam change more


class Context:
    """A worker's, without a parent."""

    name, log = "benchmark", getLogger("benchmark")

    class device:
        threads = 1

        @staticmethod
        def torch_device() -> str:
            return "cpu"

    def emit(self, event: Any) -> None: ...


def batch(step: int, vocabulary: int, samples: int = 8, prompt: int = 16, response: int = 64) -> TrainBatch:
    """Random tokens, of which `TOKENS` have loss."""
    random = np.random.default_rng(step)
    prompt_ids = tuple(random.integers(0, vocabulary, prompt).tolist())
    rollouts = [
        Rollout(
            group=0,
            member=member,
            prompt_ids=prompt_ids,
            response_ids=tuple(random.integers(0, vocabulary, response).tolist()),
            response_logprobs=tuple((-9.0 + 0.1 * random.standard_normal(response)).tolist()),
            response_mask=(True,) * response,
            versions=(VersionSpan(version=0, tokens=response),),
        )
        for member in range(samples)
    ]
    return TrainBatch(
        step=step, samples=tuple(Sample(rollout=each, advantage=float(random.standard_normal())) for each in rollouts)
    )


def entropy_bits(shares: np.ndarray) -> float:
    positive = shares[shares > 0]
    return float(-(positive * np.log2(positive)).sum())


def bound_bytes(base: np.ndarray, new: np.ndarray) -> float:
    """The entropy of a tensor's changes, [words]: positions that change independently, and differences."""
    is_changed = base != new
    density = float(is_changed.mean())
    _, counts = np.unique((new - base)[is_changed], return_counts=True)
    bits = entropy_bits(np.array([density, 1 - density]))
    return len(base) * (bits + (density * entropy_bits(counts / counts.sum()) if len(counts) else 0.0)) / 8


def sizes_of(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> tuple[float, float, float, int]:
    """Of two versions: the share of changed values, their bound over the whole, the encoded bytes of the tensors, each
    on its own, over their bounds (the largest, of tensors of 512 KiB or more), and changed values."""
    changed = values = bound = 0.0
    worst = 0.0
    for name, tensor in new.items():
        base, words = (each.flatten().view(torch.int16).numpy().view(WORDS[2]) for each in (old[name], tensor))
        changed, values = changed + float((base != words).sum()), values + len(words)
        tensor_bound = bound_bytes(base, words)
        bound += tensor_bound
        if words.nbytes >= 512 << 10 and tensor_bound:
            worst = max(worst, len(encode(base, words)) / tensor_bound)
    return changed / values, bound / (2 * values), worst, int(changed)


class Link:
    """A relay to an address that carries so many bytes a second."""

    def __init__(self, address: str, bytes_per_s: float) -> None:
        self._target, self._rate, self._free_at_s = address, bytes_per_s, 0.0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        host, port = self._target.split(":")
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection((host, int(port)))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while content := source.recv(16 << 10):
                with self._lock:
                    start_s = max(self._free_at_s, time.perf_counter())
                    self._free_at_s = start_s + len(content) / self._rate
                time.sleep(max(0.0, self._free_at_s - time.perf_counter()))
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def over_link(versions: list[PublishedWeights]) -> dict[str, float]:
    """Seconds of a whole version, and of the next by its delta, from one mirror to another over the slow link."""
    run_id, settings = f"link-{os.getpid()}", {"epoch": 1, "orphan_s": 60.0, "ports": [0], "host": "127.0.0.1"}
    ends = [MirrorService(Context(), run_id=run_id, node=node, key=make_key(), **settings) for node in "ab"]  # pyright: ignore
    ends[1]._key = ends[0]._key
    seconds: list[float] = []
    try:
        link = Link(ends[0].address(), LINK_BYTES_PER_S)
        for published in versions:
            ends[0].serve_published(published)
            started = time.perf_counter()
            copy = ends[1].fetch(published, [(link.address, ())])
            seconds.append(time.perf_counter() - started)
            Subscriber().fetch(copy)
    finally:
        for end in ends:
            end.close()
    return {"whole_s": round(seconds[0], 3), "delta_s": round(seconds[1], 3)}


class Reader:
    """A replica with requests in flight, which takes the versions."""

    def __init__(self, folder: Path) -> None:
        context: Any = Context()
        options = {"slots": 8, "max_context_tokens": 512}
        self.service = GeneratorService(context, model_path=str(folder), dtype="bfloat16", **options)
        self._serial = 0

    def pause_s(self, published: PublishedWeights) -> tuple[float, float]:
        """Apply a version; returns the seconds of its pause, and of fetching it beside the steps."""
        engine: Any = self.service._engine
        if not engine.open_requests:
            self._serial += 1
            sampling = SamplingParameters(max_tokens=480)
            engine.submit([GenerationRequest(request_id=f"{self._serial}", prompt_ids=(1, 2), sampling=sampling)])
            self.service.tick()
        pending = self.service.update_weights(published, "keep")
        while isinstance(pending, Future) and not pending.done():
            self.service.tick()
        applied = pending.result() if isinstance(pending, Future) else pending
        return applied.pause_s, applied.fetch_s


def copied_s(size_bytes: int, buffers: dict[int, tuple[np.ndarray, np.ndarray]]) -> float:
    """One plain copy of so many bytes, both sides warm."""
    source, target = buffers.setdefault(size_bytes, (np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)))
    np.copyto(target, source)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def rounded(service: TrainerService) -> dict[str, torch.Tensor]:
    """The weights under training, as they are published."""
    return {name: weight.detach().to(torch.bfloat16) for name, weight in service.learner.weights().items()}


def measure_rate(rate: float, size: str, steps: int, folder: Path) -> dict[str, Any]:
    """All of one learning rate."""
    keys = {"dtype": "float32", "learning_rate": rate, "micro_batch_tokens": 2 * TOKENS}
    experiment = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder)},
        "tasks": {"train": {"path": "unused.jsonl"}},
        "trainer": keys,
    }
    service = TrainerService(Context, experiment=experiment, run_id=f"deltas-{os.getpid()}")
    reader, buffers = Reader(folder), dict[int, tuple[np.ndarray, np.ndarray]]()
    vocabulary, rows = SIZES[size]["vocabulary_size"], list[dict[str, float]]()
    step_s: dict[bool, list[float]] = {True: [], False: []}
    with (
        Publisher(f"deltas-{os.getpid()}", dtype=torch.bfloat16, whole_every=10**6) as publisher,
        ThreadPoolExecutor(1) as beside,
    ):
        previous, old = publisher.publish(0, service.learner.weights()), rounded(service)
        reader.pause_s(previous)
        link = dict[str, float]()
        for step in range(1, steps + 1):
            service.train_step(lay_out(batch(service.version, vocabulary)))
            published, new = publisher.publish(step, service.learner.weights()), rounded(service)
            if step == min(LATER, steps):
                link = over_link([previous, published])
            density, bound, worst, _ = sizes_of(old, new)
            pause_s, fetch_s = reader.pause_s(published)
            copy_s = copied_s(published.size_bytes, buffers)
            rows.append(
                {
                    "density": density,
                    "bound_share": bound,
                    "worst_tensor_over_bound": worst,
                    "delta_bytes_share": sum(delta.size_bytes for delta in published.deltas[-1:])
                    / published.size_bytes,
                    "encode_over_copy": published.encode_s / copy_s,
                    "pause_over_copy": pause_s / copy_s,
                    "fetch_over_copy": fetch_s / copy_s,
                }
            )
            previous, old = published, new
        for index in range(6):  # a step beside which a version is encoded, or only copied and hashed
            started = time.perf_counter()
            chain, publisher._chain = publisher._chain, publisher._chain if index % 2 else None
            running = beside.submit(publisher.begin(steps + 1 + index, service.learner.weights()).finish)
            service.train_step(lay_out(batch(service.version, vocabulary)))
            running.result()
            step_s[bool(index % 2)].append(time.perf_counter() - started)
            publisher._chain = chain
    service.close()
    later = rows[LATER - 1 :] or rows[1:]
    medians = {key: round(statistics.median(row[key] for row in later), 5) for key in rows[0]}
    medians["step_with_encoding"] = round(statistics.median(step_s[True]) / statistics.median(step_s[False]), 3)
    medians["step_s"] = round(statistics.median(step_s[False]), 3)
    return medians | link


def measure_deltas(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every learning rate; prints a line for each."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = build(DecoderConfig(kv_heads=2, max_positions=1024, **SIZES[arguments.model]))
        initialise_parameters(model, 0)
        save_model(model, Path(scratch))
        for rate in RATES[:1] if arguments.quick else RATES:
            row = out[f"{rate:g}"] = measure_rate(rate, arguments.model, arguments.updates, Path(scratch))
            print(f"learning rate {rate:g}: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    first = out[f"{RATES[0]:g}"]
    summary = {
        "delta_bytes_share": first["delta_bytes_share"],
        "worst_tensor_over_bound": first["worst_tensor_over_bound"],
        "pause_over_copy": first["pause_over_copy"],
        "encode_over_copy": first["encode_over_copy"],
        "step_with_encoding": first["step_with_encoding"],
        "over_whole": round(first["delta_s"] / first["whole_s"], 4),
    }
    return summary | {"rates": out}
