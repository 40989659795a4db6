"""A user's program on the tinker SDK, unmodified: both loops, checkpoints and questions. Prints a JSON object.

Run with the SDK's folder on PYTHONPATH, and a service's address and a key as arguments. The stand-ins of
``tinker_service.py`` are behind the service, so numbers are theirs.
"""

from __future__ import annotations

import json
import sys
import urllib.request

import numpy as np
import tinker
from tinker import types

address, key = sys.argv[1:]
seen: dict[str, object] = {}
service = tinker.ServiceClient(base_url=address, api_key=key)
seen["models"] = [model.model_name for model in service.get_server_capabilities().supported_models]
training = service.create_lora_training_client(base_model="tiny", rank=8, seed=3)
seen["info"] = [training.get_info().model_data.arch, training.get_info().lora_rank]


def datum(token: int, **inputs: object) -> types.Datum:
    fields = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints([token, 2, 3]), loss_fn_inputs=fields)


# Supervised: both are posted before either is awaited; then more data than a request takes, in chunks.
for step in range(3):
    forward = training.forward_backward([datum(step)], "cross_entropy")
    optim = training.optim_step(types.AdamParams(learning_rate=0.01 * (step + 1)))
    logprobs = forward.result().loss_fn_outputs[0]["logprobs"].tolist()
    seen["steps"] = [*seen.get("steps", []), len(logprobs), optim.result().metrics]
many = training.forward_backward([datum(number % 90) for number in range(2500)], "cross_entropy").result()
seen["many"] = len(many.loss_fn_outputs)
wide = np.array([[2, 3], [3, 4], [4, 5]])
outputs = training.forward([datum(1, target_tokens=wide, weights=np.ones((3, 2), "f4")), datum(2)], "cross_entropy")
seen["shapes"] = [output["logprobs"].shape for output in outputs.result().loss_fn_outputs]
custom = training.forward_backward_custom(
    [types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]})],
    lambda data, logprobs: (sum(row.square().sum() for row in logprobs), {"size:sum": float(len(data))}),
)
seen["custom"] = custom.result().metrics["size:sum"]
training.optim_step(types.AdamParams(learning_rate=0.1)).result()

# Reinforcement learning: a sampler of the newest weights, its samples, and a step on them.
sampler = training.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints([7, 8])
samples = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=2, seed=1)).result().sequences
seen["samples"] = [[list(sample.tokens), sample.stop_reason] for sample in samples]
seen["prompt_logprobs"] = sampler.compute_logprobs(prompt).result()[0]
advantages = datum(1, logprobs=[-1.0] * 3, advantages=[0.5] * 3)
advantages = types.Datum(
    model_input=advantages.model_input,
    loss_fn_inputs={name: advantages.loss_fn_inputs[name] for name in ("target_tokens", "logprobs", "advantages")},
)
training.forward_backward([advantages], "ppo", {"clip_low_threshold": 0.8}).result()
training.optim_step(types.AdamParams(learning_rate=0.2)).result()
try:
    training.forward_backward([advantages], "stable_reinforce").result()
except tinker.RequestFailedError as error:
    seen["refused"] = str(error)

# Checkpoints: saved, listed, published, loaded with and without the optimiser, deleted.
path = training.save_state("first", ttl_seconds=7200).result().path
sampled_path = training.save_weights_for_sampler("first").result().path
external_path = training.save_weights_external("first").result().path
seen["paths"] = [path, sampled_path, external_path]
rest = service.create_rest_client()
seen["checkpoints"] = sorted(
    checkpoint.checkpoint_id for checkpoint in rest.list_user_checkpoints().result().checkpoints
)
seen["weights"] = [rest.get_weights_info_by_tinker_path(path).result().lora_rank]
rest.publish_checkpoint_from_tinker_path(path).result()
rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
found = rest.list_checkpoints(path.split("/")[2]).result().checkpoints
seen["published"] = sorted([entry.checkpoint_id, entry.public, entry.expires_at is None] for entry in found)
run = rest.get_training_run_by_tinker_path(path).result()
seen["run"] = [run.lora_rank, run.last_checkpoint.tinker_path, len(rest.list_training_runs().result().training_runs)]
(url,) = rest.get_external_weights_urls(external_path).result().urls.values()
seen["download"] = urllib.request.urlopen(url).read().decode()
for resumed in (
    service.create_training_client_from_state(path),
    service.create_training_client_from_state_with_optimizer(path),
):
    resumed.forward_backward([datum(4)], "cross_entropy").result()
    resumed.optim_step(types.AdamParams()).result()
frozen = service.create_sampling_client(model_path=sampled_path)
seen["frozen"] = list(frozen.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result().sequences[0].tokens)
base = service.create_sampling_client(base_model="tiny")
seen["base"] = list(base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result().sequences[0].logprobs)
rest.unpublish_checkpoint_from_tinker_path(path).result()
rest.delete_checkpoint_from_tinker_path(path).result()
seen["left"] = len(rest.list_user_checkpoints().result().checkpoints)
session = rest.list_sessions().result().sessions
seen["session"] = [len(session), len(rest.get_session(session[0]).result().training_run_ids)]
service.close("success").result()
sys.stdout.write("\n" + json.dumps(seen) + "\n")
