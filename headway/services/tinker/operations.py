"""Carries out a model's request: the trainer's call, its reply, and the rows of the log that it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headway.config.services.tinker import TinkerConfig
from headway.records.errors import InfrastructureError, WorkerDied
from headway.records.tenants.protocols import (
    BaseDescription,
    CheckpointKind,
    TenantAdapter,
    TenantRefused,
    TenantSampler,
    TenantTrainer,
)
from headway.services.tinker.log import (
    Effect,
    LoggedCheckpoint,
    LoggedModel,
    LoggedRequest,
    LoggedSampler,
    TinkerLog,
    insertion,
)
from headway.services.tinker.requests import (
    CreateModelBody,
    LoadWeightsBody,
    OptimStepBody,
    SampleBody,
    SaveWeightsBody,
    adapter_of,
    checkpoint_path,
    parsed,
    require_name,
    require_ttl,
    sample_request,
)
from headway.services.tinker.tenants import SampleAdmissions, TenantAccounts, Usage
from headway.services.tinker.wire import encoded_pass, encoded_sample, parsed_request, training_pass

KINDS: dict[str, CheckpointKind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
SNAPSHOT_S = 3600.0  # a sampler's own weights, which have no name, are kept so long after their last use


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, and the rows that are committed with it."""

    reply: bytes
    protobuf: bool = False
    failed: bool = False
    effects: tuple[Effect, ...] = ()
    keeps_body: bool = False  # a restart repeats the request
    applied: bool = False  # the model's durable state is the request's
    usage: Usage = Usage()

    @classmethod
    def of(cls, fields: Mapping[str, Any], effects: tuple[Effect, ...] = (), *, applied: bool = False) -> RequestAnswer:
        """Make a JSON reply."""
        return cls(reply=msgspec.json.encode(fields), effects=effects, applied=applied)

    @classmethod
    def failure(cls, message: str, category: str) -> RequestAnswer:
        """Make a reply that the client raises; ``category``: user or server."""
        return cls(reply=msgspec.json.encode({"error": message, "category": category}), failed=True)


class Operations:
    """Carries out the requests of models. All raise what the trainer's calls raise."""

    def __init__(
        self,
        log: TinkerLog,
        trainer: TenantTrainer,
        sampler: TenantSampler,
        base: BaseDescription,
        settings: TinkerConfig,
        accounts: TenantAccounts,
        admissions: SampleAdmissions,
        wall: Callable[[], float],
    ) -> None:
        self._log = log
        self._trainer = trainer
        self._sampler = sampler
        self._base = base
        self._settings = settings
        self._accounts = accounts
        self._admissions = admissions
        self.registered: set[str] = set()  # samplers that the engines know
        self._wall = wall

    def arrival(self, request: LoggedRequest, model: LoggedModel | None) -> list[Effect]:
        """Return the rows that a new request changes when it comes; ``model``: its new model."""
        if model is not None:
            return [insertion(model)]
        return [("UPDATE models SET requested_s = ? WHERE id = ?", (self._wall(), request.scope))]

    async def train(self, request: LoggedRequest) -> RequestAnswer:
        """Carry out a model's request. Raises TenantRefused for what can't be done, by the field's name."""
        model: LoggedModel = self._log.get("models", request.scope)
        if request.sequence == 0:
            self._accounts.require_model(model.tenant)
        if request.kind == "create_model":
            adapter = self._new_adapter(request)
            await self._trainer.create(model.id, request.sequence, adapter)
            return self.durable_answer(request, adapter, {})
        if request.kind == "load_weights":
            optimiser, checkpoint = self._source(request, model)
            adapter = checkpoint.settings()
            await self._trainer.load(model.id, request.sequence, checkpoint.path, adapter, optimiser=optimiser)
            return self.durable_answer(request, adapter, {})
        adapter = model.settings()
        if adapter is None:
            raise TenantRefused(f"{model.id} has no weights: its create_model or load_weights was refused")
        if request.kind == "forward_backward":
            message = parsed_request(request.body or b"")
            computed = training_pass(message, self._base, self._settings.substitutes)
            outcome = await self._trainer.forward_backward(model.id, computed)
            metrics = {**outcome.metrics, **self._accounts.note_lags(model.tenant, self._lags(message, model))}
            return RequestAnswer(
                reply=encoded_pass(msgspec.structs.replace(outcome, metrics=metrics)),
                protobuf=True,
                keeps_body=not computed.forward_only,
                usage=Usage(trained_tokens=sum(len(datum.token_ids_n) for datum in computed.data)),
            )
        if request.kind == "optim_step":
            settings = parsed(_fields(request), OptimStepBody).adam_params.optimiser()
            metrics = await self._trainer.optim_step(model.id, request.sequence, settings)
            return self.durable_answer(request, adapter, metrics)
        return await self._save(request, model, adapter, parsed(_fields(request), SaveWeightsBody))

    def durable_answer(
        self, request: LoggedRequest, adapter: TenantAdapter, metrics: Mapping[str, float]
    ) -> RequestAnswer:
        """Return the answer of an optim_step, create or load that is durable; after a restart, of the state that was
        restored."""
        if request.kind == "optim_step":
            counted: Effect = ("UPDATE models SET steps = steps + 1 WHERE id = ?", (request.scope,))
            return RequestAnswer.of({"metrics": dict(metrics)}, (counted,), applied=True)
        reply = {"model_id": request.scope, "type": request.kind}
        if request.kind == "load_weights":
            reply["path"] = _fields(request)["path"]
        effect = "UPDATE models SET adapter = ? WHERE id = ?", (_json(adapter), request.scope)
        return RequestAnswer.of(reply, (effect,), applied=True)

    def _new_adapter(self, request: LoggedRequest) -> TenantAdapter:
        body = parsed(_fields(request), CreateModelBody)
        if body.base_model != self._base.name:
            raise TenantRefused(f"base_model = {body.base_model!r}: valid: {self._base.name!r}")
        seed = int.from_bytes(hashlib.sha256(request.scope.encode()).digest()[:7])
        return adapter_of(body.lora_config, self._settings.max_rank, seed)

    def _lags(self, message: Any, model: LoggedModel) -> list[tuple[int, int]]:
        """Return, of each run of tokens whose provenance the client gives, the model's steps since its sampler's
        weights, and the count of tokens."""
        lags: list[tuple[int, int]] = []
        steps: dict[str, int | None] = {}  # of the model, when a sampler's weights were saved; None: another's
        spans = (span for datum in message.data for span in datum.loss_fn_input_spans or datum.model_input_spans)
        for span in (span.sampled_tokens for span in spans if span.WhichOneof("span") == "sampled_tokens"):
            sampler_id = span.sequence_id.rpartition(":")[0]
            if sampler_id not in steps:
                sampler: LoggedSampler | None = self._log.get("samplers", sampler_id)
                saved = self._log.get("checkpoints", sampler.path) if sampler and sampler.path else None
                steps[sampler_id] = saved.step if saved and saved.model == model.id else None
            if (step := steps[sampler_id]) is not None:
                lags.append((model.steps - step, max(0, span.length)))
        return lags

    def checkpoint(self, path: str, tenant: str, field: str = "path") -> LoggedCheckpoint:
        """Return a checkpoint that a tenant may read: its own, or a published one. Raises TenantRefused that names the
        ``field`` of the path."""
        checkpoint: LoggedCheckpoint | None = self._log.get("checkpoints", checkpoint_path(path, field)[0])
        readable = checkpoint is not None and (checkpoint.tenant == tenant or checkpoint.public)
        expired = checkpoint is not None and (checkpoint.expires_s or float("inf")) <= self._wall()
        if checkpoint is None or not readable or expired:
            reason = "there is no such checkpoint, it has expired, or it isn't published"
            raise TenantRefused(f"{field} = {path!r}: {reason}: valid: one of yours, or a published one")
        return checkpoint

    def _source(self, request: LoggedRequest, model: LoggedModel) -> tuple[bool, LoggedCheckpoint]:
        """Return whether a load_weights takes the optimiser's state too, and from which checkpoint."""
        body = parsed(_fields(request), LoadWeightsBody)
        if body.base_model not in (None, self._base.name):
            raise TenantRefused(f"base_model = {body.base_model!r}: valid: {self._base.name!r}")
        checkpoint = self.checkpoint(body.path, model.tenant)
        kind = checkpoint_path(body.path)[1]
        if kind == "external_weights":
            raise TenantRefused(f"path = {body.path!r} is for downloads: valid: tinker://MODEL/weights/NAME")
        if kind == "sampler_weights" and body.optimizer:
            raise TenantRefused(
                f"path = {body.path!r} has no optimiser state: valid: tinker://MODEL/weights/NAME, or optimizer = false"
            )
        return body.optimizer, checkpoint

    async def sample(self, request: LoggedRequest, sampler: LoggedSampler) -> RequestAnswer:
        """Sample, from the tenant's turn on. Raises TenantRefused for what can't be sampled, by the field's name."""
        request_id, key = f"{request.scope}:{request.sequence}", (request.scope, request.sequence)
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:7])
        stability = bool(self._settings.substitutes)
        sample = sample_request(parsed(_fields(request), SampleBody), request_id, self._base, seed, stability=stability)
        prompt_tokens, most_tokens = len(sample.prompt_ids), sample.samples * sample.sampling.max_tokens
        async with self._admissions.turn(sampler.tenant, sample.samples, prompt_tokens + most_tokens):
            self._accounts.begin(sampler.tenant, key)
            if request.scope not in self.registered:
                newest: LoggedSampler = self._log.get("samplers", request.scope)  # an inflight one's path changes
                await self._sampler.register(newest.id, newest.path, inflight=bool(newest.inflight))
                self.registered.add(request.scope)
            outcome = await self._sampler.sample(sample)
        sampled_tokens = sum(len(response.token_ids) for response in outcome.samples)
        self._admissions.charge(sampler.tenant, sampled_tokens - most_tokens)
        device_s = (prompt_tokens + sampled_tokens) * self._sampler.statistics().get("device_s_per_token", 0.0)
        effects: tuple[Effect, ...] = ()
        if sampler.path is not None:  # it was used, so its weights are kept for longer
            text = "UPDATE checkpoints SET expires_s = max(expires_s, ?) WHERE path = ? AND listed = 0"
            effects = ((text, (self._wall() + SNAPSHOT_S, sampler.path)),)
        usage = Usage(prefilled_tokens=prompt_tokens, sampled_tokens=sampled_tokens, device_s=device_s)
        return RequestAnswer(reply=encoded_sample(outcome), protobuf=True, effects=effects, usage=usage)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def _save(
        self, request: LoggedRequest, model: LoggedModel, adapter: TenantAdapter, body: SaveWeightsBody
    ) -> RequestAnswer:
        """Save weights; those for a sampling session have no name, and are registered before the answer."""
        kind, number = KINDS[request.kind], body.sampling_session_seq_id
        require_ttl(body.ttl_seconds)
        self._accounts.require_store(model.tenant)
        if kind == "sampler_weights" and (body.path is None) == (number is None):
            raise TenantRefused("save_weights_for_sampler: valid: either path or sampling_session_seq_id")
        sampler = None
        if kind == "sampler_weights" and number is not None:
            path = f"{model.id}/{kind}/-{request.sequence:06d}"  # no client can name it
            sampler = self._new_sampler(request, model, f"{model.session}:sample:{number}", path, body.kind)
        else:
            name = f"{request.sequence:06d}" if body.path is None else body.path
            require_name(name, "path")
            path = f"{model.id}/{kind}/{name}"
            if not body.overwrite and self._log.get("checkpoints", path) is not None:
                raise TenantRefused(f"path = {name!r}: tinker://{path} exists: valid: overwrite = true, another name")
        size_bytes = await self._trainer.save(model.id, path, kind)
        life_s = body.ttl_seconds if body.ttl_seconds is not None or sampler is None else SNAPSHOT_S
        checkpoint = LoggedCheckpoint(
            path=path,
            model=model.id,
            tenant=model.tenant,
            created_s=self._wall(),
            bytes=size_bytes,
            public=0,
            expires_s=None if life_s is None else self._wall() + life_s,
            adapter=_json(adapter),
            metadata=None if body.user_metadata is None else _json(body.user_metadata),
            listed=int(sampler is None),
            step=model.steps,
        )
        if sampler is None:
            return RequestAnswer.of({"path": f"tinker://{path}", "type": request.kind}, (insertion(checkpoint),))
        effects = [insertion(checkpoint), insertion(sampler)]
        if sampler.inflight:  # those of this model sample from the newest, after a restart as well
            of_model = "inflight = 1 AND substr(path, 1, length(?2)) = ?2"
            former = f"path IN (SELECT path FROM samplers WHERE {of_model} AND path <> ?3)"
            renewed = (self._wall(), f"{model.id}/", path)
            effects.append((f"UPDATE checkpoints SET expires_s = ?1 WHERE {former}", renewed))
            effects.append((f"UPDATE samplers SET path = ?1 WHERE {of_model}", (path, f"{model.id}/")))
        answer = RequestAnswer.of({"sampling_session_id": sampler.id, "type": request.kind}, tuple(effects))
        try:
            await self._sampler.register(sampler.id, path, inflight=bool(sampler.inflight))
        except (InfrastructureError, WorkerDied):
            return answer  # it restarts: the first sample registers it
        self.registered.add(sampler.id)
        return answer

    def _new_sampler(
        self, request: LoggedRequest, model: LoggedModel, sampler_id: str, path: str, kind: str
    ) -> LoggedSampler:
        known: LoggedSampler | None = self._log.get("samplers", sampler_id)
        if known is not None and known.digest != request.digest:
            raise TenantRefused(f"sampling_session_seq_id: {sampler_id} is another request's")
        return LoggedSampler(
            id=sampler_id,
            session=model.session,
            tenant=model.tenant,
            digest=request.digest,
            path=path,
            inflight=int(kind == "inflight"),
        )

    async def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint: its row first, so that no one reads a part of it."""
        self._log.commit([("DELETE FROM checkpoints WHERE path = ?", (path,))])
        await self._trainer.delete(path)


def _json(content: Any) -> str:
    return msgspec.json.encode(content).decode()


def _fields(request: LoggedRequest) -> dict[str, Any]:
    return msgspec.json.decode(request.body or b"{}")
