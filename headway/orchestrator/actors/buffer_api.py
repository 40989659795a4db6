"""The buffer's service over HTTP: leases of members, demonstrations, finished groups as they wait for the trainer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from headway.buffer.readers import read_member, read_rollout_counts, read_waiting
from headway.generator.endpoint import fields
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.endpoint.http_app import decoded, require_method
from headway.records.clients import TextCodec
from headway.records.conversations import RequestRefused
from headway.records.errors import ConfigurationError
from headway.records.rollout import FinishedGroup, Rollout
from headway.rollout.leases import LeaseBook, LeaseKey, LeaseRefused
from headway.rollout.makers.agent import agent_task
from headway.rollout.makers.outside_workers import Finish, RemoteHost
from headway.runtime.line_file import LineFile
from headway.tasks.source_rows import require_messages

Route = Callable[[HttpExchange], Awaitable[None]]
Work = Callable[[HttpExchange, fields.Values], Awaitable[Any]]  # (exchange, its body's fields) -> the answer
_BODY_BYTES = 4 << 20  # of a request
_FINISH_BYTES = 1 << 18  # of a worker's report on a member: it is kept until the trainer has the group
_MOST_GROUPS = 64  # in one response
_STATUSES = {"lease_unknown": 404, "session_not_recorded": 400}  # others: 409

_TEXT = fields.raw({"type": "string"})
_LEASE = {"wait_s": fields.number(0, 60)}
_ATTEMPT = {
    "group": fields.raw({"anyOf": [{"type": "string"}, {"type": "integer"}]}, required=True),
    "member": fields.integer(0, 1 << 16, required=True),
    "attempt": fields.integer(0, 1 << 31, required=True),
}
_OUTCOME = {
    "reward": fields.reward(),
    "solved": fields.flag(default=None),
    "metadata": fields.structure(),
    "extra": fields.structure(),
}
_FAIL = _ATTEMPT | {"cause": _TEXT, "infrastructure": fields.flag(default=True)}
_WRITE = {
    "uid": _TEXT,
    "instance_id": fields.raw({}),
    "messages": fields.raw({"type": "array"}),
    "reward": fields.reward(),
    "extra_info": fields.structure(),
}
_READ = {"batch_size": fields.integer(-1, 1 << 31)}


class BufferApi:
    """Implements the routes of the service; `routes` maps their paths. All need one of its keys, where it has keys.

    A worker's calls are ``/buffer/lease``, ``renew``, ``finish`` and ``fail``. The other paths are TritonForge's:
    ``/buffer/write`` finishes a member, or keeps a demonstration; the others show what waits for the trainer, which
    alone takes it.
    """

    def __init__(
        self, host: RemoteHost, keys: ApiKeys, codec: TextCodec, buffer_path: Path | None, demonstrations: Path | None
    ) -> None:
        """``buffer_path``: the run's buffer; ``demonstrations``: the file for text without a session. None: not in a
        run."""
        self.routes: dict[str, Route] = {
            "/buffer/lease": self._route("POST", _LEASE, self._lease),
            "/buffer/renew": self._route("POST", _ATTEMPT, self._renew),
            "/buffer/finish": self._route("POST", _ATTEMPT | _OUTCOME, self._finish),
            "/buffer/fail": self._route("POST", _FAIL, self._fail),
            "/buffer/write": self._route("POST", _WRITE, self._write),
            "/buffer/read": self._route("POST", _READ, self._read),
            "/get_rollout_data": self._route("POST", _READ, self._read),
            "/buffer/peek": self._route("GET", {}, lambda exchange, values: self._read(exchange, {"batch_size": 1})),
            "/buffer/stats": self._route("GET", {}, self._stats),
            "/start_rollout": self._route("POST", {}, self._start),
            "/buffer/metrics": self._route("GET", {}, self._metrics),
        }
        self._host = host
        self._manager = host.lease_manager
        self._keys = keys
        self._codec = codec
        self._buffer_path = buffer_path
        self._demonstrations = demonstrations
        self._file: LineFile | None = None

    def _route(self, method: str, body_fields: Mapping[str, fields.Field], work: Work) -> Route:
        async def answer(exchange: HttpExchange) -> None:
            self._keys.require(exchange.key)
            require_method(exchange, method)
            body = decoded(await exchange.body(_BODY_BYTES) or b"{}") if method == "POST" else {}
            await exchange.reply_with(await work(exchange, fields.read(body, body_fields)))

        return answer

    # --- leases ---------------------------------------------------------------------------------------------------

    async def _lease(self, exchange: HttpExchange, values: fields.Values) -> Any:
        attempt = await self._manager.lease(values["wait_s"] or 0.0, exchange.gone())
        if attempt is None:
            return None
        (group, member), number = attempt.key, attempt.number
        host_header = exchange.header("host")  # by which this worker has reached the run, maybe through a proxy
        scheme = "https" if exchange.header("x-forwarded-proto") == "https" else "http"
        base_url = f"{scheme}://{host_header}" if host_header else self._host.conversations.address
        return {
            "uid": _uid(attempt.key, number),
            "instance_id": group,
            "group": group,
            "member": member,
            "attempt": number,
            "task": agent_task(attempt.group.task, self._host.environment.shows),
            "base_url": f"{base_url}/v1",
            "api_key": attempt.conversation.key,
            "model": self._host.endpoint.model,
            "lease_s": self._manager.book.lease_s,
        }

    async def _renew(self, exchange: HttpExchange, values: fields.Values) -> Any:
        await self._call_attempt(values, self._manager.renew)
        return {"lease_s": self._manager.book.lease_s}

    async def _finish(self, exchange: HttpExchange, values: fields.Values) -> Any:
        finish = _require_storable(Finish(**{field: values[field] for field in _OUTCOME}))
        uid, is_first = await self._call_attempt(values, lambda key, number: self._manager.finish(key, number, finish))
        return {"uid": uid, "finished": True, "repeated": not is_first}

    async def _fail(self, exchange: HttpExchange, values: fields.Values) -> Any:
        cause, infrastructure = str(values["cause"] or "no cause given"), values["infrastructure"]
        uid, is_first = await self._call_attempt(
            values, lambda key, number: self._manager.fail(key, number, cause, infrastructure=infrastructure)
        )
        return {"uid": uid, "failed": True, "repeated": not is_first}

    async def _call_attempt(self, values: fields.Values, call: Callable[[LeaseKey, int], Any]) -> tuple[str, Any]:
        """Make a call on the attempt that ``values`` name; returns the attempt's uid and the call's result."""
        group, number = values["group"], values["attempt"]
        if isinstance(group, bool) or not isinstance(group, str | int) or len(str(group)) > 256:
            raise RequestRefused(f"group = {fields.formatted(group)}: valid: the group of a lease", param="group")
        key = str(group), values["member"]
        if key not in self._manager.book:
            await self._restore_lease(*key)
        try:
            return _uid(key, number), call(key, number)
        except LeaseRefused as refused:
            self._manager.book.counts["refused"] += 1
            raise HttpError(_STATUSES.get(refused.code, 409), str(refused), code=refused.code) from None

    async def _restore_lease(self, group: str, member: int) -> None:
        """Restore a former process's lease from the buffer, where its worker had finished the member. Raises HttpError
        where the buffer holds the member without a finish. A member that isn't in the buffer was never leased."""
        if self._buffer_path is None or not re.fullmatch("0|[1-9][0-9]{0,17}", group):
            return
        state, rollout = await asyncio.to_thread(read_member, self._buffer_path, int(group), member)
        if rollout is not None and (finish := Finish.of(rollout)) is not None:
            self._manager.book.restore((group, member), rollout.attempts, finish.ending)
        elif state == "open":
            reason = f"group {group}: the run is resuming, and hasn't offered member {member} yet; try again"
            raise HttpError(503, reason, code="not_offered_yet", headers=((b"retry-after", b"1"),))
        elif state:
            raise HttpError(409, f"group {group} accepts no more finishes: {state}", code="lease_ended")

    # --- TritonForge's names --------------------------------------------------------------------------------------

    async def _write(self, exchange: HttpExchange, values: fields.Values) -> Any:
        if values["uid"] is None:
            self._keep_demonstration(values)
            status_text = "kept for headway sft only: text without a recorded session isn't trained on by this run"
        else:
            uid_match = re.fullmatch(r"(.{1,256})-(\d{1,9})\.(\d{1,9})", str(values["uid"]))
            if uid_match is None:
                raise RequestRefused("uid: valid: the uid of a lease", param="uid")
            attempt_fields = {"group": uid_match[1], "member": int(uid_match[2]), "attempt": int(uid_match[3])}
            outcome = {"reward": values["reward"], "extra": values["extra_info"]}
            await self._finish(exchange, fields.read(attempt_fields | outcome, _ATTEMPT | _OUTCOME))
            status_text = "the member is finished; its tokens are those recorded"
        row = {field: value for field, value in values.items() if value is not None}
        return {"success": True, "message": status_text, "data": {"data": [row], "meta_info": "write to buffer"}}

    def _keep_demonstration(self, values: fields.Values) -> None:
        """Append a row of `headway sft`'s data. Raises HttpError, RequestRefused."""
        if self._demonstrations is None:
            raise HttpError(409, "this isn't a run: it keeps no demonstrations", code="not_a_run")
        try:
            messages = require_messages(values["messages"], "messages", "the request")
        except ConfigurationError as error:
            raise RequestRefused(str(error), param="messages") from None
        if all(message["role"] != "assistant" for message in messages):  # headway sft would refuse the whole file
            raise RequestRefused("messages: none is the assistant's, so there is nothing to learn", param="messages")
        row = {field: values[field] for field in ("instance_id", "reward", "extra_info") if values[field] is not None}
        line = msgspec.json.encode(_require_storable({"messages": messages, **row}, _BODY_BYTES))
        self._file = self._file or LineFile(self._demonstrations)
        self._file.append(line)

    async def _read(self, exchange: HttpExchange, values: fields.Values) -> Any:
        """Show the oldest finished groups that the trainer has not trained on."""
        batch_size = values["batch_size"]
        limit = _MOST_GROUPS if batch_size is None or batch_size < 0 else min(batch_size, _MOST_GROUPS)
        rows = await asyncio.to_thread(self._waiting_rows, limit)
        groups = list(dict.fromkeys(row["instance_id"] for row in rows))
        totals = {
            "total_samples": len(rows),
            "num_groups": len(groups),
            "avg_group_size": len(rows) / max(len(groups), 1),
            "avg_reward": sum(row["reward"] for row in rows) / max(len(rows), 1),
            "finished_groups": groups,
        }
        status_text = "read-only: only the run's trainer takes groups"
        return {"success": bool(rows), "message": status_text, "data": {"data": rows, "meta_info": totals}}

    def _waiting_rows(self, most_groups: int) -> list[dict[str, Any]]:
        groups = [] if self._buffer_path is None else read_waiting(self._buffer_path, most_groups)
        return [row for group in groups for row in member_rows(group, self._codec)]

    async def _stats(self, exchange: HttpExchange, values: fields.Values) -> Any:
        waiting_count, written_count, read_count = (0, 0, 0)
        if self._buffer_path is not None:
            waiting_count, written_count, read_count = await asyncio.to_thread(read_rollout_counts, self._buffer_path)
        book = self._manager.book
        rollouts = {"current_size": waiting_count, "total_written": written_count, "total_read": read_count}
        leases = {"offered": book.offered, "leased": book.leased, "leases": dict(book.counts)}
        return {"success": True, "message": "", "data": rollouts | leases}

    async def _start(self, exchange: HttpExchange, values: fields.Values) -> Any:
        status_text = "the run is active and starts no workers: they lease members at /buffer/lease"
        return {"success": True, "message": status_text, "data": {"status": "running"}}

    async def _metrics(self, exchange: HttpExchange, values: fields.Values) -> bytes:
        return metrics_text(self._manager.book)


def _uid(key: LeaseKey, attempt: int) -> str:
    """The uid of an attempt: GROUP-MEMBER.ATTEMPT."""
    return f"{key[0]}-{key[1]}.{attempt}"


def _require_storable(value: Any, most_bytes: int = _FINISH_BYTES) -> Any:
    """Return ``value``, a worker's report. Raises RequestRefused where it can't be stored or exceeds ``most_bytes``."""
    try:
        size_bytes = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError) as error:  # an integer beyond 64 bits
        raise RequestRefused(f"the request's content can't be stored: {error}") from None
    if size_bytes > most_bytes:
        raise RequestRefused(f"the request's content has {size_bytes} bytes, at most {most_bytes} are valid")
    return value


def member_rows(finished: FinishedGroup, codec: TextCodec) -> list[dict[str, Any]]:
    """The valid members of a finished group in TritonForge's format."""
    task, group_name = finished.group.task, str(finished.group.index)
    prompt = [{"role": "user", "content": task.content}] if isinstance(task.content, str) else list(task.content)
    return [
        {
            "uid": rollout.rollout_id,
            "instance_id": group_name,
            "messages": [*prompt, *_response_messages(rollout, codec)],
            "reward": rollout.reward,
            "extra_info": {
                "task_id": task.task_id,
                "solved": rollout.solved,
                "attempts": rollout.attempts,
                "first_version": rollout.first_version,
                "last_version": rollout.last_version,
                **rollout.verdict,
            },
        }
        for rollout in finished.valid
    ]


def _response_messages(rollout: Rollout, codec: TextCodec) -> Iterator[dict[str, Any]]:
    """Yield the texts of a rollout's trunk as messages: sampled ones as the assistant's, others as the user's."""
    start = 0
    for is_sampled, mask_run in groupby(rollout.response_mask):
        end = start + sum(1 for _ in mask_run)
        yield {"role": "assistant" if is_sampled else "user", "content": codec.decode(rollout.response_ids[start:end])}
        start = end


def metrics_text(book: LeaseBook) -> bytes:
    """The service's metrics in Prometheus' text format."""
    rows = [f'headway_buffer_leases_total{{what="{label}"}} {count}' for label, count in sorted(book.counts.items())]
    gauge_lines = [f"headway_buffer_offered {book.offered}", f"headway_buffer_leased {book.leased}"]
    return "\n".join([*gauge_lines, "# TYPE headway_buffer_leases_total counter", *rows, ""]).encode()
