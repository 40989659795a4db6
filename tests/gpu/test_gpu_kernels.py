"""The Triton bodies of the fused operators and flash attention on a GPU, against their plain bodies on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headway.kernels.device_queries import query_gpus
from headway.models.attention import packed_attention
from headway.models.attention_plan import NOTHING, AttentionPlan
from headway.models.configuration import Scores
from headway.models.gpu import operators
from tests.support.triton_bodies import flat, plain, real_calls, small_calls

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not query_gpus(), reason="this machine has no GPU"),  # with one, a CPU build of torch fails
]
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest number, or of 1


def test_triton_bodies_on_the_card() -> None:
    for name, arguments in (*small_calls(many=True), *real_calls(many=True)):
        outputs: list[list[Tensor]] = []
        for device in ("cpu", "cuda"):
            there = tuple(x.to(device, copy=True) if isinstance(x, Tensor) else x for x in arguments)
            given = plain(name, *there) if device == "cpu" else getattr(operators, name)(*there)
            outputs.append([x.cpu() for x in flat(name, given, there)])
        limit = LIMITS[next(x.dtype for x in arguments if isinstance(x, Tensor))]
        for right, mine in zip(*outputs, strict=True):
            kept = right.isfinite()
            assert torch.equal(kept, mine.isfinite()), name
            if kept.any():
                apart = (right[kept].double() - mine[kept].double()).abs().max()
                assert apart <= limit * right[kept].abs().max().double().clamp(min=1), name


@pytest.mark.parametrize("scores", [Scores(scale=0.1), Scores(scale=0.1, window=40), Scores(scale=0.1, softcap=20.0)])
@pytest.mark.parametrize("continues", [[NOTHING] * 6, [NOTHING, NOTHING, 0, 0, 0, 3]])
def test_attention_of_packs_on_the_card(scores: Scores, continues: list[int]) -> None:
    lengths = [130, 7, 64, 1, 100, 33]
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), (8 + 2 * 2) * 64, generator=generator).bfloat16()
    found = list[tuple[Tensor, Tensor]]()
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        rows: Any = qkv.to(device, dtype, copy=True).requires_grad_()
        out = packed_attention(rows, 8, 2, 64, AttentionPlan.build(lengths, device, continues), scores)
        out.sum().backward()
        found.append((out.detach().double().cpu(), rows.grad.double().cpu()))
    for exact, mine in zip(*found, strict=True):
        assert (exact - mine).abs().max() <= 3e-2 * exact.abs().max()
