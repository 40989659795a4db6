"""The tables of the published runs A (Prime RL) and D (slime) of `headway/planner/catalogue`, in the columns that the
case studies use. Lengths in tokens, times in seconds, money in US dollars."""

from __future__ import annotations

from headway.control.cost import TokenPrices
from headway.planner.catalogue.read import Catalogue, PublishedStep, RunTable
from headway.planner.costs import price_of

CATALOGUE = Catalogue.read()
RUN_A, RUN_D = (CATALOGUE.entry("runs", name, RunTable) for name in ("prime_rl", "slime"))
DOLLARS_PER_GPU_HOUR = price_of(CATALOGUE, RUN_A.price)
_PRICES = CATALOGUE.entry("services", RUN_A.service, TokenPrices)
TINKER_DOLLARS_PER_MTOK = {
    "prefill": _PRICES.prefill_usd_per_mtok,
    "sample": _PRICES.sample_usd_per_mtok,
    "train": CATALOGUE.known("services", RUN_A.service, "train_usd_per_mtok"),
}


def _columns(step: PublishedStep, *names: str) -> tuple[float, ...]:
    return tuple(step.printed[name] for name in names)


_TINKER = ("prefill_usd", "sample_usd", "train_usd", "service_usd", "service_usd_per_mtok")
# run A, step by step: mean prompt, response and sequence tokens, rollout seconds; dollars, tokens and dollars per
# million tokens; at Tinker's prices prefill, decode, train, total dollars, dollars per million tokens
A_STEPS = [
    (int(step.printed["prompt_tokens"]), int(step.response_tokens), int(step.sequence_tokens), step.seconds)
    for step in RUN_A.steps
]
A_COSTS = [_columns(step, "usd", "tokens", "usd_per_mtok") for step in RUN_A.steps]
A_TINKER = [_columns(step, *_TINKER) for step in RUN_A.steps]
A_BATCH, A_TRAINER_GPUS = RUN_A.batch, RUN_A.trainer_devices
A_DOLLARS_PER_HOUR = 407.04  # printed
# run D, step by step: mean response and sequence tokens, rollout seconds; at Tinker's prices as above
D_STEPS = [(int(step.response_tokens), int(step.sequence_tokens), step.seconds) for step in RUN_D.steps]
D_TINKER = [_columns(step, *_TINKER) for step in RUN_D.steps]
D_BATCH, D_TRAINER_GPUS = RUN_D.batch, RUN_D.trainer_devices
D_DOLLARS_PER_HOUR = 152.64  # printed
