"""The buffer's service over HTTP: leases of members, demonstrations, finished groups as they wait for the trainer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from headway.buffer.view import read_member, read_rollout_counts, read_waiting
from headway.generator.endpoint import fields
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.endpoint.http_app import decoded, require_method
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
Work = Callable[[HttpExchange, fields.Values], Awaitable[Any]]  # (exchange, its body's fields) -> the answer
_BODY_BYTES = 4 << 20  # of a request
_FINISH_BYTES = 1 << 18  # of what a worker says of a member: it is kept until the trainer has the group
_MOST_GROUPS = 64  # shown at once
_STATUSES = {"lease_unknown": 404, "session_not_recorded": 400}  # others: 409

_TEXT = fields.raw({"type": "string"})
_LEASE = {"wait_s": fields.number(0, 60)}
_NAMED = {
    "group": fields.raw({"anyOf": [{"type": "string"}, {"type": "integer"}]}, required=True),
    "member": fields.integer(0, 1 << 16, required=True),
    "attempt": fields.integer(0, 1 << 31, required=True),
}
_SAID = {
    "reward": fields.reward(),
    "solved": fields.flag(default=None),
    "metadata": fields.structure(),
    "extra": fields.structure(),
}
_FAIL = _NAMED | {"cause": _TEXT, "infrastructure": fields.flag(default=True)}
_WRITE = {
    "uid": _TEXT,
    "instance_id": fields.raw({}),
    "messages": fields.raw({"type": "array"}),
    "reward": fields.reward(),
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
            "/buffer/lease": self._route("POST", _LEASE, self._lease),
            "/buffer/renew": self._route("POST", _NAMED, self._renew),
            "/buffer/finish": self._route("POST", _NAMED | _SAID, self._finish),
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
        self._desk = host.desk
        self._keys = keys
        self._codec = codec
        self._books = books
        self._demonstrations = demonstrations
        self._file: LineFile | None = None

    def _route(self, method: str, wanted: Mapping[str, fields.Field], work: Work) -> Route:
        async def answer(exchange: HttpExchange) -> None:
            self._keys.require(exchange.key)
            require_method(exchange, method)
            body = decoded(await exchange.body(_BODY_BYTES) or b"{}") if method == "POST" else {}
            await exchange.reply_with(await work(exchange, fields.read(body, wanted)))

        return answer

    # --- leases ---------------------------------------------------------------------------------------------------

    async def _lease(self, exchange: HttpExchange, values: fields.Values) -> Any:
        attempt = await self._desk.lease(values["wait_s"] or 0.0, exchange.gone())
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

    async def _renew(self, exchange: HttpExchange, values: fields.Values) -> Any:
        await self._about(values, self._desk.renew)
        return {"lease_s": self._desk.book.lease_s}

    async def _finish(self, exchange: HttpExchange, values: fields.Values) -> Any:
        said = _storable(Finish(**{name: values[name] for name in _SAID}))
        uid, first = await self._about(values, lambda key, number: self._desk.finish(key, number, said))
        return {"uid": uid, "finished": True, "repeated": not first}

    async def _fail(self, exchange: HttpExchange, values: fields.Values) -> Any:
        cause, infrastructure = str(values["cause"] or "no cause given"), values["infrastructure"]
        uid, first = await self._about(
            values, lambda key, number: self._desk.fail(key, number, cause, infrastructure=infrastructure)
        )
        return {"uid": uid, "failed": True, "repeated": not first}

    async def _about(self, values: fields.Values, call: Callable[[LeaseKey, int], Any]) -> tuple[str, Any]:
        """Make a call about the attempt that ``values`` name; returns its uid and what the call returns."""
        group, number = values["group"], values["attempt"]
        if isinstance(group, bool) or not isinstance(group, str | int) or len(str(group)) > 256:
            raise RequestRefused(f"group = {fields.shown(group)}: valid is the group of a lease", param="group")
        key = str(group), values["member"]
        if key not in self._desk.book:
            await self._recall(*key)
        try:
            return _uid(key, number), call(key, number)
        except LeaseRefused as refused:
            self._desk.book.counts["refused"] += 1
            raise HttpError(_STATUSES.get(refused.code, 409), str(refused), code=refused.code) from None

    async def _recall(self, group: str, member: int) -> None:
        """Restore the lease of a former process from the books, where its worker had finished it. Raises HttpError
        where they hold the member and no finish of it; what isn't in the books was never leased."""
        if self._books is None or not re.fullmatch("0|[1-9][0-9]{0,17}", group):
            return
        state, rollout = await asyncio.to_thread(read_member, self._books, int(group), member)
        if rollout is not None and (said := Finish.of(rollout)) is not None:
            self._desk.book.restore((group, member), rollout.attempts, said.ending)
        elif state == "open":
            message = f"group {group}: the run is resuming, and hasn't offered member {member} yet; ask again"
            raise HttpError(503, message, code="not_offered_yet", headers=((b"retry-after", b"1"),))
        elif state:
            raise HttpError(409, f"group {group} takes no finishes any more: {state}", code="lease_ended")

    # --- TritonForge's names --------------------------------------------------------------------------------------

    async def _write(self, exchange: HttpExchange, values: fields.Values) -> Any:
        if values["uid"] is None:
            self._keep_demonstration(values)
            message = "kept for headway sft alone: text without a recorded session isn't trained on by this run"
        else:
            uid = re.fullmatch(r"(.{1,256})-(\d{1,9})\.(\d{1,9})", str(values["uid"]))
            if uid is None:
                raise RequestRefused("uid: valid is the uid of a lease", param="uid")
            named = {"group": uid[1], "member": int(uid[2]), "attempt": int(uid[3])}
            said = {"reward": values["reward"], "extra": values["extra_info"]}
            await self._finish(exchange, fields.read(named | said, _NAMED | _SAID))
            message = "the member is finished; its tokens are those recorded"
        item = {name: value for name, value in values.items() if value is not None}
        return {"success": True, "message": message, "data": {"data": [item], "meta_info": "write to buffer"}}

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
        row = {name: values[name] for name in ("instance_id", "reward", "extra_info") if values[name] is not None}
        line = msgspec.json.encode(_storable({"messages": messages, **row}, _BODY_BYTES))
        self._file = self._file or LineFile(self._demonstrations)
        self._file.append(line)

    async def _read(self, exchange: HttpExchange, values: fields.Values) -> Any:
        """Show the oldest finished groups that the trainer has not trained on."""
        wanted = values["batch_size"]
        most = _MOST_GROUPS if wanted is None or wanted < 0 else min(wanted, _MOST_GROUPS)
        items = await asyncio.to_thread(self._shown, most)
        groups = list(dict.fromkeys(item["instance_id"] for item in items))
        meta = {
            "total_samples": len(items),
            "num_groups": len(groups),
            "avg_group_size": len(items) / max(len(groups), 1),
            "avg_reward": sum(item["reward"] for item in items) / max(len(items), 1),
            "finished_groups": groups,
        }
        message = "shown, not taken: only the run's trainer takes groups"
        return {"success": bool(items), "message": message, "data": {"data": items, "meta_info": meta}}

    def _shown(self, most_groups: int) -> list[dict[str, Any]]:
        found = [] if self._books is None else read_waiting(self._books, most_groups)
        return [item for group in found for item in shown_items(group, self._codec)]

    async def _stats(self, exchange: HttpExchange, values: fields.Values) -> Any:
        waiting, written, read = (0, 0, 0)
        if self._books is not None:
            waiting, written, read = await asyncio.to_thread(read_rollout_counts, self._books)
        book = self._desk.book
        rollouts = {"current_size": waiting, "total_written": written, "total_read": read}
        leases = {"offered": book.offered, "leased": book.leased, "leases": dict(book.counts)}
        return {"success": True, "message": "", "data": rollouts | leases}

    async def _start(self, exchange: HttpExchange, values: fields.Values) -> Any:
        message = "the run is going, and starts no workers: they lease members at /buffer/lease"
        return {"success": True, "message": message, "data": {"status": "running"}}

    async def _metrics(self, exchange: HttpExchange, values: fields.Values) -> bytes:
        return metrics_text(self._desk.book)


def _uid(key: LeaseKey, attempt: int) -> str:
    """The uid of an attempt: GROUP-MEMBER.ATTEMPT."""
    return f"{key[0]}-{key[1]}.{attempt}"


def _storable(value: Any, most_bytes: int = _FINISH_BYTES) -> Any:
    """Return what a worker has said. Raises RequestRefused where it can't be stored, or is larger than that."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError) as error:  # an integer beyond 64 bits
        raise RequestRefused(f"what the request says can't be stored: {error}") from None
    if size > most_bytes:
        raise RequestRefused(f"what the request says is {size} bytes, at most {most_bytes} are valid")
    return value


def shown_items(finished: FinishedGroup, codec: TextCodec) -> list[dict[str, Any]]:
    """The valid members of a finished group in TritonForge's format."""
    task, index = finished.group.task, str(finished.group.index)
    asked = [{"role": "user", "content": task.shown}] if isinstance(task.shown, str) else list(task.shown)
    return [
        {
            "uid": rollout.rollout_id,
            "instance_id": index,
            "messages": [*asked, *_said(rollout, codec)],
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
