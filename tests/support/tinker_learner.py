"""A user's program on the tinker SDK, unmodified, against a real service: supervised steps, then a loop that samples.

Arguments: address, key, base, steps of each loop. Prints a JSON object: losses, what was sampled, and how far the
sampler's log-probabilities are from the trainer's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker import types

address, key, base, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
service = tinker.ServiceClient(base_url=address, api_key=key)
training = service.create_lora_training_client(base_model=base, rank=8, seed=3)
seen: dict[str, Any] = {
    "sdk": [int(word) for word in tinker.__version__.split(".")[:2]],
    "losses": [],
    "norms": [],
    "sampled": [],
    "differences": [],
    "metrics": [],
}


def datum(ids: Sequence[int], **inputs: Any) -> types.Datum:
    """The tokens but the last, with inputs at each of them; targets are the next tokens."""
    inputs = {"target_tokens": list(ids[1:]), **{name: list(map(float, one)) for name, one in inputs.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=inputs)


def trained_logprobs(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    data = [datum(ids, weights=[1.0] * (len(ids) - 1)) for ids in rows]
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    return [np.asarray(output["logprobs"].tolist()) for output in outputs]


for _ in range(steps):
    data = [datum([3, 5, 7, 9, 11, 13, 2 + number], weights=[0, 0, 1, 1, 1, 1]) for number in range(3)]
    forward = training.forward_backward(data, "cross_entropy")
    optim = training.optim_step(types.AdamParams(learning_rate=0.02, grad_clip_norm=1.0))
    seen["losses"].append(forward.result().metrics["loss:sum"])
    seen["norms"].append(optim.result().metrics["grad_norm:mean"])

prompt = types.ModelInput.from_ints([3, 5, 7])
oldest: tinker.SamplingClient | None = None
for step in range(steps):
    sampler = training.save_weights_and_get_sampling_client()
    settings = types.SamplingParams(max_tokens=6, temperature=0.7 if step % 2 else 1.0, top_k=20, seed=step)
    oldest = oldest or sampler
    sequences = sampler.sample(prompt, 4, settings).result().sequences
    rows = [[3, 5, 7, *sequence.tokens] for sequence in sequences]
    seen["sampled"].append(rows)
    for sequence, logprobs in zip(sequences, trained_logprobs(rows), strict=True):
        difference = np.abs(np.asarray(sequence.logprobs) - logprobs[2:]).max()
        seen["differences"].append(float(difference))
    data: list[types.Datum] = []
    for number, (ids, sequence) in enumerate(zip(rows, sequences, strict=True)):
        advantages = [0.0, 0.0] + [float(number - 1.5)] * len(sequence.tokens)
        data.append(datum(ids, logprobs=[0.0, 0.0, *sequence.logprobs], advantages=advantages))
    forward = training.forward_backward(data, "ppo")
    optim = training.optim_step(types.AdamParams(learning_rate=0.005))
    seen["metrics"].append(forward.result().metrics)
    optim.result()

ids = [3, 5, 7, 9, 11, 13, 2]
newest = training.save_weights_and_get_sampling_client()
scored = newest.compute_logprobs(types.ModelInput.from_ints(ids)).result()
seen["prompt"] = [scored[0], float(np.abs(np.asarray(scored[1:]) - trained_logprobs([ids])[0]).max())]
top = newest.sample(
    types.ModelInput.from_ints(ids), 1, types.SamplingParams(max_tokens=3, temperature=0.0),
    include_prompt_logprobs=True, topk_prompt_logprobs=3,
).result()  # fmt: skip
seen["top"] = [entry and [list(pair) for pair in entry] for entry in top.topk_prompt_logprobs]
assert oldest is not None  # by now others have taken its place in the engines
repeated = oldest.sample(prompt, 4, types.SamplingParams(max_tokens=6, top_k=20, seed=0)).result().sequences
seen["repeated"] = [[3, 5, 7, *sequence.tokens] for sequence in repeated]
first = service.create_sampling_client(base_model=base)
seen["base"] = float(np.abs(np.asarray(first.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])
                            - trained_logprobs([ids])[0]).max())  # fmt: skip
if seen["sdk"] >= [0, 26]:  # 0.25 knows neither the kind nor close
    shared = training.save_weights_and_get_sampling_client(kind="inflight")
    former = np.asarray(shared.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])
    training.forward_backward([datum(ids, weights=[1] * 6)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    training.save_weights_and_get_sampling_client(kind="inflight").result()  # the first one has these weights too
    renewed = np.asarray(shared.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])
    seen["inflight"] = [float(np.abs(renewed - one).max()) for one in (trained_logprobs([ids])[0], former)]
path = training.save_state("end").result().path
seen["path"] = path
again = service.create_training_client_from_state_with_optimizer(path)
seen["again"] = again.forward([datum(ids, weights=[1] * 6)], "cross_entropy").result().metrics["loss:sum"]
seen["same"] = training.forward([datum(ids, weights=[1] * 6)], "cross_entropy").result().metrics["loss:sum"]
if seen["sdk"] >= [0, 26]:
    service.close("success").result()
sys.stdout.write("\n" + json.dumps(seen) + "\n")
