"""`headway serve-tinker`: what HTTP, log and tenants cost, beside the same work in one process.

    python benchmarks/tinker.py --client /path/of/an/environment/with/tinker/bin/python
    python benchmarks/tinker.py --parts adapters cobatch        # without the SDK

A model of 0.2 M weights, trainer on core 1, engine on core 0, clients beside them, rounds interleaved. Parts:

- `loops`: `over_plain_loop`: steps/s of an RL loop by the SDK, a request for each of two groups of 8 samples of 32
  tokens as in the cookbook's rl_loop, over those of the same data through adapter, optimiser and engine in one process
  (`single_...`: with a request for each sample; `sl_over_plain_loop`: of 8 x 60 supervised tokens).
  `two_tenants_over_one`: steps/s of two clients at once over one's, the worse of both loops. `service_cpu_ms`: CPU of
  the service's own process for a step of the RL loop.
- `adapters`: `adapters8_over_1`: the worse of training's (steps/s of eight tenants in turn over those of one with the
  same calls) and sampling's (tokens/s of 64 rows with eight adapters over those with one, 48 M weights).
- `cobatch`: `cobatch_8`: passes/s of eight tenants of 16 tokens each in common passes over a pass for each
  (`cobatch_8_long`: of 192).
- `slots`: `idle_slots_4_over_1`: share of the engine's 16 slots that idle while four clients run steps of 16 samples of
  log-normal lengths (99th percentile: 8 medians), over the share with one. Idle: 1 - tokens/s over those of full slots.
  The engine's steps are held to 8 ms, whatever their rows, as on a GPU (`parts/paced_tinker.py`).
  `saving_over_predicted`: what a token costs less with four, over what `headway cost service` predicts from the times
  of the one's run (`control/shared_pool.py`).

`over_skyrl` is null: benchmarks/results/tinker-2-cores.txt says why. The last line is one JSON object.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from parts.resumed import run_parts
from parts.tinker_sizes import GROUP, PROMPT, RL_SAMPLES, RL_TOKENS, SL_ROWS, SL_TOKENS

from headway.config.adapter import AdapterConfig
from headway.control.shared_pool import TenantLoad, shared_pool
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.adapter_targets import adapted_targets
from headway.models.initialise import initialise_model
from headway.models.loading import load_model
from headway.models.lora import Lora
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.records.tenants.protocols import PassOutcome, TenantAdapter, TrainingDatum, TrainingPass
from headway.records.tokens import TokenIds
from headway.records.training import OptimiserSettings
from headway.runtime.devices import parse_device
from headway.trainer.tenants.service import TenantTrainerService

Report = dict[str, Any]
CLIENT = Path(__file__).resolve().parent / "parts" / "tinker_client.py"
SETTINGS = OptimiserSettings(learning_rate=1e-4, max_grad_norm=float("inf"))
TOKENS = range(100, 300)
SLOTS, STEP_S = 16, 8e-3


def write_model(folder: Path, width: int = 64, layers: int = 3) -> Path:
    model = folder / f"model-{width}"
    if not model.exists():
        texts = [chr(code) * 2 for code in range(0x3B1, 0x3C9)] + ["a b c d e f g h"] * 4
        sizes: dict[str, int] = {"vocabulary_size": 512, "layers": layers, "width": width, "intermediate": 4 * width}
        initialise_model(model, texts, heads=max(4, width // 64), kv_heads=max(2, width // 128), **sizes)
        config = json.loads((model / "config.json").read_text())
        assert config["vocab_size"] >= TOKENS.stop
    return model


def trainer_in(folder: Path, model: Path, **settings: Any) -> TenantTrainerService:
    context = SimpleNamespace(device=parse_device("cpu:0-1"), log=None)
    trainer = TenantTrainerService(context, model_path=str(model), store=str(folder), **settings)
    torch.set_num_threads(1)  # as on the one core that a worker has
    return trainer


# --- live: the service and clients --------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, model: Path, slots: int, step_s: float = 0.0) -> Iterator[tuple[int, str]]:
    """The service's process id and address; the engine's steps take ``step_s`` at least."""
    folder.mkdir()
    file = folder / "tinker.toml"
    file.write_text(
        f'[model]\npath = "{model}"\n[generator]\ndevices = ["cpu:0"]\nslots = {slots}\n'
        f'[trainer]\ndevices = ["cpu:1"]\n[endpoint]\naddress = "127.0.0.1:0"\n[tinker]\nstore = "{folder}/store"\n'
    )
    program = CLIENT.with_name("paced_tinker.py")
    command = [sys.executable, str(program), str(step_s), "serve-tinker", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(program.parent)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    try:
        address = next(
            line.strip().partition("=")[2] for line in process.stdout if line.startswith("export TINKER_BASE_URL=")
        )
        yield process.pid, address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def run_clients(
    arguments: argparse.Namespace, address: str, model: Path, kinds: Sequence[str], steps: int
) -> list[Report]:
    """Run clients at once; returns what each printed."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    processes = [
        subprocess.Popen(
            [str(arguments.client), "-W", "ignore", str(CLIENT), address, str(model), kind, str(steps), str(seed)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, kind in enumerate(kinds)
    ]
    for process in processes:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("ready"))
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    reports = list[Report]()
    for process in processes:
        output, _ = process.communicate()
        reports.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
    return reports


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loops(arguments: argparse.Namespace) -> Report:
    measured: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder)
        for number in range(arguments.rounds):
            with serving(folder / f"served{number}", model, 64) as (pid, address):
                for kind in ("rl", "single", "sl"):
                    used_s = cpu_s(pid)
                    (one,) = run_clients(arguments, address, model, [kind], arguments.steps)
                    used_s = cpu_s(pid) - used_s
                    two = run_clients(arguments, address, model, [kind, kind], arguments.steps)
                    plain = plain_rate(folder / f"plain-{kind}{number}", model, kind, arguments.steps)
                    rate = arguments.steps / one["seconds"]
                    both = sum(arguments.steps / report["seconds"] for report in two)
                    row = {f"{kind}_over_plain": rate / plain, f"{kind}_two": both / rate, f"{kind}_per_s": rate}
                    row[f"{kind}_cpu_ms"] = 1e3 * used_s / (arguments.steps + 2)
                    for key, value in row.items():
                        measured.setdefault(key, []).append(value)
                    print(f"round {number}: {row}", flush=True)
    medians = {key: statistics.median(values) for key, values in measured.items()}
    return {
        "over_plain_loop": medians["rl_over_plain"],
        "sl_over_plain_loop": medians["sl_over_plain"],
        "two_tenants_over_one": min(medians["rl_two"], medians["sl_two"]),
        "service_cpu_ms": medians["rl_cpu_ms"],
        "single_over_plain_loop": medians["single_over_plain"],
        "single_service_cpu_ms": medians["single_cpu_ms"],
        "loops": {key: [min(values), statistics.median(values), max(values)] for key, values in measured.items()},
    }


def slots(arguments: argparse.Namespace) -> Report:
    steps = arguments.steps * 3 // 2
    ratios, idle_rows, savings = list[float](), list[list[float]](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder)
        for number in range(arguments.rounds):
            with serving(folder / f"served{number}", model, SLOTS, STEP_S) as (_, address):
                (full,) = run_clients(arguments, address, model, ["full"], 20)
                most = full["tokens"] / full["seconds"]
                (one,) = run_clients(arguments, address, model, ["stragglers"], steps)
                four = run_clients(arguments, address, model, ["stragglers"] * 4, steps)
            together_s = max(report["seconds"] for report in four)
            rates = one["tokens"] / one["seconds"], sum(report["tokens"] for report in four) / together_s
            idle = [1 - rate / most for rate in rates]
            ratios.append(idle[1] / idle[0])
            idle_rows.append(idle)
            predicted = predicted_saving(one, steps)
            savings.append((1 - rates[0] / rates[1]) / predicted)
            print(f"round {number}: idle {idle} of {most:.0f} tokens/s, saving {savings[-1]:.2f} x {predicted:.2f}")
    return {
        "idle_slots_4_over_1": statistics.median(ratios),
        "saving_over_predicted": statistics.median(savings),
        "idle_slots": idle_rows,
        "savings": savings,
    }


def predicted_saving(one: Report, steps: int) -> float:
    """What four tenants save, by the lengths and times of one's run."""
    token_s = one["sampling_s"] / one["longest_tokens"]
    load = TenantLoad(
        slots=SLOTS,
        rollouts=RL_SAMPLES,
        mean_s=token_s * one["tokens"] / (steps * RL_SAMPLES),
        spread=8.0,
        train_s=(one["seconds"] - one["sampling_s"]) / steps,
        steps=steps,
    )
    return statistics.mean(shared_pool(load, 4, seed).saving for seed in range(10))


# --- in this process ----------------------------------------------------------------------------------------------


def plain_rate(folder: Path, model: Path, kind: str, steps: int) -> float:
    """Steps/s of a loop without a service: the tenants' trainer and an engine, called one after the other."""
    trainer, random = trainer_in(folder, model), np.random.default_rng(0)
    trainer.create("m", 0, TenantAdapter(rank=8, seed=0))
    engine = TorchEngine(load_model(model, "float32", "cpu"), slots=64, max_context_tokens=512)
    began_s = time.perf_counter()
    for step in range(-2, steps):
        if step == 0:
            began_s = time.perf_counter()
        training_pass = random_pass(random, SL_ROWS, SL_TOKENS)
        if kind != "sl":
            training_pass = sampled_pass(trainer, engine, random)
        trainer.forward_backward("m", training_pass)
        trainer.optim_step("m", step + 3, SETTINGS)
    return steps / (time.perf_counter() - began_s)


def random_pass(random: np.random.Generator, rows: int, tokens: int) -> TrainingPass:
    data = tuple(
        TrainingDatum(
            token_ids_n=random.choice(TOKENS, tokens).astype("i4"),
            inputs={"target_tokens": random.choice(TOKENS, tokens), "weights": np.ones(tokens, "f4")},
        )
        for _ in range(rows)
    )
    return TrainingPass(data=data, loss="cross_entropy")


def sampled_pass(trainer: TenantTrainerService, engine: TorchEngine, random: np.random.Generator) -> TrainingPass:
    """Publish the adapter to the engine, and sample the data of a step."""
    lora = trainer.adapter("m").lora
    copied = Lora(lora.targets)
    copied.copy_weights(lora.weights())
    engine.add_adapter("m", copied)
    prompts = {str(i): TokenIds([*PROMPT, 100 + i // GROUP]) for i in range(RL_SAMPLES)}
    engine.submit(
        [
            GenerationRequest(
                request_id=name,
                prompt_ids=ids,
                adapter="m",
                sampling=SamplingParameters(max_tokens=RL_TOKENS, seed=int(random.integers(1 << 30)), untempered=True),
            )
            for name, ids in prompts.items()
        ]
    )
    parts: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in prompts}
    while engine.open_requests:
        engine.step()
        for delta in engine.take_deltas(running=False):
            parts[delta.request_id][0].extend(delta.ids)
            parts[delta.request_id][1].extend(delta.logprobs)
    data = list[TrainingDatum]()
    for name, (response, logprobs) in parts.items():
        ids, before = np.array([*prompts[name], *response], np.int32), len(PROMPT)
        advantages = np.r_[np.zeros(before), np.full(len(response), random.normal())].astype("f4")
        inputs = {
            "target_tokens": ids[1:].astype(int),
            "logprobs": np.r_[np.zeros(before), logprobs].astype("f4"),
            "advantages": advantages,
        }
        data.append(TrainingDatum(token_ids_n=ids[:-1], inputs=inputs))
    return TrainingPass(data=tuple(data), loss="importance_sampling")


def adapters(arguments: argparse.Namespace) -> Report:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = trainer_in(folder / "trained", write_model(folder))
        training_ratios = list[float]()
        for tenant in range(8):
            trainer.create(f"m{tenant}", 0, TenantAdapter(rank=8, seed=tenant))
        for number in range(arguments.rounds + 1):
            seconds = list[float]()
            for tenants in (1, 8):
                passes = [random_pass(random, SL_ROWS, SL_TOKENS) for _ in range(arguments.steps)]
                began_s = time.process_time()
                for step, training_pass in enumerate(passes):
                    model_id = f"m{step % tenants}"
                    trainer.forward_backward(model_id, training_pass)
                    trainer.optim_step(model_id, 10**6 * number + step + 1, SETTINGS)
                seconds.append(time.process_time() - began_s)
            training_ratios.append(seconds[0] / seconds[1])
        sampling_ratios = sampling_by_adapters(folder, arguments.rounds)
    training, sampling = statistics.median(training_ratios[1:]), statistics.median(sampling_ratios)
    return {
        "adapters8_over_1": min(training, sampling),
        "training8_over_1": training,
        "sampling8_over_1": sampling,
        "adapters": {"training": training_ratios[1:], "sampling": sampling_ratios},
    }


def sampling_by_adapters(folder: Path, rounds: int) -> list[float]:
    model = load_model(write_model(folder, width=768, layers=6), "float32", "cpu")
    print(f"sampling: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M weights", flush=True)
    engine = TorchEngine(model, slots=64, max_context_tokens=128)
    targets = adapted_targets(model.config, AdapterConfig(rank=16, alpha=32.0))
    for number in range(8):
        engine.add_adapter(f"a{number}", Lora(targets, seed=number))
    ratios = list[float]()
    for _ in range(rounds):
        rates = list[float]()
        for count in (1, 8):
            engine.submit(
                [
                    GenerationRequest(
                        request_id=str(i),
                        prompt_ids=TokenIds([*PROMPT, 100 + i]),
                        adapter=f"a{i % count}",
                        sampling=SamplingParameters(max_tokens=24, seed=i),
                    )
                    for i in range(64)
                ]
            )
            engine.step()
            began_s, tokens = time.process_time(), 0
            while engine.open_requests:
                engine.step()
                tokens += sum(len(delta.ids) for delta in engine.take_deltas(running=False))
            rates.append(tokens / (time.process_time() - began_s))
        ratios.append(rates[1] / rates[0])
    return ratios


def cobatch(arguments: argparse.Namespace) -> Report:
    random = np.random.default_rng(0)
    report: Report = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder)
        trainers = {
            together: trainer_in(folder / str(together), model, co_batch=together) for together in (False, True)
        }
        for trainer in trainers.values():
            for tenant in range(8):
                trainer.create(f"m{tenant}", 0, TenantAdapter(rank=8, seed=tenant))
        for key, tokens in (("cobatch_8", 16), ("cobatch_8_long", 192)):
            ratios = list[float]()
            for number in range(arguments.rounds + 1):
                passes = [
                    [(f"m{tenant}", random_pass(random, 1, tokens)) for tenant in range(8)]
                    for _ in range(arguments.steps)
                ]
                seconds = {shared: seconds_of(trainer, passes) for shared, trainer in trainers.items()}
                if number:
                    ratios.append(seconds[False] / seconds[True])
            report[key] = statistics.median(ratios)
            report[f"{key}_rounds"] = ratios
    return report


def seconds_of(trainer: TenantTrainerService, passes: Sequence[Sequence[tuple[str, TrainingPass]]]) -> float:
    began_s = time.process_time()
    for together in passes:
        outcomes = trainer.forward_backward_together(together)
        assert all(isinstance(outcome, PassOutcome) for outcome in outcomes), outcomes
    return time.process_time() - began_s


PARTS = {"loops": loops, "adapters": adapters, "cobatch": cobatch, "slots": slots}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--client", type=Path, help="Python of an environment with the tinker SDK")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="Interleaved rounds of each part.")
    parser.add_argument("--steps", type=int, default=40, help="Steps of a loop.")
    arguments = parser.parse_args()
    if arguments.client is None and {"loops", "slots"} & {*arguments.parts}:
        parser.error("--client: the parts loops and slots need it")
    torch.set_num_threads(1)
    reports = run_parts(PARTS, arguments)
    report = {name: value for part in reports.values() for name, value in part.items()}
    print(json.dumps({**report, "over_skyrl": None}))


if __name__ == "__main__":
    main()
