"""A supervised loop on the tinker SDK, unmodified: so many steps, two passes each. Prints each step's metrics."""

from __future__ import annotations

import json
import sys

import tinker
from tinker import types

address, steps = sys.argv[1], int(sys.argv[2])
service = tinker.ServiceClient(base_url=address, api_key="tml-a")
training = service.create_lora_training_client(base_model="tiny", rank=8, seed=3)
metrics: list[dict[str, float]] = []
for step in range(steps):
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([step % 50, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )
    passes = [training.forward_backward([datum], "cross_entropy") for _ in range(2)]
    optim = training.optim_step(types.AdamParams(learning_rate=(step + 1) / 1000))
    for future in passes:
        future.result()
    metrics.append(optim.result().metrics)
service.close("success").result()
sys.stdout.write("\n" + json.dumps(metrics) + "\n")
