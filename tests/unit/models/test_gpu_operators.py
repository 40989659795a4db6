"""The fused operators of a GPU: their plain bodies against autograd, their Triton bodies by Triton's interpreter and
compiled for sm_90, and a training step on the meta device."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.models import kernels
from headway.models.attention_plan import NOTHING, AttentionPlan
from headway.models.configuration import DecoderConfig
from headway.models.gpu import operators
from headway.models.gpu.recomputation import recomputing
from headway.models.loading import build
from headway.models.sizes import logit_rows
from tests.conformance.reference import FAMILIES, random_model
from tests.support.triton_bodies import real_calls, small_calls

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[3]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton isn't installed")
LIMITS = {"torch.float32": 1e-5, "torch.float16": 2e-3}  # of the largest number
SHARED_BYTES = 227 * 1024  # of an sm_90's multiprocessor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = qkv.unflatten(-1, (5, 8)).split((3, 1, 1), dim=1)
    parts = []
    for part, weight in ((q, q_norm), (k, k_norm)):
        even, odd = (part if weight is None else unit(part) * weight).unflatten(-1, (-1, 2)).unbind(-1)
        parts.append(torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2))
    return torch.cat((*parts, v), dim=1).flatten(1)


ANGLES = normal(6, 1, 4, seed=9)
ROTATION = ANGLES.cos(), ANGLES.sin()
TARGETS = torch.tensor([3, 0, 10])
OUTSIDE = (normal(3, 11, seed=1) > 0).scatter(1, TARGETS[:, None], False)


def over_kept_ids(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Of the targets, and entropies, with excluded ids left out instead of set to -inf."""
    rows = [row[~outside].log_softmax(-1) for row, outside in zip(scaled, OUTSIDE, strict=True)]
    chosen = [row[(~outside[:target]).sum()] for row, outside, target in zip(rows, OUTSIDE, TARGETS, strict=True)]
    return torch.stack(chosen), torch.stack([-(row.exp() * row).sum() for row in rows])


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rms_norm": (
        lambda x, w: kernels.rms_norm(x, w, 1e-6),
        lambda x, w: unit(x) * w,
        (normal(5, 12), normal(12, seed=1)),
    ),
    "rms_norm with an offset": (
        lambda x, w: kernels.rms_norm(x, w, 1e-6, 1.0),
        lambda x, w: unit(x) * (w + 1),
        (normal(5, 12), normal(12, seed=1)),
    ),
    "the stream": (
        lambda x, w: torch.cat(operators.NormedStream.apply(x, w, 1e-6, 0.0)),
        lambda x, w: torch.cat((unit(x) * w, x)),
        (normal(5, 12), normal(12, seed=1)),
    ),
    "norm_rotate": (
        lambda qkv, q, k: operators.norm_rotate(qkv, q, k, *ROTATION, 3, 1, 1e-6)[0],
        lambda qkv, q, k: rotated(qkv, q, k, *ROTATION),
        (normal(6, 40), normal(8, seed=1), normal(8, seed=2)),
    ),
    "rotation alone": (
        lambda qkv: operators.norm_rotate(qkv, None, None, *ROTATION, 3, 1, 1e-6)[0],
        lambda qkv: rotated(qkv, None, None, *ROTATION),
        (normal(6, 40),),
    ),
    "silu": (
        lambda x: operators.gated(x, False),
        lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        (normal(4, 14),),
    ),
    "gelu": (
        lambda x: operators.gated(x, True),
        lambda x: functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
        (normal(4, 14),),
    ),
    "chosen_logprobs": (
        lambda z: operators.chosen_logprobs(z, TARGETS, 0.7)[0],
        lambda z: (z / 0.7).log_softmax(-1).gather(-1, TARGETS[:, None])[:, 0],
        (4 * normal(3, 11),),
    ),
    "entropies": (
        lambda z: operators.chosen_logprobs(z, TARGETS, 0.7)[1],
        lambda z: (z / 0.7).softmax(-1).mul((z / 0.7).log_softmax(-1)).sum(-1).neg(),
        (4 * normal(3, 11),),
    ),
    "log-probabilities and entropies over kept ids": (
        lambda z: torch.cat(kernels.target_logprobs(z, TARGETS, 0.7, OUTSIDE, torch.empty(3, dtype=torch.float64))),
        lambda z: torch.cat(over_kept_ids(z / 0.7)),
        (4 * normal(3, 11),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_bodies_and_their_gradients_match_autograd(name: str) -> None:
    operator, definition, inputs = CASES[name]
    found = []
    for function in (operator, definition):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        out.backward(normal(*out.shape, seed=5))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)


def test_entropy_and_excluded_ids() -> None:
    logits = 4 * normal(3, 11)
    outside = normal(3, 11, seed=1) > 0
    outside.scatter_(1, TARGETS[:, None], False)
    masses = torch.empty(3, dtype=torch.float64)
    logprobs, entropies = kernels.target_logprobs(logits, TARGETS, 0.7, outside, masses)
    weights = (logits / 0.7).exp().masked_fill(outside, 0.0)
    shares = weights / weights.sum(-1, keepdim=True)
    exact = shares.gather(-1, TARGETS[:, None])[:, 0].log(), -torch.xlogy(shares, shares).sum(-1)
    of_set = (weights.sum(-1) / (logits / 0.7).exp().sum(-1)).log()
    for mine, right in zip((logprobs, entropies, masses), (*exact, of_set), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def run_bodies(way: str, *options: str) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": str(int(way == "interpreted"))}
    command = [sys.executable, "-m", "tests.support.triton_bodies", way, *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@NEEDS_TRITON
@pytest.mark.parametrize("options", [[], pytest.param(["--many"], marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_triton_bodies_agree_with_the_plain_ones(options: list[str]) -> None:
    """By Triton's interpreter, which is wrong in bfloat16."""
    lines = run_bodies("interpreted", *options)
    assert {line["name"] for line in lines} == {name for name, _ in small_calls(many=False)}
    assert [line for line in lines if not line["error"] <= LIMITS[line["dtype"]]] == []


@NEEDS_TRITON
@pytest.mark.parametrize("options", [[], pytest.param(["--many"], marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_triton_bodies_compile_without_spills(options: list[str]) -> None:
    lines = run_bodies("compiled", *options)
    assert len({line["name"] for line in lines}) == len({name for name, _ in real_calls(many=False)})
    assert [line for line in lines if line["spills"] or line["shared"] > SHARED_BYTES] == []


class Crossings(TorchDispatchMode):
    """Counts operators, and notes those with tensors of two devices or whose outcome the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.crossings = Counter[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        self.operators[name] += 1
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        if len(devices) > 1 or name in ("_local_scalar_dense", "nonzero", "item"):
            self.crossings.append(name)
        return out


def test_a_training_pass_on_meta_crosses_no_device_and_pads_nothing() -> None:
    """Forward and backward at the sizes of a 0.6B model, in bfloat16, with a shared prompt."""
    sizes: dict[str, Any] = {"layers": 4, "width": 1024, "heads": 16, "kv_heads": 8, "intermediate": 3072}
    sizes |= {"head_dim": 128, "vocabulary_size": 151_936, "max_positions": 8192, "rope_theta": 1e6}
    model = build(DecoderConfig(**sizes, eos_token_id=2, pad_token_id=0), torch.bfloat16, "meta")
    plan = AttentionPlan.build([128, *[512] * 8], "meta", [NOTHING, *[0] * 8])
    ids, targets = (torch.zeros(n, dtype=torch.int64, device="meta") for n in (plan.tokens, 4096))
    cos, sin = model.rope(plan.positions_n)
    assert (plan.sequences.most_queries, plan.shared_sequences.most_keys) == (512, 128)  # made once a pack
    with Crossings() as counted:
        x_nd = model.embed(ids)
        for layer in model.layers:
            x_nd = layer(x_nd, cos, sin, plan)
        logprobs, _ = kernels.target_logprobs(model.head(x_nd[:4096]), targets, 1.0)
        logprobs.sum().backward()
    assert counted.crossings == []
    views = ("view", "t", "transpose", "detach", "split", "slice", "alias", "as_strided", "unsafe_view", "expand")
    launches = {name: count for name, count in counted.operators.items() if name.strip("_") not in views}
    assert launches["headway.rms_norm"] == 2 * 4 + 1
    assert launches["_flash_attention_forward"] == launches["_flash_attention_backward"] == 2 * 4
    assert not {"index_select", "index_copy_", "cat_copy", "_to_copy"} & set(launches), launches
    assert sum(launches.values()) / 4 <= 40, launches


@pytest.mark.parametrize("family", list(FAMILIES))
def test_selective_recomputation_keeps_less_and_gives_the_same_bits(family: str) -> None:
    model = random_model(3, family=family)
    ids = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(0))
    kept, gradients = dict[str, int](), dict[str, list[Tensor]]()
    for checkpointing in ("none", "selective", "full"):
        of = copy.deepcopy(model)
        of.checkpointing = checkpointing
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = of(ids, [25, 35])
        logits.log_softmax(-1).gather(-1, ids[:, None]).mean().backward()
        kept[checkpointing] = sum(storages.values())
        gradients[checkpointing] = [p.grad for p in of.parameters() if p.grad is not None]
    for other in ("selective", "full"):
        assert all(map(torch.equal, gradients["none"], gradients[other]))


def test_a_recomputed_tensor_is_forgotten_with_its_address() -> None:
    """Another tensor at the address of an output that is gone is kept as it is."""
    weight = torch.ones(8, requires_grad=True)
    with recomputing():
        for step in range(20):
            x = torch.full((4, 8), float(step + 1), requires_grad=True)
            y = kernels.rms_norm(x, weight, 1e-6)
            del y
            z = torch.full((4, 8), 2.0, requires_grad=True)
            product = z * z.detach().clone()
            product.sum().backward()
            assert z.grad is not None
            assert torch.equal(z.grad, torch.full((4, 8), 2.0))


def test_chunks_of_logits() -> None:
    assert logit_rows(151_936, on_gpu=True) == 4096
    assert logit_rows(151_936, on_gpu=False) == 220
    assert logit_rows(1000, on_gpu=True) == logit_rows(1000, on_gpu=False) == 33_554
