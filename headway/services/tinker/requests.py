"""The SDK's JSON requests as records: what is missing, misspelt or out of range is refused by the field's name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from headway.records.generation import SamplingParameters
from headway.records.tenants.protocols import (
    BaseDescription,
    CheckpointKind,
    TenantAdapter,
    TenantRefused,
    TenantSampleRequest,
)
from headway.records.training import OptimiserSettings
from headway.services.tinker.wire import require_tokens

OLDEST_SDK = (0, 25)
TTL_S = (3600, 10 * 365 * 86400)  # the limits of a checkpoint's time to live
SequenceNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[float, Meta(ge=0)]
Metadata = dict[str, Any] | None
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_KINDS: dict[str, CheckpointKind] = {
    "weights": "weights",
    "sampler_weights": "sampler_weights",
    "external_weights": "external_weights",
}
_MAX_SAMPLES = 1024
_MAX_TOP = 64


class LoraSettings(msgspec.Struct, frozen=True):
    """``lora_config`` of create_model."""

    rank: Annotated[int, Meta(ge=1)]
    seed: Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)] | None = None
    train_unembed: bool = True  # the head has no adapter: the session's message says so
    train_mlp: bool = True
    train_attn: bool = True


class OptimiserFamily(msgspec.Struct, frozen=True):
    """``optimizer_config``: the family of optimisers."""

    type: Literal["adamw"] = "adamw"


class CreateSessionBody(msgspec.Struct, frozen=True):
    """Body of create_session."""

    sdk_version: str = ""
    tags: list[str] = []
    user_metadata: Metadata = None
    display_name: str | None = None
    project_id: str | None = None
    type: str = ""


class CreateModelBody(msgspec.Struct, frozen=True):
    """Body of create_model."""

    session_id: str
    model_seq_id: SequenceNumber
    base_model: str
    lora_config: LoraSettings
    optimizer_config: OptimiserFamily = OptimiserFamily()
    user_metadata: Metadata = None
    type: str = ""


class AdamParameters(msgspec.Struct, frozen=True):
    """``adam_params`` of optim_step."""

    learning_rate: Number = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Number = 1e-12
    weight_decay: Number = 0.0
    grad_clip_norm: Number = 0.0  # 0: gradients aren't clipped

    def optimiser(self) -> OptimiserSettings:
        """Return the settings of a step. Raises TenantRefused for infinite ones."""
        for name in self.__struct_fields__:
            if not math.isfinite(getattr(self, name)):
                raise TenantRefused(f"adam_params.{name} = {getattr(self, name)}: valid: a finite number")
        return OptimiserSettings(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.grad_clip_norm or math.inf,
        )


class OptimStepBody(msgspec.Struct, frozen=True):
    """Body of optim_step."""

    model_id: str
    seq_id: SequenceNumber
    adam_params: AdamParameters
    type: str = ""


class SaveWeightsBody(msgspec.Struct, frozen=True):
    """Body of save_weights, save_weights_for_sampler and save_weights_external."""

    model_id: str
    seq_id: SequenceNumber
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    sampling_session_seq_id: SequenceNumber | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    type: str = ""


class LoadWeightsBody(msgspec.Struct, frozen=True):
    """Body of load_weights: into a model, or with ``session_id`` as a new model's first request."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: SequenceNumber | None = None
    session_id: str | None = None
    model_seq_id: SequenceNumber | None = None
    base_model: str | None = None
    optimizer_config: OptimiserFamily = OptimiserFamily()
    user_metadata: Metadata = None
    type: str = ""


class CreateSamplingSessionBody(msgspec.Struct, frozen=True):
    """Body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: SequenceNumber
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class PromptChunk(msgspec.Struct, frozen=True):
    """A piece of a prompt."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class PromptBody(msgspec.Struct, frozen=True):
    """``prompt`` of asample."""

    chunks: list[PromptChunk]


class SamplingSettings(msgspec.Struct, frozen=True):
    """``sampling_params`` of asample."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class JsonTensor(msgspec.Struct, frozen=True):
    """``target_prompt_logprobs`` of asample: dense or CSR."""

    data: list[int]
    dtype: Literal["int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(msgspec.Struct, frozen=True):
    """Body of asample."""

    sampling_session_id: str
    seq_id: SequenceNumber
    prompt: PromptBody
    sampling_params: SamplingSettings
    num_samples: Annotated[int, Meta(ge=1, le=_MAX_SAMPLES)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=_MAX_TOP)] = 0
    topk_sample_logprobs: Annotated[int, Meta(ge=0, le=_MAX_TOP)] = 0
    target_prompt_logprobs: JsonTensor | None = None
    record_stability_info: bool | None = None
    type: str = ""


Body = TypeVar("Body", bound=msgspec.Struct)


def parsed(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert a JSON object. A field that isn't known may only have an empty value (None, False, 0, "", []): an SDK
    sends its newest fields' defaults. Raises TenantRefused that names the field."""
    _require_known(body, kind, "")
    try:
        return msgspec.convert(dict(body), kind)
    except msgspec.ValidationError as error:
        raise TenantRefused(f"{kind.__name__}: {error}") from None


@cache
def _field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _require_known(body: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    fields = _field_types(kind)
    for name, content in body.items():
        if name not in fields and content not in (None, False, 0, "", [], {}):
            raise TenantRefused(f"{prefix}{name} = {content!r}: this service has no such field: valid: not set")
        field_type = fields.get(name)
        if isinstance(content, dict) and isinstance(field_type, type) and issubclass(field_type, msgspec.Struct):
            _require_known(cast("dict[str, Any]", content), field_type, f"{prefix}{name}.")


def require_sdk(version: str) -> None:
    """Raise TenantRefused for an SDK whose requests aren't those of this service."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST_SDK:
        raise TenantRefused(
            f"this client is tinker {version or '(old)'}: valid: 0.25 and later (pip install -U tinker)"
        )


def adapter_of(settings: LoraSettings, most_rank: int, seed: int) -> TenantAdapter:
    """Convert lora_config; ``seed`` where it has none. Raises TenantRefused."""
    if settings.rank > most_rank:
        raise TenantRefused(f"lora_config.rank = {settings.rank}: valid: 1 to {most_rank}")
    if not (settings.train_mlp or settings.train_attn):
        raise TenantRefused("lora_config: train_mlp or train_attn: valid: at least one of them")
    return TenantAdapter(
        rank=settings.rank,
        seed=seed if settings.seed is None else settings.seed,
        train_mlp=settings.train_mlp,
        train_attention=settings.train_attn,
    )


def require_name(name: str, field: str) -> None:
    """Raise TenantRefused for a checkpoint's name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise TenantRefused(f"{field} = {name!r}: valid: at most 200 letters, digits, '_', '-' and '.', no leading dot")


def require_ttl(ttl_s: int | None) -> None:
    """Raise TenantRefused for a time to live that is out of range."""
    if ttl_s is not None and not TTL_S[0] <= ttl_s <= TTL_S[1]:
        raise TenantRefused(f"ttl_seconds = {ttl_s}: valid: {TTL_S[0]} (an hour) to {TTL_S[1]} (ten years)")


def checkpoint_path(path: str, field: str = "path") -> tuple[str, CheckpointKind]:
    """Return the path in the store of ``tinker://MODEL/KIND/NAME``, and its kind. Raises TenantRefused that names the
    ``field``."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in _KINDS:
        raise TenantRefused(f"{field} = {path!r}: valid: tinker://MODEL/{'|'.join(_KINDS)}/NAME")
    require_name(parts[0].replace(":", "_"), field)
    require_name(parts[2], field)
    return "/".join(parts), _KINDS[parts[1]]


def sample_request(
    body: SampleBody, request_id: str, base: BaseDescription, seed: int, *, stability: bool
) -> TenantSampleRequest:
    """Convert asample's body; ``seed`` where it has none. ``stability``: record_stability_info is accepted, and
    nothing recorded. Raises TenantRefused for what can't be sampled."""
    settings = body.sampling_params
    if body.record_stability_info and not stability:
        raise TenantRefused("record_stability_info = true: stable_reinforce isn't served here: valid: false")
    prompt_ids = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
    if not 0 < len(prompt_ids) < base.max_context_tokens:
        raise TenantRefused(f"prompt has {len(prompt_ids)} tokens: valid: 1 to {base.max_context_tokens - 1}")
    require_tokens(_integers(list(prompt_ids), "prompt"), base, "prompt")
    free_tokens = base.max_context_tokens - len(prompt_ids)
    max_tokens = free_tokens if settings.max_tokens is None else settings.max_tokens
    if max_tokens > free_tokens:
        raise TenantRefused(
            f"sampling_params.max_tokens = {max_tokens}: valid after {len(prompt_ids)} tokens: at most {free_tokens}"
        )
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and last_n < len(prompt_ids)):
        raise TenantRefused(
            f"prompt_logprobs_last_n = {last_n}: valid: with prompt_logprobs, 1 to {len(prompt_ids) - 1}"
        )
    stops = [settings.stop] if isinstance(settings.stop, str) else settings.stop or []
    return TenantSampleRequest(
        request_id=request_id,
        sampler_id=body.sampling_session_id,
        prompt_ids=prompt_ids,
        samples=body.num_samples,
        sampling=SamplingParameters(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=max(0, settings.top_k),
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            seed=(seed if settings.seed is None else settings.seed) % (1 << 62),
        ),
        ignores_end=settings.stop == [],
        prompt_logprobs=bool(body.prompt_logprobs),
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_prompt_ids=_prompt_targets(body.target_prompt_logprobs, len(prompt_ids), base),
    )


def _integers(numbers: list[int], name: str) -> Any:
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        raise TenantRefused(f"{name} has a number beyond 64 bits: valid: token ids") from None


def _prompt_targets(tensor: JsonTensor | None, length: int, base: BaseDescription) -> Any:
    """Return the ids [N - 1, K] whose prompt log-probabilities are asked for, -1 where none is; None: none are."""
    if tensor is None:
        return None
    name, ids = "target_prompt_logprobs", _integers(tensor.data, "target_prompt_logprobs.data")
    shape = tensor.shape or [len(ids)]
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= 1024:
        raise TenantRefused(f"{name}.shape = {shape}: valid: [{length - 1}, K], K up to 1024")
    require_tokens(ids[ids != -1], base, f"{name}.data")
    if tensor.sparse_crow_indices is None:
        if len(ids) != shape[0] * shape[1]:
            raise TenantRefused(f"{name} has {len(ids)} values for shape {shape}")
        return ids.reshape(shape)
    rows = _integers(tensor.sparse_crow_indices, f"{name}.sparse_crow_indices")
    columns = _integers(tensor.sparse_col_indices or [], f"{name}.sparse_col_indices")
    if (
        len(rows) != length
        or rows[0] != 0
        or (np.diff(rows) < 0).any()
        or not rows[-1] == len(ids) == len(columns)
        or ((columns < 0) | (columns >= shape[1])).any()
    ):
        raise TenantRefused(f"{name}: CSR indices that don't fit shape {shape} and {len(ids)} values")
    targets = np.full(shape, -1, np.int64)
    targets[np.repeat(np.arange(length - 1), np.diff(rows)), columns] = ids
    return targets
