"""A client of `benchmarks/tinker.py` on the tinker SDK. It waits for a line on its standard input before its loop.

Arguments: address, base, kind of loop (sl, rl, single, stragglers, full), steps, seed. Prints a JSON object:
seconds of the loop and of its samples, and tokens: all that it sampled, and the sum of each step's longest response.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from typing import Any

import tinker
from tinker import types
from tinker_sizes import GROUP, LONGEST, MEDIAN_TOKENS, PROMPT, RL_SAMPLES, RL_TOKENS, SL_ROWS, SL_TOKENS, SPREAD

counts = {"tokens": 0.0, "longest_tokens": 0.0, "sampling_s": 0.0}


def supervised(training: Any, generator: random.Random, steps: int) -> None:
    for _ in range(steps):
        rows = [[generator.randrange(100, 300) for _ in range(SL_TOKENS + 1)] for _ in range(SL_ROWS)]
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(ids[:-1]),
                loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * SL_TOKENS},
            )
            for ids in rows
        ]
        futures = [
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=1e-4)),
        ]
        for future in futures:
            future.result()


def reinforced(training: Any, generator: random.Random, steps: int, kind: str) -> None:
    """``rl``: a request for each group, as the cookbook's rl_loop; others: one for each sample, as its rl.train."""
    size = GROUP if kind == "rl" else 1
    for _ in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        lengths = [RL_TOKENS] * (RL_SAMPLES // size)
        if kind == "stragglers":
            drawn = [MEDIAN_TOKENS * math.exp(SPREAD * generator.gauss(0, 1)) for _ in lengths]
            lengths = [min(LONGEST, max(1, round(length))) for length in drawn]
        began_s = time.perf_counter()
        prompts = [[*PROMPT, 100 + i] for i in range(len(lengths))]
        asked = zip(prompts, lengths, strict=True)
        futures = [sample(sampler, prompt, length, generator, size) for prompt, length in asked]
        results = [future.result() for future in futures]
        counts["sampling_s"] += time.perf_counter() - began_s
        rows = [(prompt, one) for prompt, result in zip(prompts, results, strict=True) for one in result.sequences]
        counts["tokens"] += sum(len(sequence.tokens) for _, sequence in rows)
        counts["longest_tokens"] += max(lengths)
        data = [datum(prompt, list(one.tokens), list(one.logprobs), generator) for prompt, one in rows]
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], generator: random.Random) -> types.Datum:
    ids, before = [*prompt, *tokens], len(prompt) - 1
    inputs: dict[str, Any] = {
        "target_tokens": ids[1:],
        "logprobs": [0.0] * before + logprobs,
        "advantages": [0.0] * before + [generator.gauss(0, 1)] * len(tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def sample(sampler: Any, prompt: list[int], length: int, generator: random.Random, samples: int = 1) -> Any:
    sampling = types.SamplingParams(max_tokens=length, seed=generator.randrange(1 << 30), stop=[])
    return sampler.sample(types.ModelInput.from_ints(prompt), samples, sampling)


def full(training: Any, generator: random.Random, steps: int) -> None:
    """Sample with more requests than slots all the time."""
    sampler = training.save_weights_and_get_sampling_client().result()
    futures = [sample(sampler, [*PROMPT, 100 + i % 100], 64, generator) for i in range(steps * RL_SAMPLES)]
    counts["tokens"] += sum(len(future.result().sequences[0].tokens) for future in futures)


def main() -> None:
    address, base, kind, steps, seed = sys.argv[1:6]
    service = tinker.ServiceClient(base_url=address, api_key=f"tml-{seed}")
    training = service.create_lora_training_client(base_model=base, rank=8, seed=int(seed)).result()
    generator = random.Random(int(seed))

    def run(count: int) -> None:
        if kind == "sl":
            supervised(training, generator, count)
        elif kind == "full":
            full(training, generator, count)
        else:
            reinforced(training, generator, count, kind)

    run(2)
    print("ready", flush=True)
    sys.stdin.readline()
    counts.update(dict.fromkeys(counts, 0.0))
    began_s = time.perf_counter()
    run(int(steps))
    print(json.dumps({"seconds": time.perf_counter() - began_s, **counts}), flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main()
