"""Records and Protocols between a service of many tenants' adapters and what trains and samples them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from headway.records.errors import HeadwayError, InfrastructureError
from headway.records.generation import SamplingParameters
from headway.records.training import OptimiserSettings

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


class TenantRefused(HeadwayError):
    """A tenant's request can't be served; its adapter's state is as it was before."""


class AdapterNotLoaded(HeadwayError):
    """The adapter or sampler isn't in the worker (evicted, or the worker restarted): restore or register it first."""


class TenantsUnavailable(InfrastructureError):
    """The worker is restarting. No call has been started, so none counts against its request."""


class BaseDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen base that all tenants share."""

    name: str  # in requests and answers
    digest: str  # of its weights; a store belongs to one base
    architecture: str
    tokenizer: str  # folder or name that clients load it from
    vocabulary: int  # ids are below it
    max_context_tokens: int


class TenantAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as its tenant created it."""

    rank: int
    seed: int = 0
    train_mlp: bool = True
    train_attention: bool = True


class TrainingDatum(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a pass: N tokens, and the loss's inputs at each of them.

    ``inputs["target_tokens"]`` (int64, [N] or [N, K]) are free, not the tokens shifted; all other inputs are float32 of
    the same shape. Example: cross-entropy on the last of three tokens has token_ids_n = [5, 6, 7], target_tokens =
    [6, 7, 8] and weights = [0, 0, 1].
    """

    token_ids_n: Any  # [N] int32
    inputs: dict[str, Any]  # name -> [N] or [N, K]


class TrainingPass(msgspec.Struct, frozen=True, kw_only=True):
    """A forward pass, and unless ``forward_only`` its backward pass, whose gradients are added to the adapter's."""

    data: tuple[TrainingDatum, ...]
    loss: str
    settings: dict[str, float | str] = {}
    forward_only: bool = False


class PassOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a pass."""

    logprobs: tuple[Any, ...]  # for each datum float32 in the shape of its targets
    metrics: dict[str, float]  # keys NAME:REDUCTION; with "loss:sum"


class AppliedState(msgspec.Struct, frozen=True, kw_only=True):
    """The newest durable state of an adapter."""

    sequence: int  # of the create, optim_step or load that made it
    adapter: TenantAdapter
    metrics: dict[str, float] = {}  # of an optim_step, as it returned them


class TenantTrainer(Protocol):
    """Trains the adapters of all tenants. Calls for one model come one after another, in order.

    `create`, `optim_step` and `load` are durable when they return; ``sequence`` is theirs in the model's order. After
    an error other than TenantRefused and StorageFailed, which leave the state as it was, the next call is `restore`.
    All but `create`, `restore` and `delete` raise AdapterNotLoaded for a model that isn't in memory.
    """

    async def create(self, model_id: str, sequence: int, adapter: TenantAdapter) -> None:
        """Make a fresh adapter with its optimiser."""
        ...

    async def restore(self, model_id: str) -> AppliedState | None:
        """Load the newest durable state, after a power cut maybe an older one, without accumulated gradients; None: the
        model was never created."""
        ...

    async def forward_backward(self, model_id: str, training_pass: TrainingPass) -> PassOutcome:
        """Compute a pass, and accumulate its gradients in memory."""
        ...

    async def optim_step(self, model_id: str, sequence: int, optimiser: OptimiserSettings) -> dict[str, float]:
        """Apply the accumulated gradients (``max_grad_norm`` inf: unclipped); returns metrics, keys NAME:REDUCTION. One
        that isn't finite is dropped, and ``skipped_steps:sum`` is 1. Raises TenantRefused if there are none."""
        ...

    async def load(self, model_id: str, sequence: int, path: str, adapter: TenantAdapter, *, optimiser: bool) -> None:
        """Load a saved state, also into a model that doesn't exist yet (``adapter``); drops accumulated gradients."""
        ...

    async def save(self, model_id: str, path: str, kind: CheckpointKind) -> int:
        """Save the adapter as the folder checkpoints/``path`` of the store (``path`` is MODEL/KIND/NAME), in PEFT's
        format, with its optimiser if ``kind`` is weights. Replaces what is there, durable when it returns; returns its
        size in bytes."""
        ...

    async def evict(self, model_id: str) -> None:
        """Free the adapter's memory; its durable state stays. Does nothing for one that isn't loaded."""
        ...

    async def delete(self, path: str) -> None:
        """Delete what `save` made under ``path``, if it is there."""
        ...


class TenantSampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt from which ``samples`` responses are sampled."""

    request_id: str  # the same when it is repeated after a restart
    sampler_id: str
    prompt_ids: tuple[int, ...]
    samples: int
    sampling: SamplingParameters
    ignores_end: bool = False  # the tokenizer's end of sequence doesn't end it
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None  # only of these last tokens
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_ids: Any = None  # [N - 1, K] int64, -1: none; scored at positions 1 to N - 1


class TopTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The K most probable tokens at N positions."""

    token_ids: Any  # [N, K] int32
    logprobs: Any  # [N, K] float32


class TenantSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled response."""

    token_ids: Any  # [N] int32
    logprobs: Any  # [N] float32, untempered, over the whole vocabulary
    stopped: bool  # by a stop token or string; otherwise by its length
    top: TopTokens | None = None


class TenantSampleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a request, and what it asked for of its prompt's N tokens."""

    samples: tuple[TenantSample, ...]
    prompt_logprobs: Any = None  # [N] float32, NaN where there is none: always at the first
    prompt_top: TopTokens | None = None
    target_prompt_logprobs: Any = None  # [N - 1, K] float32, NaN where there is none
    cached_tokens: int = 0  # of the prompt, from another request's KV


class TenantSampler(Protocol):
    """Samples from the base and from saved revisions of adapters. Calls may overlap."""

    async def register(self, sampler_id: str, path: str | None, *, inflight: bool) -> None:
        """Make a sampler of the adapter saved under ``path``; None: of the base. Repeating it does nothing more.
        ``inflight``: all inflight samplers of this model now sample from ``path``, running requests too."""
        ...

    async def sample(self, request: TenantSampleRequest) -> TenantSampleOutcome:
        """Sample. Raises TenantRefused, and AdapterNotLoaded for a sampler that isn't registered."""
        ...

    async def cancel(self, request_id: str) -> None:
        """End an open request, whose `sample` raises TenantRefused."""
        ...

    async def release(self, sampler_id: str) -> None:
        """Free the sampler's memory. Does nothing for one that isn't registered."""
        ...

    def statistics(self) -> Mapping[str, float]:
        """Return counts of open requests and loaded samplers."""
        ...
