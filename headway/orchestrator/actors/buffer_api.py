"""The buffer's service over HTTP: leases of members, demonstrations, finished groups as they wait for the trainer."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from headway.buffer.view import read_member_state, read_rollout_counts, read_waiting
from headway.generator.endpoint import fields
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.endpoint.refusals import HttpError
from headway.records.clients import TextCodec
from headway.records.conversations import RequestRefused
from headway.records.errors import ConfigurationError
from headway.records.rollout import FinishedGroup, Rollout
from headway.rollout.leases import LeaseBook, LeaseKey, LeaseRefused
from headway.rollout.makers.agent import shown_task
from headway.rollout.makers.remote import Finish, RemoteHost
from headway.runtime.line_file import LineFile
from headway.tasks.rows import require_messages

Route = Callable[[HttpExchange], Awaitable[None]]
_BODY_BYTES = 4 << 20  # of a request
_FINISH_BYTES = 1 << 18  # of what a worker says of a member: it is kept until the trainer has the group
_MOST_GROUPS = 64  # shown at once
_LONGEST_WAIT_S = 60.0  # for a member to lease
_STATUSES = {"lease_unknown": 404, "session_not_recorded": 400}  # others: 409

_REWARD = fields.number(-sys.float_info.max, sys.float_info.max)
_NAME = fields.raw({"anyOf": [{"type": "string"}, {"type": "integer"}]}, required=True)
_NAMED = {
    "group": _NAME,
    "member": fields.integer(0, 1 << 16, required=True),
    "attempt": fields.integer(0, 1 << 31, required=True),
}
_LEASE = {"wait_s": fields.number(0, _LONGEST_WAIT_S)}
_FINISH = {
    **_NAMED,
    "reward": _REWARD,
    "solved": fields.flag(default=None),
    "metadata": fields.structure(),
    "extra": fields.structure(),
}
_FAIL = {**_NAMED, "cause": fields.raw({"type": "string"}), "infrastructure": fields.flag(default=True)}
_WRITE = {
    "uid": fields.raw({"type": "string"}),
    "instance_id": fields.raw({}),
    "messages": fields.raw({"type": "array"}),
    "reward": _REWARD,
    "extra_info": fields.structure(),
}
_READ = {"batch_size": fields.integer(-1, 1 << 31)}


class BufferApi:
    """The routes of the service; `routes` maps their paths. All need a key of the service's, where it has keys.

    A worker's calls are ``/buffer/lease``, ``renew``, ``finish`` and ``fail``. TritonForge's names stand beside:
    ``/buffer/write`` finishes a member, or keeps a demonstration; the others show what waits for the trainer, which
    alone takes it.
    """

    def __init__(
        self, host: RemoteHost, keys: ApiKeys, codec: TextCodec, books: Path | None, demonstrations: Path | None
    ) -> None:
        """``books``: the run's buffer; ``demonstrations``: the file for text without a session. None: not in a run."""
        self.routes: dict[str, Route] = {
            "/buffer/lease": self._post(self._lease),
            "/buffer/renew": self._post(self._renew),
            "/buffer/finish": self._post(self._finish),
            "/buffer/fail": self._post(self._fail),
            "/buffer/write": self._post(self._write),
            "/buffer/read": self._post(self._read),
            "/get_rollout_data": self._post(self._read),
            "/start_rollout": self._post(self._start),
            "/buffer/peek": self._get(self._peek),
            "/buffer/stats": self._get(self._stats),
            "/buffer/metrics": self._metrics,
        }
        self._host = host
        self._desk = host.desk
        self._keys = keys
        self._codec = codec
        self._books = books
        self._demonstrations = demonstrations
        self._file: LineFile | None = None

    # --- leases ---------------------------------------------------------------------------------------------------

    async def _lease(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        wait_s = fields.read(body, _LEASE)["wait_s"] or 0.0
        attempt = await self._desk.lease(wait_s, exchange.gone())
        if attempt is None:
            return None
        (group, member), number = attempt.key, attempt.number
        address = exchange.header("host")  # by which this worker has reached the run, maybe through a proxy
        scheme = "https" if exchange.header("x-forwarded-proto") == "https" else "http"
        base = f"{scheme}://{address}" if address else self._host.conversations.address
        return {
            "uid": _uid(attempt.key, number),
            "instance_id": group,
            "group": group,
            "member": member,
            "attempt": number,
            "task": shown_task(attempt.group.task, self._host.environment.shows),
            "base_url": f"{base}/v1",
            "api_key": attempt.conversation.key,
            "model": self._host.endpoint.model,
            "lease_s": self._desk.book.lease_s,
        }

    async def _renew(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        key, number = _named(fields.read(body, _NAMED))
        return {"lease_s": await self._about(key, lambda: self._desk.renew(key, number))}

    async def _finish(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        values = fields.read(body, _FINISH)
        key, number = _named(values)
        said = _finish(values["reward"], values["solved"], values["metadata"], values["extra"])
        first = await self._about(key, lambda: self._desk.finish(key, number, said))
        return {"uid": _uid(key, number), "finished": True, "repeated": not first}

    async def _fail(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        values = fields.read(body, _FAIL)
        key, number = _named(values)
        cause, infrastructure = str(values["cause"] or "no cause given")[:300], values["infrastructure"]
        await self._about(key, lambda: self._desk.fail(key, number, cause, infrastructure=infrastructure))
        return {"uid": _uid(key, number), "failed": True}

    async def _about(self, key: LeaseKey, call: Callable[[], Any]) -> Any:
        """Return what a call about a lease returns. Where the member was not offered here, the lease may be a former
        process's, and the books tell what became of its group; if it is open, the run is about to offer it again."""
        try:
            return call()
        except LeaseRefused as refused:
            (group, member), state = key, ""
            if key not in self._desk.book and self._books is not None and re.fullmatch("[0-9]{1,18}", group):
                state = await asyncio.to_thread(read_member_state, self._books, int(group), member)
            if state == "open":
                again = ((b"retry-after", b"1"),)
                message = f"group {group}: the run is resuming, and hasn't offered member {member} yet; ask again"
                raise HttpError(503, message, code="not_offered_yet", headers=again) from None
            if state:
                raise HttpError(409, f"group {group} is over: {state}", code="lease_ended") from None
            raise HttpError(_STATUSES.get(refused.code, 409), str(refused), code=refused.code) from None

    # --- TritonForge's names --------------------------------------------------------------------------------------

    async def _write(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        values = fields.read(body, _WRITE)
        if values["uid"]:
            uid = re.fullmatch(r"(.{1,256})-(\d{1,9})\.(\d{1,9})", str(values["uid"]))
            if uid is None:
                raise RequestRefused("uid: valid is the uid of a lease", param="uid")
            key, number = (uid[1], int(uid[2])), int(uid[3])
            said = _finish(values["reward"], None, {}, values["extra_info"])
            await self._about(key, lambda: self._desk.finish(key, number, said))
            message = "the member is finished; its tokens are those recorded"
        else:
            self._keep_demonstration(values)
            message = "kept for headway sft alone: text without a recorded session isn't trained on by this run"
        return {"success": True, "message": message, "data": {"data": [body], "meta_info": "write to buffer"}}

    def _keep_demonstration(self, values: Mapping[str, Any]) -> None:
        """Append a row of `headway sft`'s data. Raises HttpError, RequestRefused."""
        if self._demonstrations is None:
            raise HttpError(409, "this isn't a run: it keeps no demonstrations", code="not_a_run")
        try:
            messages = require_messages(values["messages"], "messages", "the request")
        except ConfigurationError as error:
            raise RequestRefused(str(error), param="messages") from None
        row = {name: values[name] for name in ("instance_id", "reward", "extra_info") if values[name] is not None}
        try:
            line = msgspec.json.encode({"messages": messages, **row})
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestRefused(f"this row can't be stored: {error}") from None
        if self._file is None:
            self._file = LineFile(self._demonstrations)
        self._file.append(line)

    async def _read(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        wanted = fields.read(body, _READ)["batch_size"]
        most = _MOST_GROUPS if wanted is None or wanted < 0 else min(wanted, _MOST_GROUPS)
        return await self._shown(most)

    async def _peek(self) -> Any:
        return await self._shown(1)

    async def _shown(self, most_groups: int) -> Any:
        """The oldest finished groups that the trainer has not trained on."""
        found = [] if self._books is None else await asyncio.to_thread(read_waiting, self._books, most_groups)
        items = [item for group in found for item in shown_items(group, self._codec)]
        rewards = [item["reward"] for item in items]
        meta = {
            "total_samples": len(items),
            "num_groups": len(found),
            "avg_group_size": len(items) / len(found) if found else 0.0,
            "avg_reward": sum(rewards) / len(rewards) if rewards else 0.0,
            "finished_groups": [str(one.group.index) for one in found],
        }
        message = "shown, not taken: only the run's trainer takes groups"
        return {"success": bool(items), "message": message, "data": {"data": items, "meta_info": meta}}

    async def _stats(self) -> Any:
        counts = (0, 0, 0) if self._books is None else await asyncio.to_thread(read_rollout_counts, self._books)
        shown: dict[str, Any] = dict(zip(("current_size", "total_written", "total_read"), counts, strict=True))
        book = self._desk.book
        shown |= {"offered": book.offered, "leased": book.leased, "leases": dict(book.counts)}
        return {"success": True, "message": "", "data": shown}

    async def _start(self, exchange: HttpExchange, body: Mapping[str, Any]) -> Any:
        message = "the run is going, and starts no workers: they lease members at /buffer/lease"
        return {"success": True, "message": message, "data": {"status": "running"}}

    async def _metrics(self, exchange: HttpExchange) -> None:
        self._require(exchange, "GET")
        await exchange.reply(200, metrics_text(self._desk.book), kind=b"text/plain; version=0.0.4; charset=utf-8")

    # --- what every route needs -------------------------------------------------------------------------------------

    def _post(self, work: Callable[[HttpExchange, Mapping[str, Any]], Awaitable[Any]]) -> Route:
        async def answer(exchange: HttpExchange) -> None:
            self._require(exchange, "POST")
            raw = await exchange.body(_BODY_BYTES)
            try:
                body: Any = msgspec.json.decode(raw or b"{}")
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise HttpError(400, f"the request's body is not valid JSON: {error}") from None
            if not isinstance(body, dict):
                raise HttpError(400, "the request's body must be a JSON object")
            await exchange.reply(200, msgspec.json.encode(await work(exchange, body)))

        return answer

    def _get(self, work: Callable[[], Awaitable[Any]]) -> Route:
        async def answer(exchange: HttpExchange) -> None:
            self._require(exchange, "GET")
            await exchange.reply(200, msgspec.json.encode(await work()))

        return answer

    def _require(self, exchange: HttpExchange, method: str) -> None:
        self._keys.require(exchange.key)
        if exchange.method != method:
            headers = ((b"allow", method.encode()),)
            what = f"{exchange.method} {exchange.path}: valid is {method}"
            raise HttpError(405, what, code="method_not_allowed", headers=headers)


def _uid(key: LeaseKey, attempt: int) -> str:
    """The uid of an attempt: GROUP-MEMBER.ATTEMPT."""
    return f"{key[0]}-{key[1]}.{attempt}"


def _named(values: Mapping[str, Any]) -> tuple[LeaseKey, int]:
    group = values["group"]
    if isinstance(group, bool) or not isinstance(group, str | int) or len(str(group)) > 256:
        raise RequestRefused(f"group = {fields.shown(group)}: valid is the group of a lease", param="group")
    return (str(group), values["member"]), values["attempt"]


def _finish(reward: float | None, solved: bool | None, metadata: dict[str, Any], extra: dict[str, Any]) -> Finish:
    """Make the record that finishes a member. Raises RequestRefused for what the buffer can't store."""
    said = Finish(reward=reward, solved=solved, metadata=metadata, extra=extra)
    try:
        size = len(msgspec.msgpack.encode(said))
    except (TypeError, ValueError, OverflowError) as error:  # an integer beyond 64 bits
        raise RequestRefused(f"metadata or extra can't be stored: {error}") from None
    if size > _FINISH_BYTES:
        raise RequestRefused(f"metadata and extra are {size} bytes, at most {_FINISH_BYTES} are valid")
    return said


def shown_items(finished: FinishedGroup, codec: TextCodec) -> list[dict[str, Any]]:
    """The valid members of a finished group in TritonForge's format."""
    group = finished.group
    return [
        {
            "uid": rollout.rollout_id,
            "instance_id": str(group.index),
            "messages": [*_prompt(group.task.shown), *_said(rollout, codec)],
            "reward": rollout.reward,
            "extra_info": {
                "task_id": group.task.task_id,
                "solved": rollout.solved,
                "attempts": rollout.attempts,
                "first_version": rollout.first_version,
                "last_version": rollout.last_version,
                **rollout.verdict,
            },
        }
        for rollout in finished.valid
    ]


def _prompt(shown: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": shown}] if isinstance(shown, str) else list(shown)


def _said(rollout: Rollout, codec: TextCodec) -> Iterator[dict[str, Any]]:
    """The texts of a rollout's trunk: sampled ones are the assistant's, what came between them the user's."""
    at = 0
    for sampled, run in groupby(rollout.response_mask):
        end = at + sum(1 for _ in run)
        yield {"role": "assistant" if sampled else "user", "content": codec.decode(rollout.response_ids[at:end])}
        at = end


def metrics_text(book: LeaseBook) -> bytes:
    """The service's metrics in Prometheus' text format."""
    counts = [f'headway_buffer_leases_total{{what="{what}"}} {count}' for what, count in sorted(book.counts.items())]
    gauges = [f"headway_buffer_offered {book.offered}", f"headway_buffer_leased {book.leased}"]
    return "\n".join([*gauges, "# TYPE headway_buffer_leases_total counter", *counts, ""]).encode()
