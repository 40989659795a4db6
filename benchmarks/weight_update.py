"""The time that decoding loses to new weights, as a multiple of a plain memory copy of them, for each engine.

    python benchmarks/weight_update.py [--vllm-python PATH] [--engines torch,vllm] [--dtype float32] [--quick]
    python benchmarks/weight_update.py --delta [--quick]

A random Qwen3-style model of 48.8 M parameters on one core; 32 requests with prompts of 24 to 40 tokens are in flight
(`keep`). Weights are published to shared memory, as a trainer does; two sets alternate. Beside every update, in turn,
the same number of bytes is copied from one warm buffer to another by one `copy_`. A ratio is the median over the
updates of one run, with the smallest and largest beside it; the first updates are left out.

The torch engine is driven as its replica does it (`GeneratorService.tick`), which fetches and verifies a version in a
thread beside the steps. `lost_over_copy` is the time of the 64 steps from the announcement of a version on, less 64
ordinary ones (half of them before, half after), over the copy: all work of an update, wherever it is done, since there
is one core. `pause_over_copy` is the step in which the version is applied, less an ordinary one, over the copy.

vLLM's pause begins with the last token before an update and ends with the first one after it, and an ordinary decode
step (the median of those around) is taken off: it holds fetching, verifying, loading and whatever else the engine does.
It is printed in parts: `fetch`: verify it in shared memory; `load` into the layers that are there;
`repack` the tied head; `modules`, the probe of every layer; `reference`, headway's own forward for the probe of a
sequence; `sequence`, vLLM's steps that serve it (the last of them gives the first tokens, and an ordinary step is taken
off); and `scheduler`, what is left. The probes are there because `probe_every_updates = 1`: without them (`unprobed`) a
pause is the first three parts and the scheduler's.

Each engine runs in a process of its own, vLLM in an interpreter that has it (docs/vllm.md; `make install-vllm` makes
.venv-vllm/bin/python, which is taken where it exists).

Last line, one JSON object: the torch engine's `lost_over_copy` and `pause_over_copy` ([median, smallest, largest]),
and for each engine, under `engines`, `over_copy` (of the pause), `pause_s`, `copy_s`, `step_s` (medians), `bytes`; of
the torch engine also `fetch_s` (copied and verified beside the steps), of vLLM `parts_s` and `unprobed_over_copy`. An
engine that isn't there is null.

With `--delta` the model is trained at three learning rates, 640 random tokens a step, in float32, and published in
bfloat16; a replica of bfloat16 takes each version by its delta. Medians from the sixth step on: `density`, the share
of changed values; `delta_bytes_share`, a delta's bytes over the whole version's; `bound_share`, the same of H(p) + p
H(difference), tensor by tensor; `worst_tensor_over_bound`, of one tensor's delta alone (of 512 KiB or more, for each
has three heads); `encode_over_copy`, `pause_over_copy` and `fetch_over_copy` (beside the steps) over a warm copy of
the whole version on the same core; `step_with_encoding`, a training step beside which a version is published with its
delta over one beside which it is published without; `over_whole`, the seconds of the sixth delta over those of a
whole version through a relay of 100 Mbit/s between two mirrors. The last line has those of the lowest rate, and all
under `rates`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from headway.runtime.devices import ALLOCATOR_ENVIRONMENT, parse_device

if __name__ == "__main__" and os.environ.keys().isdisjoint(ALLOCATOR_ENVIRONMENT):  # read at the start of a process
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | parse_device("cpu:0").environment())

import torch
from engine import CONTEXT_TOKENS, SIZES, machine, prompts_of

from headway.generator.engines.engine import Engine
from headway.generator.engines.select import build_engine
from headway.generator.engines.settings import EngineSettings
from headway.generator.service import GeneratorService
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, save_model, weights_of
from headway.models.sizes import sizes_from
from headway.records.generation import GenerationRequest, PublishedWeights, SamplingParameters
from headway.runtime.child import WorkerContext
from headway.runtime.devices import Device
from headway.weights.shared_memory import Publisher

ROOT = Path(__file__).resolve().parents[1]
IN_FLIGHT = 32
STEPS_BETWEEN = 4  # vLLM: ordinary steps before and after each update
STEPS = 64  # the torch engine: from the announcement of a version on; as many ordinary ones around
WARM_UP = 2  # updates
PARTS = ("fetch", "load", "repack", "modules", "reference", "sequence", "scheduler")


class Parts:
    """Seconds by part since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time every call of ``owner.name``."""
        timed: Callable[..., Any] = getattr(owner, name)

        def timing(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return timed(*arguments, **named)
            finally:
                self._seconds[part] += time.perf_counter() - started

        setattr(owner, name, timing)

    def take(self) -> dict[str, float]:
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


class Context(WorkerContext):
    """A replica's, without a parent."""

    def __init__(self, device: Device) -> None:
        self.name, self.device = "benchmark", device
        import logging

        self.log = logging.getLogger(self.name)

    def emit(self, event: Any) -> None: ...


def watched(engine: Engine[Any]) -> Parts:
    """The parts of an update of vLLM's."""
    parts = Parts()
    from headway.generator.engines.vllm import worker

    core: Any = engine._core
    parts.watch(worker.Subscriber, "attach", "fetch")
    parts.watch(worker, "repack_tied_heads", "repack")
    parts.watch(worker, "load_weights", "load")
    parts.watch(core, "differing_module", "modules")
    parts.watch(core, "reference_logprobs", "reference")
    parts.watch(core, "step", "sequence")
    return parts


def fill(engine: Engine[Any], serial: int) -> None:
    """So many requests in flight that none ends for long."""
    engine.submit(
        [
            GenerationRequest(
                request_id=f"{serial}-{index}",
                prompt_ids=tuple(prompt),
                sampling=SamplingParameters(max_tokens=CONTEXT_TOKENS, seed=serial * IN_FLIGHT + index),
            )
            for index, prompt in enumerate(prompts_of(serial, IN_FLIGHT))
        ]
    )
    for _ in range(2):
        engine.step()
    engine.take_deltas()


def steps_s(engine: Engine[Any]) -> list[float]:
    """Ordinary decode steps."""
    taken: list[float] = []
    for _ in range(STEPS_BETWEEN):
        started = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started)
    engine.take_deltas()
    return taken


def update_s(engine: Engine[Any], published: PublishedWeights) -> float:
    """From the last token before the update to the first after it. The engine has just sampled."""
    started = time.perf_counter()
    applied = engine.apply(published, "keep")
    if applied.in_flight != IN_FLIGHT:
        raise SystemExit(f"{applied.in_flight} requests crossed the update, not {IN_FLIGHT}")
    while not any(delta.version == published.version for delta in engine.take_deltas()):
        engine.step()
    return time.perf_counter() - started


def measure(engine_name: str, dtype: str, size: str, updates: int, folder: Path) -> dict[str, Any]:
    """All of one engine."""
    device = parse_device("cpu:0")
    torch.set_num_threads(1)
    config = DecoderConfig(kv_heads=2, max_positions=1024, **SIZES[size])
    sets = []
    for seed in (0, 1):
        model = build(config, dtype)
        initialise_parameters(model, seed)
        sets.append(dict(weights_of(model)))
        if seed == 0:
            save_model(model, folder)
    chosen = {"model_path": str(folder), "dtype": dtype, "slots": IN_FLIGHT, "max_context_tokens": CONTEXT_TOKENS}
    publisher = Publisher(f"weight-update-{os.getpid()}", dtype=getattr(torch, dtype))
    if engine_name == "torch":
        with publisher:
            service = GeneratorService(Context(device), **chosen)
            return measure_replica(service, publisher, sets, updates, (engine_name, dtype, config))
    settings = EngineSettings(**chosen, engine=engine_name)
    engine = build_engine(settings, Context(device))
    parts = watched(engine)
    pauses: list[float] = []
    copies: list[float] = []
    ordinary: list[float] = []
    seen: list[dict[str, float]] = []
    with publisher:
        for number in range(updates + WARM_UP):
            published = publisher.publish(number + 1, sets[(number + 1) % 2])
            if number % 8 == 0:
                engine.abort([f"{number - 8}-{index}" for index in range(IN_FLIGHT)])
                fill(engine, number)
            around = steps_s(engine)
            parts.take()
            pause_s = update_s(engine, published)
            taken = parts.take()
            around += steps_s(engine)
            step_s = statistics.median(around)
            copy_s = copied_s(published.size_bytes)
            if number >= WARM_UP:
                pauses.append(pause_s - step_s)
                copies.append(copy_s)
                ordinary.append(step_s)
                seen.append(_accounted(taken, pause_s - step_s, step_s))
        size_bytes = published.size_bytes
    return _summary(engine_name, dtype, config, size_bytes, pauses, copies, ordinary, seen)


def ticks_s(service: GeneratorService, count: int, pending: Any = None) -> tuple[list[float], int]:
    """Seconds of steps, and the index of the one in which the ``pending`` update was applied."""
    taken, applied = list[float](), -1
    for index in range(count):
        started = time.perf_counter()
        if not service.tick():
            raise SystemExit("a replica with requests did nothing")
        taken.append(time.perf_counter() - started)
        if applied < 0 and isinstance(pending, Future) and pending.done():
            applied = index
    return taken, applied


def measure_replica(
    service: GeneratorService,
    publisher: Publisher,
    sets: list[dict[str, torch.Tensor]],
    updates: int,
    described: tuple[str, str, DecoderConfig],
) -> dict[str, Any]:
    """A replica's updates: the whole time that they cost, and their pauses."""
    engine, half = service._engine, STEPS // 2
    pauses, copies, ordinary, lost, fetches = ([0.0][:0] for _ in range(5))
    for number in range(updates + WARM_UP):
        published = publisher.publish(number + 1, sets[(number + 1) % 2])
        engine.abort([f"{number - 1}-{index}" for index in range(IN_FLIGHT)])
        fill(engine, number)
        before, _ = ticks_s(service, half)
        started = time.perf_counter()
        pending = service.update_weights(published, "keep")
        announced_s = time.perf_counter() - started
        during, applied = ticks_s(service, STEPS, pending)
        after, _ = ticks_s(service, half)
        if not isinstance(pending, Future) or applied < 0 or pending.result().in_flight != IN_FLIGHT:
            raise SystemExit(f"the update wasn't applied in {STEPS} steps to {IN_FLIGHT} requests")
        copy_s, step_s = copied_s(published.size_bytes), statistics.median(before + after)
        if number >= WARM_UP:
            pauses.append(during[applied] - step_s)
            copies.append(copy_s)
            ordinary.append(step_s)
            lost.append(announced_s + sum(during) - sum(before) - sum(after))
            fetches.append(pending.result().fetch_s)
    out = _summary(*described, published.size_bytes, pauses, copies, ordinary, [])
    out["lost_over_copy"] = spread([seconds / copy for seconds, copy in zip(lost, copies, strict=True)])
    out["fetch_s"] = round(statistics.median(fetches), 4)
    print(
        f"  lost in {STEPS} steps {1000 * statistics.median(lost):.1f} ms [{1000 * min(lost):.1f}, "
        f"{1000 * max(lost):.1f}]; lost / copy {out['lost_over_copy']}; fetched beside them in {out['fetch_s']} s"
    )
    return out


def _accounted(taken: dict[str, float], pause_s: float, step_s: float) -> dict[str, float]:
    """The parts of one pause; they add up to it."""
    if not taken:
        return {}
    taken["load"] = taken.get("load", 0.0) - taken.get("repack", 0.0)
    taken["sequence"] = taken.get("sequence", 0.0) - step_s
    taken["scheduler"] = pause_s - sum(taken.values())
    return taken


_BUFFERS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def copied_s(size_bytes: int) -> float:
    """One plain copy of so many bytes, both sides warm."""
    if size_bytes not in _BUFFERS:
        _BUFFERS[size_bytes] = (torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8))
    source, target = _BUFFERS[size_bytes]
    target.copy_(source)
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def _summary(
    engine_name: str,
    dtype: str,
    config: DecoderConfig,
    size_bytes: int,
    pauses: list[float],
    copies: list[float],
    ordinary: list[float],
    seen: list[dict[str, float]],
) -> dict[str, Any]:
    over = spread([pause / copy for pause, copy in zip(pauses, copies, strict=True)])
    out: dict[str, Any] = {
        "over_copy": over,
        "pause_s": round(statistics.median(pauses), 4),
        "copy_s": round(statistics.median(copies), 4),
        "step_s": round(statistics.median(ordinary), 4),
        "bytes": size_bytes,
        "updates": len(pauses),
    }
    millions = sizes_from(config.to_mapping("float32")).parameters / 1e6
    print(
        f"{engine_name}, {millions:.1f} M parameters in {dtype} ({size_bytes / 1e6:.0f} MB), "
        f"{IN_FLIGHT} requests in flight, {len(pauses)} updates\n"
        f"  pause {1000 * out['pause_s']:.1f} ms [{1000 * min(pauses):.1f}, {1000 * max(pauses):.1f}] beside a decode "
        f"step of {1000 * out['step_s']:.1f} ms; a copy {1000 * out['copy_s']:.1f} ms "
        f"[{1000 * min(copies):.1f}, {1000 * max(copies):.1f}]\n"
        f"  pause / copy {over[0]} [{over[1]}, {over[2]}]"
    )
    if any(seen):
        parts = {part: statistics.median(one.get(part, 0.0) for one in seen) for part in PARTS}
        probes = ("modules", "reference", "sequence")
        bare = [pause - sum(one.get(part, 0.0) for part in probes) for pause, one in zip(pauses, seen, strict=True)]
        unprobed = spread([pause / copy for pause, copy in zip(bare, copies, strict=True)])
        out |= {"parts_s": {part: round(value, 4) for part, value in parts.items()}, "unprobed_over_copy": unprobed}
        print("  in parts, ms: " + ", ".join(f"{part} {1000 * value:.1f}" for part, value in parts.items()))
        print(f"  without probes: pause / copy {unprobed[0]} [{unprobed[1]}, {unprobed[2]}]")
    return out


def run_apart(python: str, engine_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [python, __file__, "--one", engine_name, "--dtype", arguments.dtype, "--core", str(arguments.core)]
    command += ["--updates", str(arguments.updates), "--model", arguments.model]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{engine_name} ended with exit code {done.returncode}: {' '.join(command)}")
    *text, result = done.stdout.splitlines()
    print("\n".join(text), flush=True)
    return json.loads(result)


def has_vllm(python: str) -> bool:
    looked = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"]
    return subprocess.run(looked, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    own = ROOT / ".venv-vllm" / "bin" / "python"
    parser.add_argument("--vllm-python", default=str(own) if own.exists() else sys.executable)
    parser.add_argument("--engines", default="torch,vllm")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--model", default="large", choices=tuple(SIZES))
    parser.add_argument("--updates", type=int, default=0, help="default: 15; with --delta 50 steps at each rate")
    parser.add_argument("--delta", action="store_true", help="versions as deltas of the one before")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few seconds: small model, 3 updates, the torch engine")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.updates, arguments.engines = "small", 3, "torch"
    arguments.updates = arguments.updates or (50 if arguments.delta else 15)
    os.sched_setaffinity(0, {arguments.core})
    if arguments.delta:
        from parts.weight_deltas import measure_deltas

        print(machine())
        print(json.dumps(measure_deltas(arguments)))
        return
    if arguments.one:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(arguments.one, arguments.dtype, arguments.model, arguments.updates, Path(scratch) / "model")
        print(json.dumps(found))
        return
    print(machine())
    engines: dict[str, Any] = {}
    for name in arguments.engines.split(","):
        python = sys.executable if name == "torch" else arguments.vllm_python
        if name == "torch" or has_vllm(python):
            engines[name] = run_apart(python, name, arguments)
        else:
            engines[name] = None
            print(f"{name}: {python} has no vLLM; docs/vllm.md says how to get one that has")
    ours = engines.get("torch") or {}
    ratios = {"lost_over_copy": ours.get("lost_over_copy"), "pause_over_copy": ours.get("over_copy")}
    print(json.dumps(ratios | {"engines": engines}))


if __name__ == "__main__":
    main()
