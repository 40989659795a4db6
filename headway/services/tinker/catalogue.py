"""The sessions, training runs and checkpoints of a tenant, as it sees and changes them."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from headway.generator.endpoint.errors import HttpError
from headway.records.tenants.protocols import BaseDescription, TenantRefused
from headway.services.tinker.log import LoggedCheckpoint, LoggedModel, TinkerLog
from headway.services.tinker.operations import Operations
from headway.services.tinker.requests import require_ttl

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_URL_S = 3600.0  # life of a download's address


class TinkerCatalogue:
    """Answers questions about sessions, training runs and checkpoints, by tenant: another's don't exist."""

    def __init__(
        self, log: TinkerLog, operations: Operations, base: BaseDescription, store: Path, wall: Callable[[], float]
    ) -> None:
        self._log = log
        self._operations = operations
        self._base = base
        self._store = store
        self._wall = wall
        self._secret = secrets.token_bytes(32)  # signs downloads; new at each start

    # --- sessions and models ------------------------------------------------------------------------------------------

    def session(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Describe a session. Raises HttpError 404."""
        session = self.owned("sessions", tenant, session_id)
        fields = msgspec.json.decode(session.body)
        return {
            "training_run_ids": [model.id for model in self._log.all("models", "session = ?", (session_id,))],
            "sampler_ids": [sampler.id for sampler in self._log.all("samplers", "session = ?", (session_id,))],
            "user_metadata": fields.get("user_metadata"),
            "display_name": fields.get("display_name"),
        }

    def sessions(self, tenant: str, query: dict[str, str]) -> dict[str, Any]:
        """List sessions, newest first."""
        sessions = self._log.all("sessions", "tenant = ? ORDER BY created_s DESC, id", (tenant,))
        return {"sessions": [session.id for session in _page(sessions, query)[0]]}

    def owned(self, table: str, tenant: str, key: str) -> Any:
        """Return a tenant's record. Raises HttpError 404 for an unknown one and another's."""
        record = self._log.get(table, key)
        if record is None or record.tenant != tenant:
            raise HttpError(404, f"there is no {table[:-1]} {key!r}", code="not_found")
        return record

    def training_run(self, tenant: str, model_id: str) -> dict[str, Any]:
        """Describe a model, also another's that has a published checkpoint. Raises HttpError 404."""
        model: LoggedModel | None = self._log.get("models", model_id)
        checkpoints = self._log.all("checkpoints", "model = ? AND listed = 1 ORDER BY created_s, path", (model_id,))
        if model is None or not (model.tenant == tenant or any(checkpoint.public for checkpoint in checkpoints)):
            raise HttpError(404, f"there is no training run {model_id!r}", code="not_found")
        adapter = model.settings()
        newest: dict[str, Any] = {}
        for checkpoint in checkpoints:
            if model.tenant == tenant or checkpoint.public:
                newest[checkpoint.path.split("/")[1]] = _described(checkpoint)
        return {
            "training_run_id": model.id,
            "base_model": self._base.name,
            "model_owner": model.tenant,
            "is_lora": True,
            "lora_rank": adapter and adapter.rank,
            "last_request_time": _time(model.requested_s),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": model.metadata and msgspec.json.decode(model.metadata),
        }

    def training_runs(self, tenant: str, query: dict[str, str]) -> dict[str, Any]:
        """List models, newest first."""
        models, cursor = _page(self._log.all("models", "tenant = ? ORDER BY created_s DESC, id", (tenant,)), query)
        return {"training_runs": [self.training_run(tenant, model.id) for model in models], "cursor": cursor}

    def model(self, tenant: str, model_id: str) -> dict[str, Any]:
        """Answer get_info."""
        model: LoggedModel = self.owned("models", tenant, model_id)
        adapter = model.settings()
        model_data = {
            "arch": self._base.architecture,
            "model_name": self._base.name,
            "tokenizer_id": self._base.tokenizer,
        }
        fields = {"model_data": model_data, "model_id": model.id, "is_lora": True, "model_name": self._base.name}
        return {**fields, "lora_rank": adapter and adapter.rank, "type": "get_info"}

    def sampler(self, tenant: str, sampler_id: str) -> dict[str, Any]:
        """Describe a sampling session."""
        sampler = self.owned("samplers", tenant, sampler_id)
        path = sampler.path and f"tinker://{sampler.path}"
        return {"sampler_id": sampler.id, "base_model": self._base.name, "model_path": path}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def weights_info(self, tenant: str, path: str) -> dict[str, Any]:
        """Describe a checkpoint's adapter. Raises HttpError 404."""
        try:
            adapter = self._operations.checkpoint(path, tenant, "tinker_path").settings()
        except TenantRefused as error:
            raise HttpError(404, str(error), code="not_found") from None
        return {
            "base_model": self._base.name,
            "is_lora": True,
            "lora_rank": adapter.rank,
            "train_unembed": False,
            "train_mlp": adapter.train_mlp,
            "train_attn": adapter.train_attention,
        }

    def checkpoints(self, tenant: str, query: dict[str, str], model_id: str = "") -> dict[str, Any]:
        """List a tenant's checkpoints, newest first; of one model, also those that another published."""
        if model_id:
            self.training_run(tenant, model_id)
        condition = "(tenant = ? OR public AND model = ?2) AND listed = 1 AND ?2 IN ('', model)"
        rows = self._log.all("checkpoints", f"{condition} ORDER BY created_s DESC, path", (tenant, model_id))
        page, cursor = _page(rows, query) if not model_id else (rows, None)
        return {"checkpoints": [_described(checkpoint) for checkpoint in page], "cursor": cursor}

    def own_checkpoint(self, tenant: str, model_id: str, checkpoint_id: str) -> LoggedCheckpoint:
        """Return a tenant's checkpoint. Raises HttpError 404."""
        return self.owned("checkpoints", tenant, f"{model_id}/{checkpoint_id}")

    async def delete(self, tenant: str, model_id: str, checkpoint_id: str) -> dict[str, Any]:
        """Delete a checkpoint."""
        await self._operations.delete_checkpoint(self.own_checkpoint(tenant, model_id, checkpoint_id).path)
        return {}

    def publish(self, tenant: str, model_id: str, checkpoint_id: str, *, public: bool) -> dict[str, Any]:
        """Let everybody read a checkpoint, or no longer."""
        path = self.own_checkpoint(tenant, model_id, checkpoint_id).path
        self._log.commit([("UPDATE checkpoints SET public = ? WHERE path = ?", (int(public), path))])
        return {}

    def set_ttl(self, tenant: str, model_id: str, checkpoint_id: str, ttl_s: object) -> dict[str, Any]:
        """Set the seconds after which a checkpoint is deleted; None: never. Raises TenantRefused."""
        path = self.own_checkpoint(tenant, model_id, checkpoint_id).path
        if ttl_s is not None and (not isinstance(ttl_s, int) or isinstance(ttl_s, bool)):
            raise TenantRefused(f"ttl_seconds = {ttl_s!r}: valid: an integer, or null")
        require_ttl(ttl_s)
        expires_s = None if ttl_s is None else self._wall() + ttl_s
        self._log.commit([("UPDATE checkpoints SET expires_s = ? WHERE path = ?", (expires_s, path))])
        return {}

    def download_urls(self, tenant: str, model_id: str, checkpoint_id: str, address: str) -> dict[str, Any]:
        """Return addresses, valid for an hour, at which anybody can download the files of external weights."""
        path = self.own_checkpoint(tenant, model_id, checkpoint_id).path
        if path.split("/")[1] != "external_weights":
            raise TenantRefused(f"checkpoint = {checkpoint_id!r}: valid: external_weights/NAME")
        expires_s = self._wall() + _URL_S
        urls: dict[str, str] = {}
        try:
            files = sorted((self._store / "checkpoints" / path).iterdir())
        except OSError as error:
            raise HttpError(404, f"the files of {path!r} can't be read: {error.strerror}", code="not_found") from None
        for file in files:
            query = {"expires": f"{expires_s:.0f}", "signature": self._signature(f"{path}/{file.name}", expires_s)}
            urls[file.name] = f"{address}/api/v1/files/{quote(path)}/{quote(file.name)}?{urlencode(query)}"
        return {"urls": urls, "expires": _time(expires_s)}

    def download(self, path: str, query: dict[str, str]) -> bytes:
        """Return a file's content. Raises HttpError 403 for addresses that expired, or aren't of `download_urls`."""
        expires_text = query.get("expires", "")
        expires_s = float(expires_text) if expires_text.isdecimal() else 0.0
        signature = self._signature(path, expires_s)
        if expires_s < self._wall() or not hmac.compare_digest(signature.encode(), query.get("signature", "").encode()):
            raise HttpError(403, "the address has expired, or isn't one of this service's", code="forbidden")
        try:
            return (self._store / "checkpoints" / path).read_bytes()
        except OSError:
            raise HttpError(404, f"there is no file {path!r} any longer", code="not_found") from None

    def _signature(self, path: str, expires_s: float) -> str:
        return hmac.digest(self._secret, f"{expires_s:.0f} {path}".encode(), hashlib.sha256).hex()


def _described(checkpoint: LoggedCheckpoint) -> dict[str, Any]:
    _, kind, name = checkpoint.path.split("/")
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": _TYPES[kind],
        "time": _time(checkpoint.created_s),
        "tinker_path": f"tinker://{checkpoint.path}",
        "size_bytes": checkpoint.bytes,
        "public": bool(checkpoint.public),
        "user_metadata": checkpoint.metadata and msgspec.json.decode(checkpoint.metadata),
        "expires_at": None if checkpoint.expires_s is None else _time(checkpoint.expires_s),
    }


def _page(rows: Sequence[Any], query: dict[str, str]) -> tuple[Sequence[Any], dict[str, int]]:
    """Return the rows that ``limit`` and ``offset`` ask for, and the SDK's cursor. Raises TenantRefused."""
    for name in ("limit", "offset"):
        if not query.get(name, "0").isdecimal():
            raise TenantRefused(f"{name} = {query[name]!r}: valid: a number")
    limit, offset = min(int(query.get("limit", "100")[:9]), 1000), int(query.get("offset", "0")[:9])
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _time(stamp_s: float) -> str:
    return datetime.datetime.fromtimestamp(stamp_s, datetime.UTC).isoformat()
