"""The Tinker service's ASGI application: the SDK's routes under /api/v1."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.endpoint.http_app import HttpApp, decoded, unknown_url
from headway.records.errors import StorageFailed
from headway.records.tenants.protocols import BaseDescription, TenantRefused
from headway.services.tinker.catalogue import TinkerCatalogue
from headway.services.tinker.dispatch import TinkerDispatch
from headway.services.tinker.log import LoggedModel, LoggedRequest, LoggedSampler, LoggedSession, TinkerLog, insertion
from headway.services.tinker.operations import Operations
from headway.services.tinker.ordering import RequestAdmission
from headway.services.tinker.requests import CreateSamplingSessionBody, CreateSessionBody, parsed, require_sdk
from headway.services.tinker.tenants import TenantKeys, TinkerMetrics, TooManyRequests
from headway.services.tinker.wire import PROTOBUF, decompressed, parsed_request

_PREFIX = "/api/v1/"
_POLL_S = 30.0  # the SDK waits 45 s for an answer
_MAX_SEQUENCE = 1 << 62
_REQUESTS = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
_FLAGS = {  # what the SDK does only if it is told to stays off
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
}
_MESSAGE = (
    "this service has no adapter on the head: train_unembed has no effect; log-probabilities are those of the whole "
    "distribution at temperature 1, which isn't the one sampled from with another temperature, top_p or top_k"
)
Fields = Mapping[str, Any]


class TinkerApp(HttpApp):
    """ASGI application that speaks the protocol of the tinker SDK.

    A request with a sequence number is committed before its content is checked: an error in the content fails its
    future and uses up its number, so that the sequence has no gap. Statuses of 400 and more commit nothing; 503, for a
    log that can't be written, is repeated by the SDK.
    """

    def __init__(
        self,
        log: TinkerLog,
        dispatch: TinkerDispatch,
        operations: Operations,
        catalogue: TinkerCatalogue,
        base: BaseDescription,
        settings: EndpointConfig,
        keys: TenantKeys,
        wall: Callable[[], float],
        gauges: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """``settings``: limits of size and time. ``gauges``: of the workers, for /metrics."""
        super().__init__(settings)
        self.telemetry: Counter[str] = Counter()  # events that clients sent, by tenant
        self._log = log
        self._dispatch = dispatch
        self._operations = operations
        self._catalogue = catalogue
        self._base = base
        self._keys = keys
        self._gauges = gauges
        self._wall = wall
        self._posts: dict[str, Callable[[str, Fields], Awaitable[Any]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "telemetry": self._telemetry,
            "weights_info": self._weights_info,
        }

    def route(self, path: str) -> str:
        name = path.removeprefix(_PREFIX)
        if name in self._posts or name in _REQUESTS:
            return name
        head = name.partition("/")[0]
        known = ("forward_backward", "retrieve_future", "sessions", "training_runs", "checkpoints", "samplers", "files")
        return head if head in known else "other"

    async def answer(self, exchange: HttpExchange) -> None:
        name = exchange.path.removeprefix(_PREFIX)
        if not exchange.path.startswith(_PREFIX):
            return await self._report(exchange)
        try:
            await self._answer(exchange, name)
        except TenantRefused as error:
            raise HttpError(400, str(error), code="invalid_request") from None
        except TooManyRequests as error:
            raise HttpError(429, str(error), code="rate_limit_exceeded") from None
        except StorageFailed as error:
            raise HttpError(503, str(error), code="storage_failed") from None

    async def _report(self, exchange: HttpExchange) -> None:
        """Answer /tenants, of one's own account or with the scope operate of all, and /metrics."""
        if exchange.method != "GET" or exchange.path not in ("/tenants", "/metrics"):
            raise unknown_url(exchange)
        accounts = self._dispatch.accounts
        if exchange.path == "/metrics":
            self._keys.tenant_of(exchange.key, "operate")
            metrics = TinkerMetrics(self.responses, self._dispatch.counts, self._gauges(), accounts.rows())
            return await exchange.reply_with(metrics.text())
        try:
            self._keys.tenant_of(exchange.key, "operate")
            rows = accounts.rows()
        except HttpError:
            rows = accounts.rows(self._keys.tenant_of(exchange.key))
        await exchange.reply_with({"tenants": rows, "gaps": self._dispatch.gaps({row["tenant"] for row in rows})})

    async def _answer(self, exchange: HttpExchange, name: str) -> None:
        if name == "healthz":
            return await exchange.reply_with({"status": "ok"})
        if name.startswith("files/") and exchange.method == "GET":
            content = self._catalogue.download(name.removeprefix("files/"), exchange.query)
            return await exchange.reply(200, content, kind=b"application/octet-stream")
        tenant = self._keys.tenant_of(exchange.key, _scope(exchange.method, name))
        if exchange.method == "POST" and name == "forward_backward":
            return await exchange.reply_with(await self._forward_backward(tenant, exchange))
        if exchange.method == "POST" and name == "retrieve_future":
            return await self._retrieve(tenant, exchange)
        if exchange.method == "POST" and name in self._posts:
            return await exchange.reply_with(await self._posts[name](tenant, decoded(await exchange.body())))
        if exchange.method == "POST" and name in _REQUESTS:
            fields = decoded(await exchange.body())
            sequence = _sequence(fields, "seq_id", 1)
            request = _request(name, _text(fields, "model_id"), sequence, fields)
            return await exchange.reply_with(self._submit_to_model(tenant, request))
        await exchange.reply_with(await self._resource(tenant, exchange, name.split("/")))

    async def _resource(self, tenant: str, exchange: HttpExchange, parts: list[str]) -> Any:
        """Answer the routes whose path names an object."""
        catalogue, query = self._catalogue, exchange.query
        match exchange.method, parts:
            case "GET", ["get_server_capabilities"]:
                return self._capabilities()
            case "GET", ["sessions"]:
                return catalogue.sessions(tenant, query)
            case "GET", ["sessions", session_id]:
                return catalogue.session(tenant, session_id)
            case "POST", ["sessions", session_id, "finish"]:
                return await self._finish(tenant, session_id, decoded(await exchange.body()))
            case "GET", ["samplers", sampler_id]:
                return catalogue.sampler(tenant, sampler_id)
            case "GET", ["checkpoints"]:
                return catalogue.checkpoints(tenant, query)
            case "GET", ["training_runs"]:
                return catalogue.training_runs(tenant, query)
            case "GET", ["training_runs", model_id]:
                return catalogue.training_run(tenant, model_id)
            case "GET", ["training_runs", model_id, "checkpoints"]:
                return catalogue.checkpoints(tenant, query, model_id)
            case "DELETE", ["training_runs", model_id, "checkpoints", kind, checkpoint]:
                return await catalogue.delete(tenant, model_id, f"{kind}/{checkpoint}")
            case "POST" | "DELETE" as method, ["training_runs", model_id, "checkpoints", kind, checkpoint, "publish"]:
                return catalogue.publish(tenant, model_id, f"{kind}/{checkpoint}", public=method == "POST")
            case "PUT", ["training_runs", model_id, "checkpoints", kind, checkpoint, "ttl"]:
                ttl_s = decoded(await exchange.body()).get("ttl_seconds")
                return catalogue.set_ttl(tenant, model_id, f"{kind}/{checkpoint}", ttl_s)
            case "GET", ["training_runs", model_id, "checkpoints", kind, checkpoint, "external_weights_urls"]:
                address = f"http://{exchange.header('host')}"
                return catalogue.download_urls(tenant, model_id, f"{kind}/{checkpoint}", address)
            case _:
                raise unknown_url(exchange)

    # --- requests with a sequence -------------------------------------------------------------------------------------

    def _submit(
        self, request: LoggedRequest, session_id: str, model: LoggedModel | None = None, tokens: int = 0
    ) -> dict[str, Any]:
        """Commit a request, and return its future. Raises HttpError 409 for another request's sequence, 400 for a
        finished session."""
        session: LoggedSession = self._log.get("sessions", session_id)
        if session.finished is not None and self._log.request(request.scope, request.sequence) is None:
            raise HttpError(400, f"session {session_id} is finished: valid: a new session", code="session_finished")
        admission = self._dispatch.submit(request, session, model, tokens)
        if admission is RequestAdmission.CONFLICTING:
            raise HttpError(
                409,
                f"{request.scope} already has a request {request.sequence}, with other content: valid: repeat it "
                "unchanged, or the next number",
                code="sequence_conflict",
            )
        return {"request_id": f"{request.scope}:{request.sequence}"}

    def _submit_to_model(self, tenant: str, request: LoggedRequest, tokens: int = 0) -> dict[str, Any]:
        model: LoggedModel = self._catalogue.owned("models", tenant, request.scope)
        return {**self._submit(request, model.session, tokens=tokens), "model_id": model.id}

    async def _forward_backward(self, tenant: str, exchange: HttpExchange) -> Any:
        body = await exchange.body(codings=("zstd",))
        if exchange.header("content-encoding").strip().lower() == "zstd":
            body = decompressed(body, self.settings.max_body_bytes)
        message = parsed_request(body)
        sequence = _sequence({"seq_id": message.seq_id}, "seq_id", 1)
        digest = _digest("forward_backward", message.SerializeToString(deterministic=True))
        request = LoggedRequest(
            scope=message.model_id, sequence=sequence, kind="forward_backward", digest=digest, body=body
        )
        chunks = (chunk for datum in message.data for chunk in datum.model_input)
        return self._submit_to_model(tenant, request, sum(len(chunk.encoded_text.tokens) // 4 for chunk in chunks))

    async def _create_model(self, tenant: str, fields: Fields) -> Any:
        return self._new_model(tenant, "create_model", fields)

    async def _load_weights(self, tenant: str, fields: Fields) -> Any:
        if fields.get("session_id") is not None:
            return self._new_model(tenant, "load_weights", fields)
        sequence = _sequence(fields, "seq_id", 1)
        return self._submit_to_model(tenant, _request("load_weights", _text(fields, "model_id"), sequence, fields))

    def _new_model(self, tenant: str, kind: str, fields: Fields) -> dict[str, Any]:
        session: LoggedSession = self._catalogue.owned("sessions", tenant, _text(fields, "session_id"))
        model_id = f"{session.id}:train:{_sequence(fields, 'model_seq_id', 0)}"
        metadata, now_s = fields.get("user_metadata"), self._wall()
        model = LoggedModel(
            id=model_id,
            session=session.id,
            tenant=tenant,
            created_s=now_s,
            requested_s=now_s,
            adapter=None,
            metadata=msgspec.json.encode(metadata).decode() if isinstance(metadata, dict) else None,
            applied=-1,
        )
        return {**self._submit(_request(kind, model_id, 0, fields), session.id, model), "model_id": model_id}

    async def _sample(self, tenant: str, fields: Fields) -> Any:
        sampler: LoggedSampler = self._catalogue.owned("samplers", tenant, _text(fields, "sampling_session_id"))
        sequence = _sequence(fields, "seq_id", 0)
        count, sampling = fields.get("num_samples", 1), fields.get("sampling_params")
        length: object = cast("Fields", sampling).get("max_tokens") if isinstance(sampling, dict) else None
        valid_count = count if isinstance(count, int) and 0 < count <= 1024 else 0  # others fail with their future
        tokens = valid_count * min(abs(length), self._base.max_context_tokens) if isinstance(length, int) else 0
        future = self._submit(_request("asample", sampler.id, sequence, fields), sampler.session, tokens=tokens)
        return {**future, "sample_sequence_ids": [f"{future['request_id']}/{index}" for index in range(valid_count)]}

    async def _retrieve(self, tenant: str, exchange: HttpExchange) -> None:
        """Answer with a request's reply, or after a while with the reason why it has none."""
        request_id = _text(decoded(await exchange.body()), "request_id")
        scope, sequence = self._owned_request(tenant, request_id)
        self._dispatch.note_poll(scope.partition(":")[0])
        request = await exchange.while_connected(self._dispatch.reply(scope, sequence, _POLL_S))
        if request is None and not self._log.was_released(scope, sequence):
            raise HttpError(404, f"there is no request {request_id!r}", code="not_found")
        if request is None or request.released:
            reason = f"the reply of {request_id} was fetched, and isn't kept any longer; the request was done once"
            return await exchange.reply_with({"error": reason, "category": "user"})
        if request.reply is not None:
            kind = PROTOBUF if request.protobuf else b"application/json"
            await exchange.reply(200, request.reply, kind=kind)
            return self._dispatch.note_fetched(request)
        state: dict[str, Any] = {"queue_state": "active", "queue_state_reason": None}
        if (gap := self._dispatch.gap(scope)) is not None and gap.sequence < sequence:
            reason = f"waits for request {gap.sequence} of {scope}, which hasn't arrived for {gap.age_s:.0f} s"
            state = {"queue_state": "paused_capacity", "queue_state_reason": reason}
        await exchange.reply_with({"type": "try_again", "request_id": request_id, **state})

    def _owned_request(self, tenant: str, request_id: str) -> tuple[str, int]:
        scope, _, number = request_id.rpartition(":")
        if not (number.isascii() and number.isdecimal() and len(number) < 19):
            raise HttpError(404, f"there is no request {request_id!r}", code="not_found")
        self._catalogue.owned("models" if ":train:" in scope else "samplers", tenant, scope)
        return scope, int(number)

    async def _cancel(self, tenant: str, fields: Fields) -> Any:
        scope, sequence = self._owned_request(tenant, _text(fields, "request_id"))
        request = self._log.request(scope, sequence)
        if request is not None and request.kind != "asample":
            raise TenantRefused(f"request_id: {scope}:{sequence} is a {request.kind}: valid: one of asample")
        if request is not None:
            await self._dispatch.cancel(request)
        return {}

    # --- sessions and samplers ----------------------------------------------------------------------------------------

    async def _client_config(self, tenant: str, fields: Fields) -> Any:
        require_sdk(str(fields.get("sdk_version", "")))
        return _FLAGS

    async def _dynamic_config(self, tenant: str, fields: Fields) -> Any:
        return {"sample_cancel_enabled": True}

    async def _create_session(self, tenant: str, fields: Fields) -> Any:
        body = parsed(fields, CreateSessionBody)
        require_sdk(body.sdk_version)
        id, text = secrets.token_hex(8), msgspec.json.encode(body).decode()
        session = LoggedSession(id=id, tenant=tenant, created_s=self._wall(), finished=None, body=text)
        self._log.commit([insertion(session)])
        self._dispatch.keep_alive(session.id)
        return {"session_id": session.id, "type": "create_session", "warning_message": _MESSAGE}

    async def _heartbeat(self, tenant: str, fields: Fields) -> Any:
        session: LoggedSession = self._catalogue.owned("sessions", tenant, _text(fields, "session_id"))
        if session.finished is None:
            self._dispatch.keep_alive(session.id)
        return {"type": "session_heartbeat"}

    async def _finish(self, tenant: str, session_id: str, fields: Fields) -> Any:
        session: LoggedSession = self._catalogue.owned("sessions", tenant, session_id)
        reason = msgspec.json.encode(fields).decode()
        snapshots = "listed = 0 AND path IN (SELECT path FROM samplers WHERE session = ?)"
        self._log.commit([
            ("UPDATE sessions SET finished = coalesce(finished, ?) WHERE id = ?", (reason, session.id)),
            (f"UPDATE checkpoints SET expires_s = ? WHERE {snapshots}", (self._wall(), session.id)),
        ])  # fmt: skip
        await self._dispatch.end_session(session.id)
        return {}

    async def _create_sampling_session(self, tenant: str, fields: Fields) -> Any:
        body = parsed(fields, CreateSamplingSessionBody)
        session: LoggedSession = self._catalogue.owned("sessions", tenant, body.session_id)
        if body.model_path is None and body.base_model != self._base.name:
            raise TenantRefused(f"base_model = {body.base_model!r}: valid: {self._base.name!r}, or a model_path")
        path = body.model_path and self._operations.checkpoint(body.model_path, tenant, "model_path").path
        sampler = LoggedSampler(
            id=f"{session.id}:sample:{body.sampling_session_seq_id}",
            session=session.id,
            tenant=tenant,
            digest=_digest("create_sampling_session", msgspec.json.encode(dict(fields), order="deterministic")),
            path=path,
            inflight=0,
        )
        known: LoggedSampler | None = self._log.get("samplers", sampler.id)
        if known is None:
            self._log.commit([insertion(sampler)])
        elif known.digest != sampler.digest:
            raise HttpError(409, f"{sampler.id} exists, made by another request", code="sequence_conflict")
        self._dispatch.keep_alive(session.id)
        return {"sampling_session_id": sampler.id, "type": "create_sampling_session"}

    async def _get_info(self, tenant: str, fields: Fields) -> Any:
        return self._catalogue.model(tenant, _text(fields, "model_id"))

    async def _weights_info(self, tenant: str, fields: Fields) -> Any:
        return self._catalogue.weights_info(tenant, _text(fields, "tinker_path"))

    async def _telemetry(self, tenant: str, fields: Fields) -> Any:
        events = fields.get("events")
        self.telemetry[tenant] += len(events) if isinstance(events, list) else 0
        return {"status": "accepted"}

    def _capabilities(self) -> dict[str, Any]:
        sizes = {"model_name": self._base.name, "max_context_length": self._base.max_context_tokens}
        return {"supported_models": [{**sizes, "trainable": True, "sampleable": True}]}


def _scope(method: str, name: str) -> str:
    """Return the scope that a route needs; "": any key may use it."""
    if name in ("asample", "create_sampling_session"):
        return "sample"
    trains = method != "GET" and name in ("forward_backward", "create_model", "load_weights", *_REQUESTS)
    return "train" if trains or (method != "GET" and name.startswith("training_runs/")) else ""


def _request(kind: str, scope: str, sequence: int, fields: Fields) -> LoggedRequest:
    body = msgspec.json.encode(dict(fields), order="deterministic")
    # The SDK repeats a request for a sampling session under a new number of that session: it is the same request.
    identity = {name: field for name, field in fields.items() if name != "sampling_session_seq_id"}
    digest = _digest(kind, msgspec.json.encode(identity, order="deterministic"))
    return LoggedRequest(scope=scope, sequence=sequence, kind=kind, digest=digest, body=body)


def _digest(kind: str, body: bytes) -> bytes:
    return hashlib.sha256(kind.encode() + b"\n" + body).digest()[:16]


def _text(fields: Fields, name: str) -> str:
    """Return a field that is a text. Raises TenantRefused."""
    content = fields.get(name)
    if not isinstance(content, str) or not content.isprintable():
        raise TenantRefused(f"{name} = {content!r}: valid: a text")
    return content


def _sequence(fields: Fields, name: str, lowest: int) -> int:
    """Return a sequence number. Raises TenantRefused."""
    number = fields.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not lowest <= number < _MAX_SEQUENCE:
        raise TenantRefused(f"{name} = {number!r}: valid: a number from {lowest} on")
    return number
