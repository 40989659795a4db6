"""Tokens and experts divided among ranks: gradients are those of one rank, in every layout, and planted faults show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_models import Case, Layout, alone, alone_hf, divided, divided_hf, kept_bytes, refusal
from division_faults import FAULTS
from rank_pool import RankPool
from tiers import first
from tiny_hub import PACKED, make_hub_model, make_seeing_model
from torch import Tensor

from headway.models.families import FAMILIES

pytestmark = pytest.mark.real

LIMIT = 2e-6  # of the largest gradient, in float32
LAYOUTS = {
    "cp2": Layout(2, context=2),
    "ep2": Layout(2, experts=2),
    "cp2 and ep2": Layout(2, context=2, experts=2),  # the same two ranks
    "cp4": Layout(4, context=4),  # key/value heads are copied
    "2 x cp2": Layout(4, context=2),
    "ep4": Layout(4, experts=4),
    "2 x ep2": Layout(4, experts=2),
    "cp2 x ep2": Layout(4, context=2, experts=2, crossed=True),
}
MIXTURE = Case("qwen3_moe")
CASES = {
    "qwen3": Case("qwen3"),
    "gemma3": Case("gemma3", shared=True),  # windows
    "gemma2": Case("gemma2"),  # soft caps
    "mixture": MIXTURE,
    "shared prefixes": replace(MIXTURE, shared=True),
    "sequence loss": replace(MIXTURE, loss="sequence"),
    "full checkpointing": replace(MIXTURE, checkpointing="full"),
    "selective checkpointing": replace(MIXTURE, checkpointing="selective", shared=True, loss="sequence"),
    "replay": replace(MIXTURE, replay=True, shared=True),
    "adapter": replace(MIXTURE, adapter=True, loss="sequence", checkpointing="full"),
    "fewer tokens than ranks": replace(MIXTURE, batches="short", replay=True),
    "loss at the end": replace(MIXTURE, batches="late", loss="sequence"),
    "experts without tokens": replace(MIXTURE, batches="two experts", replay=True),
    "native kernels": replace(MIXTURE, batches="two experts", replay=True, native=True),
}
# Of the layouts after the first, what differs between layouts alone; the rest is in the slow tier.
SOME = ("gemma2", "mixture", "selective checkpointing", "fewer tokens than ranks", "experts without tokens")
FORMS = [
    pytest.param(layout, case, marks=() if layout == "cp2" or case in SOME else pytest.mark.slow)
    for layout, shape in LAYOUTS.items()
    for case, settings in CASES.items()
    if shape.experts == 1 or settings.family == "qwen3_moe"
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    torch.set_num_threads(1)
    opened = {size: RankPool(size) for size in (2, 4)}
    yield opened
    for pool in opened.values():
        pool.close()


def worst(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference over the largest gradient, and whose it is."""
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max((float((gradients[name] - expected[name]).abs().max()) / largest, name) for name in expected)


@pytest.mark.parametrize(("layout", "case"), FORMS)
def test_gradients_of_a_layout_equal_one_ranks(pools: dict[int, RankPool], layout: str, case: str) -> None:
    shape, settings = LAYOUTS[layout], CASES[case]
    losses, expected = alone(settings)
    replies = pools[shape.ranks].run(divided, shape, settings)
    difference, name = worst(replies[0][1], expected)
    print(f"{layout}, {case}: {difference:.1e} ({name})")
    assert difference <= LIMIT
    copies = shape.ranks // shape.context
    for rank, (of_rank, _, exchanges) in enumerate(replies):
        assert of_rank[: len(losses)] == replies[rank - rank % shape.context][0][: len(losses)]  # bit for bit
        own = losses[rank // shape.context :: copies]
        assert of_rank[: len(own)] == pytest.approx(own, rel=1e-4, abs=1e-4)
        assert exchanges == replies[0][2] > 0


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("layout", ["cp4", "ep4", "cp2 x ep2"])
def test_division_is_exact_in_float64(pools: dict[int, RankPool], layout: str, adapter: bool) -> None:
    settings = replace(MIXTURE, dtype="float64", shared=True, replay=True, loss="sequence", adapter=adapter)
    gradients = pools[4].run(divided, LAYOUTS[layout], settings)[0][1]
    assert worst(gradients, alone(settings)[1])[0] <= 1e-14


@pytest.mark.parametrize("layout", ["cp4", "ep4"])
def test_bfloat16_is_as_near_as_its_rounding(pools: dict[int, RankPool], layout: str) -> None:
    settings = replace(MIXTURE, dtype="bfloat16")
    gradients = pools[4].run(divided, LAYOUTS[layout], settings)[0][1]
    assert worst(gradients, alone(settings)[1])[0] <= 2e-2


def test_a_layout_repeats_its_bits(pools: dict[int, RankPool]) -> None:
    settings = replace(MIXTURE, shared=True, loss="sequence")
    first, second = (pools[4].run(divided, LAYOUTS["cp2 x ep2"], settings)[0][1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# A layout and a case in which a fault shows.
PLANTED = {
    "gather sums": ("cp2", "qwen3"),
    "gather in the ranks' order": ("cp2", "sequence loss"),
    "each rank has its own loss": ("cp2", "sequence loss"),
    "slices begin at position 0": ("cp2", "qwen3"),
    "copied heads without gradient": ("cp4", "qwen3"),
    "gradients aren't sent back": ("ep2", "mixture"),
    "gradients are averaged": ("ep2", "mixture"),
    "replay of the first rows": ("cp2", "replay"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_gradients(pools: dict[int, RankPool], fault: str) -> None:
    layout, case = PLANTED[fault]
    shape, settings = LAYOUTS[layout], CASES[case]
    gradients = pools[shape.ranks].run(divided, shape, settings, fault)[0][1]
    assert worst(gradients, alone(settings)[1])[0] > 100 * LIMIT


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    "kind", first(2, ["Olmo3", "DeepseekV3", *sorted(PACKED.keys() - {"Olmo3", "DeepseekV3", "GptOss"})])
)
def test_models_of_transformers_divide_their_tokens(
    pools: dict[int, RankPool], tmp_path: Path, kind: str, checkpointing: str
) -> None:
    folder = make_hub_model(tmp_path, kind)
    replies = pools[2].run(divided_hf, LAYOUTS["cp2"], folder, checkpointing)
    losses, expected = alone_hf(folder, checkpointing)
    assert worst(replies[0][1], expected)[0] <= LIMIT
    assert replies[0][0] == replies[1][0] == pytest.approx(losses, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("tokens", [1024, pytest.param(32768, marks=pytest.mark.long)])
def test_a_document_needs_the_ranks_share_of_activations(pools: dict[int, RankPool], tokens: int) -> None:
    of_one = kept_bytes(None, tokens)
    shares = [kept / of_one for kept in pools[4].run(kept_bytes, LAYOUTS["cp4"], tokens)]
    print(shares)
    assert max(shares) <= 0.3


OTHERS = f"; valid: 1, or an architecture without that, such as {', '.join(FAMILIES)}"
REFUSED: dict[str, tuple[Layout, Any, str]] = {
    "heads": (
        Layout(4, context=4),
        lambda folder: make_hub_model(folder, "Olmo2"),
        "trainer.context_parallel = 4: 4 query heads and 2 key/value heads can't be divided among 4 ranks; valid: 1, 2",
    ),
    "sinks": (
        Layout(2, context=2),
        lambda folder: make_hub_model(folder, "GptOss"),
        "trainer.context_parallel = 2: not supported for transformers' gpt_oss: attention sinks "
        "(model.layers.0.self_attn.sinks) are of all heads" + OTHERS,
    ),
    "a state over tokens": (
        Layout(2, context=2),
        lambda folder: make_hub_model(folder, "Bamba"),
        "trainer.context_parallel = 2: not supported for transformers' bamba: documents aren't packed" + OTHERS,
    ),
    "pictures": (
        Layout(2, context=2),
        make_seeing_model,
        "trainer.context_parallel = 2: not supported for transformers' gemma3: rows with pictures aren't packed"
        + OTHERS,
    ),
    "experts of transformers": (
        Layout(2, experts=2),
        lambda folder: make_hub_model(folder, "Olmoe"),
        "trainer.expert_parallel = 2: not supported for models of transformers; valid: 1, or Qwen3MoeForCausalLM, "
        "MixtralForCausalLM in Headway's implementation",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_cannot_be_divided_are_refused_by_name(
    pools: dict[int, RankPool], tmp_path: Path, reason: str
) -> None:
    layout, make, message = REFUSED[reason]
    assert pools[layout.ranks].run(refusal, layout, make(tmp_path)) == [message] * layout.ranks
