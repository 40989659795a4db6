"""Local servers that speak what the SDKs of E2B and Prime speak, as read from these SDKs; the sandboxes behind them are
local ones. What they say of the services themselves is only what the SDKs expect of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email
import json
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
import uvicorn
from sandbox_backends import SMALL, local

from headway.records.sandbox import Command, SandboxError, SandboxSpec, Snapshot
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.sandbox import LocalSandbox

Answer = tuple[int, bytes | AsyncIterator[bytes]]
KEY = "e2b_" + "0" * 40


@dataclass
class Box:
    sandbox: LocalSandbox
    labels: dict[str, str]
    body: dict[str, Any]  # as it was asked for
    created_s: float = field(default_factory=time.time)
    paused: bool = False


class Cloud:
    """An account: its sandboxes, what was asked of it, and what goes wrong. ``faults``: (what begins so, status, how
    often); a status of 0 ends the connection."""

    def __init__(self, backend: LocalBackend, spec: SandboxSpec) -> None:
        self.backend = backend
        self.spec = spec
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.asked: list[str] = []
        self.faults: list[list[Any]] = []
        self.address = ""

    async def make(self, name: str, labels: dict[str, str], body: dict[str, Any], ttl_s: float, source: str) -> Box:
        for box in self.boxes.values():  # idempotent, as both services are
            if box.body.get("key") == body.get("key"):
                return box
        spec = msgspec.structs.replace(self.spec, ttl_s=ttl_s)
        sandbox = await self.backend.create(spec, snapshot=self.snapshots.get(source))
        self.boxes[sandbox.id] = Box(sandbox, labels, body)
        return self.boxes[sandbox.id]

    def live(self, name: str) -> Box | None:
        box = self.boxes.get(name)
        return None if box is None or box.sandbox.ended else box

    async def run(self, box: Box, line: str, arguments: list[str]) -> tuple[int, bytes, bytes]:
        said = await box.sandbox.exec(Command(argv=[line, *arguments], timeout_s=600.0, max_output_bytes=4 << 20))
        code = said.exit_code if said.exit_code is not None else 128 + (said.signal or 0)
        return code, said.stdout, said.stderr

    async def serve(
        self, method: str, path: str, query: dict[str, list[str]], head: dict[str, str], body: bytes
    ) -> Any:
        raise NotImplementedError

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        head = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        what = f"{scope['method']} {scope['path']}"
        self.asked.append(what)
        for fault in self.faults:
            if what.startswith(fault[0]) and fault[2] > 0:
                fault[2] -= 1
                if fault[1] == 0:
                    raise ConnectionResetError
                await _send(send, fault[1], json.dumps({"code": fault[1], "message": "a fault", "detail": "a fault"}))
                return
        status, said = await self.serve(
            scope["method"], scope["path"], parse_qs(scope["query_string"].decode()), head, body
        )
        await _send(send, status, said, head.get("content-type", ""))


async def _send(send: Any, status: int, said: str | bytes | AsyncIterator[bytes], kind: str = "") -> None:
    streams = not isinstance(said, str | bytes)
    kind = kind if streams else "application/json" if not isinstance(said, bytes) else "application/octet-stream"
    if isinstance(said, bytes) and said[:1] in (b"{", b"["):
        kind = "application/json"
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]})
    if streams:
        async for part in said:  # pyright: ignore[reportGeneralTypeIssues]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": said if isinstance(said, bytes) else said.encode()})


def _envelope(data: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(data)) + data


def _file_in(kind: str, body: bytes) -> bytes:
    """What a form brings, or the body itself."""
    if not kind.startswith("multipart/"):
        return body
    message = email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body)
    part = message.get_payload()[0]
    return part.get_payload(decode=True)  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


class E2B(Cloud):
    """The control API and envd, at one address."""

    async def serve(
        self, method: str, path: str, query: dict[str, list[str]], head: dict[str, str], body: bytes
    ) -> Any:
        if "e2b-sandbox-id" in head:
            return await self._envd(method, path, query, head, body)
        if head.get("x-api-key") != KEY:
            return 401, b'{"code": 401, "message": "no such key"}'
        parts = path.strip("/").split("/")
        if parts == ["v2", "sandboxes"]:
            return await (self._create(json.loads(body), head) if method == "POST" else self._list(query))
        if parts[0] == "v2":
            parts = parts[1:]
        if method == "DELETE" and parts[0] == "templates":  # as the SDK deletes snapshots
            return (404 if self.snapshots.pop(parts[1], None) is None else 204), b""
        box = self.live(parts[1])
        if box is None:
            return 404, b'{"code": 404, "message": "sandbox not found"}'
        return await self._change(method, parts, box, json.loads(body) if body else {})

    async def _create(self, asked: dict[str, Any], head: dict[str, str]) -> Answer:
        asked["key"] = head.get("idempotency-key")
        source = asked["templateID"]
        if source not in ("base", *self.snapshots):
            return 404, b'{"code": 404, "message": "template not found"}'
        box = await self.make("", asked.get("metadata", {}), asked, float(asked["timeout"]), source)
        return 201, self._told(box)

    def _told(self, box: Box) -> bytes:
        said = {"templateID": "base", "sandboxID": box.sandbox.id, "clientID": "c", "envdVersion": "0.4.4"}
        return json.dumps({**said, "envdAccessToken": "token", "domain": None}).encode()

    async def _list(self, query: dict[str, list[str]]) -> Answer:
        wanted = parse_qs(query.get("metadata", [""])[0])
        found: list[dict[str, Any]] = []
        for name, box in self.boxes.items():
            if self.live(name) and all(box.labels.get(unquote(key)) == unquote(one[0]) for key, one in wanted.items()):
                at = datetime.fromtimestamp(box.created_s, UTC).isoformat()
                found.append(
                    {
                        **{"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.4.4"},
                        **{"startedAt": at, "endAt": at, "cpuCount": 1, "memoryMB": 512, "diskSizeMB": 512},
                        **{"state": "paused" if box.paused else "running", "metadata": box.labels},
                    }
                )
        return 200, json.dumps(found).encode()

    async def _change(self, method: str, parts: list[str], box: Box, asked: dict[str, Any]) -> Answer:
        do = parts[2] if len(parts) > 2 else ""
        if method == "DELETE":
            await box.sandbox.terminate()
        elif do == "timeout":
            await box.sandbox.renew(float(asked["timeout"]))
        elif do == "pause":
            await box.sandbox.pause()
            box.paused = True
        elif do == "connect":
            if box.paused:
                await box.sandbox.resume()
            box.paused = False
            return 200, self._told(box)
        elif do == "snapshots":
            if box.paused:
                return 404, b'{"code": 404, "message": "Sandbox not found"}'
            name = f"snapshot-{len(self.snapshots)}"
            self.snapshots[name] = await box.sandbox.snapshot(name)
            return 201, json.dumps({"snapshotID": name, "names": []}).encode()
        return 204, b""

    async def _envd(
        self, method: str, path: str, query: dict[str, list[str]], head: dict[str, str], body: bytes
    ) -> Any:
        box = self.live(head["e2b-sandbox-id"])
        if box is None or box.paused:
            return 502, b'{"code": 502, "message": "The sandbox was not found"}'
        if path == "/health":
            return 204, b""
        if path == "/process.Process/Start":
            return 200, self._started(box, body)
        if path == "/files" and method == "POST":
            await box.sandbox.write(query["path"][0], _file_in(head["content-type"], body))
            name = Path(query["path"][0]).name
            return 200, json.dumps([{"name": name, "path": query["path"][0], "type": "file"}]).encode()
        if path == "/files":
            return 200, b"" + await box.sandbox.read(query["path"][0])
        return 404, b"{}"

    async def _started(self, box: Box, body: bytes) -> AsyncIterator[bytes]:
        asked = json.loads(body[5:])["process"]
        yield _envelope(json.dumps({"event": {"start": {"pid": 7}}}).encode())
        try:
            code, out, err = await self.run(box, asked["cmd"], asked["args"])
        except SandboxError:
            error = {"error": {"code": "unavailable", "message": "the connection to sandbox ended before the stream"}}
            yield _envelope(json.dumps(error).encode(), 2)
            return
        for stream, data in (("stdout", out), ("stderr", err)):
            for at in range(0, len(data), 1 << 15):
                part = base64.b64encode(data[at : at + (1 << 15)]).decode()
                yield _envelope(json.dumps({"event": {"data": {stream: part}}}).encode())
        end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        yield _envelope(json.dumps({"event": {"end": end}}).encode())
        yield _envelope(b"{}", 2)


class Prime(Cloud):
    """The API and the gateway, at one address."""

    async def serve(
        self, method: str, path: str, query: dict[str, list[str]], head: dict[str, str], body: bytes
    ) -> Any:
        if path.startswith("/gateway/"):
            return await self._gateway(path, query, head, body)
        if head.get("authorization") != f"Bearer {KEY}":
            return 401, b'{"detail": "no such key"}'
        parts = path.removeprefix("/api/v1/").split("/")
        if parts == ["sandbox"]:
            return await (self._create(json.loads(body)) if method == "POST" else self._list(query))
        if parts[0] != "sandbox" or len(parts) < 2:
            return 404, b'{"detail": "no such page"}'
        if parts[1] == "checkpoints" and len(parts) == 3 and method == "DELETE":
            known = self.snapshots.pop(parts[2], None) is not None
            return (200, b"{}") if known else (404, b'{"detail": "Checkpoint not found"}')
        if parts[1] == "checkpoints" and len(parts) == 3:
            return 200, json.dumps(self._checkpoint(parts[2], "")).encode()
        box = self.boxes.get(parts[1])
        if box is None or (box.sandbox.ended and (method == "DELETE" or "auth" in parts)):
            return 404, b'{"detail": "Sandbox not found"}'
        return await self._change(method, parts[1], parts[2:], box)

    async def _change(self, method: str, name: str, rest: list[str], box: Box) -> Answer:
        if method == "DELETE":
            await box.sandbox.terminate()
            return 200, b'{"deleted": true}'
        if rest == ["auth"]:
            until = datetime.fromtimestamp(time.time() + 3600, UTC).isoformat()
            address = {"gateway_url": f"{self.address}/gateway", "user_ns": "ns", "job_id": name}
            return 200, json.dumps({**address, "token": "t", "expires_at": until}).encode()
        if rest == ["checkpoints"]:
            kept = f"checkpoint-{len(self.snapshots)}"
            self.snapshots[kept] = await box.sandbox.snapshot(kept)
            return 200, json.dumps(self._checkpoint(kept, name)).encode()
        if rest == ["error-context"]:
            return 200, json.dumps({"status": "TERMINATED" if box.sandbox.ended else "RUNNING"}).encode()
        return (200, json.dumps(self._told(box)).encode()) if not rest else (404, b'{"detail": "no such page"}')

    def _checkpoint(self, kept: str, name: str) -> dict[str, Any]:
        at = datetime.now(UTC).isoformat()
        said = {"id": kept, "sandbox_id": name, "state": "DURABLE", "depth": 0, "docker_image": "i"}
        return {**said, "created_at": at, "updated_at": at}

    def _told(self, box: Box) -> dict[str, Any]:
        at = datetime.fromtimestamp(box.created_s, UTC).isoformat()
        return {
            **{"id": box.sandbox.id, "name": box.body["name"], "dockerImage": "i", "cpuCores": 1, "memoryGB": 1},
            **{"diskSizeGB": 1, "diskMountPath": "/", "gpuCount": 0, "vm": True, "createdAt": at, "updatedAt": at},
            **{"status": "TERMINATED" if box.sandbox.ended else "RUNNING", "timeoutMinutes": 60},
            "labels": [f"{name}={value}" for name, value in box.labels.items()],
        }

    async def _create(self, asked: dict[str, Any]) -> Answer:
        if asked.get("docker_image") == "missing":
            return 404, b'{"detail": "image not found"}'
        asked["key"] = asked["idempotency_key"]
        labels = dict(label.split("=", 1) for label in asked["labels"])
        source = asked.get("checkpoint_id", "")
        box = await self.make(asked["name"], labels, asked, asked["timeout_minutes"] * 60.0, source)
        return 200, json.dumps(self._told(box)).encode()

    async def _list(self, query: dict[str, list[str]]) -> Answer:
        wanted, page, per_page = query.get("labels", []), int(query["page"][0]), int(query["per_page"][0])
        told = [self._told(box) for name, box in self.boxes.items() if self.live(name)]
        found = [one for one in told if set(wanted) <= set(one["labels"])]
        shown = found[(page - 1) * per_page : page * per_page]
        said = {"sandboxes": shown, "total": len(found), "page": page, "perPage": per_page}
        return 200, json.dumps({**said, "hasNext": len(found) > page * per_page}).encode()

    async def _gateway(self, path: str, query: dict[str, list[str]], head: dict[str, str], body: bytes) -> Any:
        _, _, _, name, do, *_ = path.split("/")
        box = self.live(name)
        if do == "command_session.CommandSession":
            return 200, self._started(box, body)
        if box is None:
            return 404, b'{"detail": "sandbox_not_found"}'
        if do == "upload":
            data = _file_in(head["content-type"], body)
            await box.sandbox.write(query["path"][0], data)
            at = datetime.now(UTC).isoformat()
            said = {"success": True, "path": query["path"][0], "size": len(data), "timestamp": at}
            return 200, json.dumps(said).encode()
        return 200, await box.sandbox.read(query["path"][0])

    async def _started(self, box: Box | None, body: bytes) -> AsyncIterator[bytes]:
        from prime_sandboxes._proto.command_session import command_session_pb2 as wire

        gone = _envelope(b'{"error": {"code": "not_found", "message": "sandbox not found"}}', 2)
        if box is None:
            yield gone
            return
        asked = wire.StartRequest.FromString(body[5:]).command
        yield _envelope(wire.StartResponse(event={"start": {"pid": 7}}).SerializeToString())
        try:
            code, out, err = await self.run(box, asked.cmd, list(asked.args))
        except SandboxError:
            yield gone
            return
        for stream, data in (("stdout", out), ("stderr", err)):
            for at in range(0, len(data), 1 << 15):
                event = {"data": {stream: data[at : at + (1 << 15)]}}
                yield _envelope(wire.StartResponse(event=event).SerializeToString())
        yield _envelope(wire.StartResponse(event={"end": {"exit_code": code}}).SerializeToString())
        yield _envelope(b"{}", 2)


@contextlib.asynccontextmanager
async def serving(make: Callable[[LocalBackend, SandboxSpec], Cloud], folder: Path) -> AsyncIterator[Cloud]:
    async with local(folder) as backend:
        cloud = make(backend, SMALL)
        config = uvicorn.Config(cloud, port=0, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        for _ in range(1000):
            if not server.started:
                await asyncio.sleep(0.01)
        cloud.address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield cloud
        finally:
            server.should_exit = True
            await running
