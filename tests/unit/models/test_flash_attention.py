"""Attention of packs by a GPU's flash kernels, which tests/support/flash_stand_in.py stands in for; the properties of
shared prefixes are in tests/unit/algorithms/test_shared_prefix.py."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from headway.models.attention import attention_way
from headway.models.attention_plan import NOTHING, AttentionPlan
from headway.models.configuration import Scores
from headway.models.gpu import attention as gpu_attention
from headway.models.gpu.attention import FLASH, Flash, flash_attention
from tests.support import flash_stand_in
from tests.unit.algorithms.test_shared_prefix import dense_attention, random_rows

PLAIN = Scores(scale=0.4)
SHARED = AttentionPlan.build([7, 4, 3, 1, 4], continues=[NOTHING, NOTHING, 1, 1, 3])
SEPARATE = AttentionPlan.build([7, 4, 3])


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_stand_in_has_the_signature_of_torchs_operator(name: str) -> None:
    schema = getattr(FLASH, name)._schema
    parameters = inspect.signature(getattr(flash_stand_in, name)).parameters
    assert [(argument.name, argument.kwarg_only) for argument in schema.arguments] == [
        (parameter.name, parameter.kind is parameter.KEYWORD_ONLY) for parameter in parameters.values()
    ]


@pytest.mark.parametrize(
    ("changes", "way", "reason"),
    [
        ({}, "flash", ""),
        ({"device_type": "cpu", "scores": Scores(scale=64**-0.5)}, "cpu", ""),
        ({"device_type": "cpu", "scores": Scores(scale=1.0)}, "cpu", ""),
        ({"device_type": "cpu", "scores": Scores(scale=1.0, window=9)}, "padded", "windows"),
        ({"dtype": torch.float16}, "flash", ""),
        ({"dtype": torch.float32}, "padded", "bfloat16 and float16, not torch.float32"),
        ({"gpu": (7, 5)}, "padded", "compute capability 8.0"),
        ({"head_dim": 20}, "padded", "heads of 8, 16 ... 256, not 20"),
        ({"head_dim": 512}, "padded", "not 512"),
        ({"head_dim": 256}, "flash", ""),
        ({"head_dim": 256, "gpu": (8, 9)}, "padded", "no gradients for heads of 256"),
        ({"scores": Scores(scale=1.0, softcap=30.0)}, "padded", "no soft caps"),
        ({"scores": Scores(scale=1.0, window=3)}, "padded", "shared prefix"),
        ({"scores": Scores(scale=1.0, window=3), "plan": SEPARATE}, "flash", ""),
    ],
)
def test_the_way_is_chosen_by_name(changes: dict[str, Any], way: str, reason: str) -> None:
    """What flash attention lacks keeps the padded way."""
    call: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "head_dim": 64}
    call |= {"plan": SHARED, "scores": PLAIN, "gpu": (9, 0)} | changes
    chosen, given = attention_way(**call)
    assert chosen == way
    assert reason in given
    assert bool(given) == (way == "padded")


def test_prefixes_are_computed_in_one_call_without_copies() -> None:
    """Two calls for a pack: all pieces, and all that continue a prefix, whose keys are a view of the packed rows."""
    lengths, continues = [5, 6, 3, 4, 2, 8], [NOTHING, NOTHING, 0, 0, 1, 1]
    rows, plan = random_rows(lengths), AttentionPlan.build(lengths, continues=continues)
    calls: list[tuple[Any, ...]] = []

    def watched(*inputs: Any, **how: Any) -> Any:
        calls.append(inputs)
        return flash_stand_in.forward(*inputs, **how)

    out = flash_attention(rows, 4, 2, 6, plan, PLAIN, Flash(watched, flash_stand_in.backward))
    torch.testing.assert_close(out, dense_attention(rows, lengths, continues, PLAIN))
    assert len(calls) == 2
    storage = rows.untyped_storage().data_ptr()
    assert {part.untyped_storage().data_ptr() for call in calls for part in call[:3]} == {storage}
    assert [call[3].tolist() for call in calls] == [[0, 5, 11, 14, 18, 20, 28], [0, 7, 17]]
    assert calls[1][4].tolist() == [0, 5, 11]
    assert "_buckets" not in vars(plan), "no padded buckets are made"


def test_a_lost_merge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: pieces that don't see their prefix."""
    rows = random_rows(list(SHARED.lengths))
    monkeypatch.setattr(gpu_attention, "merge_attention", lambda *_: None)
    out = flash_attention(rows, 4, 2, 6, SHARED, PLAIN, flash_stand_in.FLASH)
    expected = dense_attention(rows, list(SHARED.lengths), list(SHARED.continues), PLAIN)
    assert not torch.allclose(out, expected, atol=1e-2)
