"""Steps of ``gpu_measure.py`` that compare with float64: kernels and their gradients, the decoding step.

Shapes: n packed tokens, m keys, h heads, e head dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.parts.gpu_load import (
    Settings,
    configuration,
    copy_bandwidth,
    give,
    profile,
    random_decoder,
    requests,
    timed,
)
from headway.generator.engines.sampling import RowSampling, counter_uniform, sample_tokens
from headway.generator.engines.torch.engine import TorchEngine
from headway.models import kernels
from headway.models.attention import packed_attention
from headway.models.attention_plan import NOTHING, AttentionPlan
from headway.models.configuration import DecoderConfig, Scores
from headway.models.decoder import Decoder
from headway.models.loading import DTYPES, build, weights_of
from headway.records.generation import GenerationRequest, TokenDelta
from headway.trainer.learner import token_logprobs
from headway.weights.shared_memory import Publisher

# Largest difference, in units of the largest number of the float64 result. A product of d terms adds rounding errors.
KERNEL_LIMITS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
LOGPROB_LIMITS = {"float32": 1e-3, "bfloat16": 0.2}  # nats; of an H200's runs: 2.9e-6, 0.029
EPSILON = 1e-6
Function = Callable[..., Tensor]


class Kernel(NamedTuple):
    """A kernel, the same in float64, and random inputs: floating ones get gradients."""

    kernel: Function
    exact: Function
    inputs: tuple[Tensor, ...]
    has_gradient: bool = True


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def _rotated(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """Norm and rotary embedding of neighbouring pairs, without complex numbers."""
    rows = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
    parts = []
    for part, weight in ((q, q_norm), (k, k_norm)):
        even, odd = (_unit(part) * weight).unflatten(-1, (-1, 2)).unbind(-1)
        parts.append(torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2))
    return torch.cat((*parts, v), dim=1).flatten(1)


def _attended(qkv: Tensor, heads: int, kv_heads: int, plan: AttentionPlan) -> Tensor:
    """Attention over one dense mask: a piece sees itself causally, and the piece that it continues."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
    piece_n = torch.repeat_interleave(torch.arange(len(plan.lengths)), torch.tensor(plan.lengths)).to(qkv.device)
    prefix_n = torch.tensor(plan.continues, device=qkv.device)[piece_n]
    rows = torch.arange(len(qkv), device=qkv.device)
    visible = (piece_n[:, None] == piece_n) & (rows[:, None] >= rows) | (prefix_n[:, None] == piece_n)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("nhe,mhe->hnm", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhe->nhe", weights, v).flatten(1)


def _logit_cases(settings: Settings, c: DecoderConfig, n: int, normal: Callable[..., Tensor]) -> dict[str, Kernel]:
    """The kernels of logits, for a pack of ``n`` tokens; ``normal``: draws a tensor of these sizes."""
    generator = torch.Generator(settings.device).manual_seed(2)
    targets = torch.randint(c.vocabulary_size, (n // 8,), generator=generator, device=settings.device)
    uniform = torch.from_numpy(counter_uniform(np.arange(64, dtype=np.uint64), np.zeros(64, np.int64)))
    how = RowSampling(uniform.to(settings.device), None)

    def of_logits(logits: Tensor) -> Tensor:  # whose memory the gradient takes
        return kernels.target_logprobs(1.0 * logits, targets, 0.7)[0]

    def chosen(hidden: Tensor, weight: Tensor) -> Tensor:
        model: Any = SimpleNamespace(head=lambda x: x @ weight.t(), config=SimpleNamespace(vocabulary_size=len(weight)))
        return token_logprobs(model, hidden, targets, 1.0, chunk_logits=len(weight) * (n // 32))[0]

    def sampled(logits: Tensor) -> Tensor:
        """The token's cumulative mass up to half of its own, less the random number, where it may differ at all."""
        cdf, ids = torch.softmax(logits.double(), -1).cumsum(-1), sample_tokens(logits, how).tokens[0].long()[:, None]
        high = cdf.gather(-1, ids)[:, 0]
        low = torch.where(ids[:, 0] > 0, cdf.gather(-1, (ids - 1).clamp(min=0))[:, 0], 0.0)
        return 1 + (how.uniform_n - high).clamp(min=0) + (low - how.uniform_n).clamp(min=0)

    return {
        "token_logprobs": Kernel(
            chosen,
            lambda x, w: torch.log_softmax(x @ w.t(), -1).gather(-1, targets[:, None])[:, 0],
            (normal(n // 8, c.width), normal(c.vocabulary_size, c.width) * c.width**-0.5),
        ),
        "target_logprobs": Kernel(
            of_logits,
            lambda z: torch.log_softmax(z / 0.7, -1).gather(-1, targets[:, None])[:, 0],
            (3 * normal(n // 8, c.vocabulary_size),),
        ),
        "sample": Kernel(
            sampled,
            lambda logits: torch.ones_like(logits[:, 0]),
            (normal(64, c.vocabulary_size) * 3,),
            has_gradient=False,
        ),
    }


def kernel_cases(settings: Settings, size: str) -> dict[str, Kernel]:
    """The decoder's kernels at the shapes of a model of ``size``; inputs in float32."""
    c = configuration(size)
    n = 96 if settings.quick else 2048
    pieces = [n // 8, n // 4, n // 8, n // 4, n // 4]  # three continue the first
    plan = AttentionPlan.build(pieces, settings.device, [NOTHING, NOTHING, 0, 0, 0])
    generator = torch.Generator(settings.device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=settings.device)

    angles = torch.rand(n, 1, c.head_dim // 2, generator=generator, device=settings.device) * 6
    cos, sin, sizes = angles.cos(), angles.sin(), (c.heads, c.kv_heads, c.head_dim, EPSILON)
    joint = (c.heads + 2 * c.kv_heads) * c.head_dim
    scale = Scores(scale=c.head_dim**-0.5)
    matrix = normal(c.intermediate, c.width) * c.width**-0.5

    def norm_and_stream(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(kernels.normed_stream(x, w, EPSILON))

    heads = c.heads, c.kv_heads
    return {
        "rms_norm": Kernel(
            lambda x, w: kernels.rms_norm(x, w, EPSILON),
            lambda x, w: _unit(x) * w,
            (normal(n, c.width), normal(c.width)),
        ),
        "normed_stream": Kernel(
            norm_and_stream,
            lambda x, w: torch.cat((_unit(x) * w, x)),
            (normal(n, c.width), normal(c.width)),
        ),
        "norm_rotate": Kernel(
            lambda qkv, q, k: kernels.norm_rotate(qkv.clone(), q, k, cos, sin, sizes),
            lambda qkv, q, k: _rotated(qkv, q, k, cos.double(), sin.double(), *heads),
            (normal(n, joint), normal(c.head_dim), normal(c.head_dim)),
        ),
        "attention": Kernel(
            lambda qkv: packed_attention(qkv, *heads, c.head_dim, plan, scale),
            lambda qkv: _attended(qkv, *heads, plan),
            (normal(n, joint),),
        ),
        "linear": Kernel(
            lambda x, w, add: kernels.linear(x, w, None, add),
            lambda x, w, add: add + x @ w.t(),
            (normal(n, c.width), matrix, normal(n, c.intermediate)),
        ),
        "gated_silu": Kernel(
            kernels.gated_silu,
            lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
            (normal(n, 2 * c.intermediate),),
        ),
        "gated_gelu": Kernel(
            kernels.gated_gelu,
            lambda x: functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
            (normal(n, 2 * c.intermediate),),
        ),
        **_logit_cases(settings, c, n, normal),
    }


def kernels_step(settings: Settings) -> None:
    """Errors of every kernel and its gradients in each dtype, and its time beside that of what it has to move: inputs
    and output once; with its gradient, inputs three times (read twice, gradients written) and the output twice."""
    bandwidth = copy_bandwidth(settings)
    (size,) = settings.sizes("0.6B")
    wrong = list[str]()
    for name, case in kernel_cases(settings, size).items():
        row: dict[str, float] = {}
        for dtype, limit in KERNEL_LIMITS.items():
            inputs = [value.to(DTYPES.get(dtype, torch.float16)) for value in case.inputs]
            poison(settings)
            errors = largest_errors(case, inputs)
            row[dtype] = float(f"{max(errors):.2g}")
            if not max(errors) <= limit:  # NaN isn't
                wrong.append(f"{name} in {dtype}: {errors} (output, then gradients), limit {limit}")
        inputs = [value.to(DTYPES[settings.dtype]) for value in case.inputs]
        with torch.inference_mode():
            output = case.kernel(*inputs)
            row["us"] = median_us(settings, lambda k=case.kernel, i=inputs: k(*i))
            if (liger := liger_kernels().get(name)) is not None:
                row["liger_us"] = median_us(settings, lambda k=liger, i=inputs: k(*i))
        of_inputs, of_output = sum(x.numel() * x.element_size() for x in inputs), output.numel() * output.element_size()
        row["floor_us"] = round(1e6 * (of_inputs + of_output) / bandwidth, 1)
        if case.has_gradient:
            leaves, gradient = [x.requires_grad_() for x in inputs], torch.ones(output.shape).to(output)
            row["both_us"] = median_us(
                settings, lambda k=case.kernel, i=leaves, g=gradient: torch.autograd.grad(k(*i), i, g)
            )
            row["both_floor_us"] = round(1e6 * (3 * of_inputs + 2 * of_output) / bandwidth, 1)
        give(**{name: row})
    if wrong:
        raise RuntimeError("; ".join(wrong))


def median_us(settings: Settings, work: Callable[[], object]) -> float:
    return round(1e6 * statistics.median(timed(settings, work, calls=5) for _ in range(9)), 1)


def liger_kernels() -> dict[str, Callable[..., object]]:
    """Those of Liger-Kernel that compute what one of ours does; {}: it isn't installed. Its import takes seconds."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    ops: Any = importlib.import_module("liger_kernel.ops")
    return {
        "rms_norm": lambda x, w: ops.rms_norm.rms_norm_forward(x, w, EPSILON, 0.0, "llama", None),
        "gated_silu": lambda x: ops.swiglu.swiglu_fused_gate_up_forward(x),
    }


def largest_errors(case: Kernel, inputs: Sequence[Tensor]) -> list[float]:
    """The error of the output and of each gradient, over the largest number of the float64 one."""
    values = []
    for function, dtype in ((case.kernel, None), (case.exact, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_(case.has_gradient) for x in inputs]
        output = function(*leaves)
        values.append([output.detach()])
        if case.has_gradient:
            generator = torch.Generator(output.device).manual_seed(2)
            gradient = torch.randn(output.shape, generator=generator, device=output.device).to(inputs[0].dtype)
            output.backward(gradient.to(output.dtype))
            values[-1] += [leaf.grad for leaf in leaves if leaf.grad is not None]
    pairs = zip(*values, strict=True)
    return [float((one.double() - exact).abs().max() / exact.abs().max()) for one, exact in pairs]


def poison(settings: Settings) -> None:
    """Fill freed memory with NaN: an output that a kernel doesn't write shows."""
    blocks = [
        torch.full((1 << power,), torch.nan, device=settings.device)
        for power in range(10, 21 if settings.quick else 27)
    ]
    del blocks


# --- the decoding step ---------------------------------------------------------------------------------------


def decoding_step(settings: Settings) -> None:
    """Log-probabilities of sampled tokens against float64, across an update and offloading; a step's launches."""
    errors = dict[str, float]()
    for dtype in ("float32", "bfloat16") if settings.device == "cuda" else ("float32",):
        for rows in (1, 5) if settings.quick else (1, 5, 64):
            errors[f"{dtype}, {rows} requests"] = error = logprob_error(settings, dtype, rows)
            give(logprob_errors=errors)
            if not error <= LOGPROB_LIMITS[dtype]:
                raise RuntimeError(f"log-probabilities of {rows} requests in {dtype} differ by {error}")
    (size,) = settings.sizes("0.6B")
    decoder = random_decoder(settings, size)
    for rows in settings.concurrencies[:2]:
        engine = TorchEngine(decoder, slots=rows, max_context_tokens=64)
        engine.submit(requests(decoder.config, rows, 8, 40))
        for _ in range(4):
            engine.step()
        with CountedOperators() as counted:
            engine.step()
        step_s = timed(settings, engine.step, calls=10)
        row = {
            "ms": round(1000 * step_s, 3),
            "operators": counted.operators,
            "launches": profile(settings, engine.step)["launches"],
        }
        give(**{f"a step of {rows}": row})
    replays(settings)


def replays(settings: Settings) -> None:
    """Steps that run ahead: by CUDA graphs, the same operator by operator, and by the plain bodies on this machine's
    CPU; twice under fixed shapes, which must give equal bits, and what these cost."""
    wanted = requests(configuration("tiny"), 5, 8, 24)
    responses: dict[str, list[tuple[tuple[int, ...], tuple[float, ...]]]] = {}
    for name, options in {
        "replayed": {} if settings.device == "cuda" else {"capture": _called},
        "operator by operator": {"capture": _called},
        "reference": {"native_kernels": False},
        "deterministic": {"deterministic": True},
        "deterministic again": {"deterministic": True},
    }.items():
        decoder = random_decoder(settings, "tiny", "float32")
        engine = TorchEngine(
            decoder.cpu() if name == "reference" else decoder, slots=5, max_context_tokens=64, **options
        )
        engine.submit(wanted)
        while engine.step():
            pass
        deltas = engine.take_deltas()
        responses[name] = [
            (
                tuple(token for delta in deltas if delta.request_id == one.request_id for token in delta.ids),
                tuple(value for delta in deltas if delta.request_id == one.request_id for value in delta.logprobs),
            )
            for one in wanted
        ]
    differing = [
        name for name in responses if [one[0] for one in responses[name]] != [one[0] for one in responses["replayed"]]
    ]
    if differing or responses["deterministic"] != responses["deterministic again"]:
        raise RuntimeError(f"other tokens than by replays: {differing}; or not twice the same bits under fixed shapes")
    (size,) = settings.sizes("0.6B")
    decoder, rows = random_decoder(settings, size), settings.concurrencies[1]
    times_s = dict[str, float]()
    for name, options in {"plain": {}, "deterministic": {"deterministic": True}}.items():
        engine = TorchEngine(decoder, slots=rows, max_context_tokens=64, **options)
        engine.submit(requests(decoder.config, rows, 8, 40))
        for _ in range(4):
            engine.step()
        times_s[name] = timed(settings, engine.step, calls=10)
    give(replays={"equal": sorted(responses), "deterministic_over_plain": times_s["deterministic"] / times_s["plain"]})


def _called(function: Callable[[], None]) -> Callable[[], None]:
    """In place of a CUDA graph: the function itself."""
    return function


def logprob_error(settings: Settings, dtype: str, rows: int) -> float:
    """The largest difference of a sampled token's log-probability to a float64 forward with the weights of its version.
    After some tokens the engine gets other weights, and is offloaded and loaded again."""
    versions = {version: weights_of(scaled(random_decoder(settings, "tiny", dtype), version)) for version in (0, 1)}
    decoder, wanted = random_decoder(settings, "tiny", dtype), requests(configuration("tiny"), rows, 8, 24)
    engine = TorchEngine(decoder, slots=rows, max_context_tokens=64)
    deltas = list[TokenDelta]()
    engine.submit(wanted)
    for _ in range(8):
        engine.step()
    deltas += engine.take_deltas()
    with Publisher(settings.run_id) as publisher:
        engine.apply(publisher.publish(1, versions[1]), "recompute")
    for _ in range(4):
        engine.step()
    engine.memory.offload()
    engine.memory.onload()
    while engine.step():
        pass
    deltas += engine.take_deltas()
    return max(
        forced_error(settings, request, [delta for delta in deltas if delta.request_id == request.request_id], versions)
        for request in wanted
    )


@torch.no_grad()
def scaled(decoder: Decoder, version: int) -> Decoder:
    """The model of another version."""
    for parameter in decoder.parameters():
        parameter.mul_(1 + 0.5 * version)
    return decoder


@torch.no_grad()
def forced_error(
    settings: Settings,
    request: GenerationRequest,
    deltas: Sequence[TokenDelta],
    versions: Mapping[int, Mapping[str, Tensor]],
) -> float:
    """The largest error of a request's log-probabilities, each against the weights of its version."""
    response = [token for delta in deltas for token in delta.ids]
    if len(response) != request.sampling.max_tokens or {delta.version for delta in deltas if delta.ids} != {0, 1}:
        raise RuntimeError(f"{len(response)} tokens of {request.sampling.max_tokens}, or none of a version")
    ids = torch.tensor([*request.prompt_ids, *response], device=settings.device)
    expected = {
        version: exact_logprobs(settings, weights, ids)[-len(response) :] for version, weights in versions.items()
    }
    worst, first = 0.0, 0
    for delta in deltas:
        count = len(delta.ids)
        if count:
            actual = torch.tensor([*delta.logprobs], dtype=torch.float64, device=settings.device)
            worst = max(worst, float((actual - expected[delta.version][first : first + count]).abs().max()))
        first += count
    return worst


def exact_decoder(settings: Settings, weights: Mapping[str, Tensor]) -> Decoder:
    """A tiny decoder in float64 with these weights."""
    exact = build(configuration("tiny"), torch.float64, settings.device)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(weights[name])
    return exact


def exact_logprobs(settings: Settings, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The log-probability of each of ``ids`` but the first, by one forward in float64."""
    exact = exact_decoder(settings, weights)
    logits = exact.head(exact.forward_packed(ids, [len(ids)]))[:-1]
    return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]


class CountedOperators(TorchDispatchMode):
    """Counts the operators that torch is called for, views too."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))
