"""A user's program on the tinker SDK that survives its own kills: it goes on from its last checkpoint.

Arguments: address, key, base, steps, file of its progress. Each step has data of its own. Prints a JSON object by step:
losses and samples; and the loss of the last weights.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import tinker
from tinker import types

address, key, base, steps, progress = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5])
service = tinker.ServiceClient(base_url=address, api_key=key)
seen: dict[str, Any] = {"step": 0, "losses": {}, "sampled": {}}
if progress.exists():
    seen = json.loads(progress.read_text())
    training = service.create_training_client_from_state_with_optimizer(seen["path"]).result()
else:
    training = service.create_lora_training_client(base_model=base, rank=8, seed=3).result()


def data_of(step: int) -> list[types.Datum]:
    generator = random.Random(step)
    rows = [[generator.randrange(2, 15) for _ in range(9)] for _ in range(3)]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [float(number % 2) for number in range(8)]},
        )
        for ids in rows
    ]


for step in range(seen["step"], steps):
    passes = [training.forward_backward(data_of(2 * step + part), "cross_entropy") for part in range(2)]
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
    seen["losses"][str(step)] = [future.result().metrics["loss:sum"] for future in passes]
    stepped.result()
    sampler = training.save_weights_and_get_sampling_client().result()
    sampling = types.SamplingParams(max_tokens=12, seed=step, stop=[])
    samples = sampler.sample(types.ModelInput.from_ints([3, 5, 7]), 3, sampling).result().sequences
    seen["sampled"][str(step)] = [list(sample.tokens) for sample in samples]
    if step % 4 == 3:
        seen["path"] = training.save_state(f"after-{step}", overwrite=True).result().path
        seen["step"] = step + 1
        scratch = progress.with_suffix(".new")
        scratch.write_text(json.dumps(seen))
        scratch.rename(progress)
seen["last"] = training.forward(data_of(-1), "cross_entropy").result().metrics["loss:sum"]
service.close("success").result()
sys.stdout.write("\n" + json.dumps(seen) + "\n")
