"""The buffer's service over HTTP, in this process: leases from end to end, and bad calls refused with what is wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from endpoint_server import chat, request

from headway.buffer.store import GroupBuffer
from headway.config import schema
from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.config.load import validate_experiment
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.app import App
from headway.generator.endpoint.server import serving
from headway.generator.recording.sessions import Sessions
from headway.orchestrator.actors.buffer_api import BufferApi
from headway.orchestrator.actors.remote import open_remote
from headway.records.errors import ConfigurationError
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.rollout.makers.outside_workers import LeaseManager, RemoteHost, RemoteRollouts
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import RealClock
from headway.tokens.tokenizer import Tokenizer

KEY = "a-key-of-the-service"
GROUPS = [
    Group(
        index=index,
        task=Task(task_id=str(index), prompt="1+2?", answer="3", metadata={"level": 1, "hidden": 2}),
        prompt_ids=(5,) * 4,
        size=2,
        admitted_version=0,
        admitted_s=0.0,
    )
    for index in range(3)
]


@dataclass
class Served:
    address: str
    rollouts: RemoteRollouts
    buffer: GroupBuffer

    async def post(
        self, path: str, body: Any, *, key: str = KEY, method: str = "POST", headers: Mapping[str, str] = {}
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        host = {"host": self.address.removeprefix("http://")}
        given = {"authorization": f"Bearer {key}", **host, **headers} if key else {**host, **headers}
        status, found, raw = await request(self.address, method, path, data, given)
        return status, json.loads(raw) if found["content-type"] == "application/json" else raw.decode()

    async def lease(self) -> dict[str, Any]:
        status, lease = await self.post("/buffer/lease", {"wait_s": 5})
        assert status == 200
        return lease

    async def ask(self, lease: Mapping[str, Any]) -> str:
        body = {"model": lease["model"], "messages": [{"role": "user", "content": lease["task"]["prompt"]}]}
        assert lease["base_url"] == f"{self.address}/v1"
        status, answer = await self.post("/v1/chat/completions", body, key=lease["api_key"])
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    def member(self, group: int = 0, member: int = 0) -> asyncio.Task[Rollout]:
        return asyncio.create_task(self.rollouts.generate_member(GROUPS[group], member))


async def generate(request: GenerationRequest, watch: Any = None, /) -> GenerationResult:
    tokenizer = chat().tokenizer
    ids = (*tokenizer.encode("three"), tokenizer.eos_id)
    versions = (VersionSpan(version=0, tokens=len(ids)),)
    response = PartialResponse(ids=ids, logprobs=(-0.5,) * len(ids), versions=versions)
    return GenerationResult(request_id=request.request_id, response=response, finish_reason="stop", first_token_s=1.0)


def play(test: Callable[[Served], Awaitable[Any]], folder: Path, keys: tuple[str, ...] = (KEY,)) -> None:
    async def main() -> None:
        clock = RealClock()
        endpoint = EndpointConfig()
        sessions = Sessions(chat(), endpoint, 200)
        lease_manager = LeaseManager(60.0, clock)
        environment = EnvironmentConfig(name="remote", shows=("level",))
        host = RemoteHost(
            environment=environment, endpoint=endpoint, conversations=sessions, lease_manager=lease_manager
        )
        sampler = TurnSampler(generate, chat().tokenizer, schema.RolloutConfig(retries=1), clock, run_seed=3)
        buffer = GroupBuffer(folder / "buffer.db", 8)
        for group in GROUPS[buffer.next_index :]:
            buffer.admit(group)
        api = BufferApi(host, ApiKeys(keys), chat().tokenizer, folder / "buffer.db", folder / "demonstrations.jsonl")
        app = App(sessions, chat(), endpoint, "models/tiny", 200, further=api.routes)
        async with serving(app, endpoint) as address:
            sessions.address = address
            async with asyncio.timeout(20):
                await test(Served(address, RemoteRollouts(host, sampler, buffer.park), buffer))
        buffer.close()

    asyncio.run(main())


def named(lease: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {name: lease[name] for name in ("group", "member", "attempt")} | more


def test_lease_renew_finish(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        member = served.member()
        lease = await served.lease()
        assert {name: lease[name] for name in ("uid", "instance_id", "group", "member", "attempt", "lease_s")} == {
            "uid": "0-0.1", "instance_id": "0", "group": "0", "member": 0, "attempt": 1, "lease_s": 60.0
        }  # fmt: skip
        assert lease["task"] == {"task_id": "0", "prompt": "1+2?", "messages": [], "metadata": {"level": 1}}
        assert await served.post("/buffer/renew", named(lease)) == (200, {"lease_s": 60.0})
        assert await served.ask(lease) == "three"
        finished = {"uid": "0-0.1", "finished": True}
        body = named(lease, reward=1, metadata={"host": "a"})
        assert await served.post("/buffer/finish", body) == (200, {**finished, "repeated": False})
        rollout = await member
        assert (rollout.reward, rollout.solved) == (1.0, True)
        assert await served.post("/buffer/finish", body) == (200, {**finished, "repeated": True})
        assert (await served.post("/buffer/renew", named(lease)))[0] == 409
        status, text = await served.post("/buffer/metrics", None, method="GET")
        assert status == 200
        for what in ("leased", "finished", "repeated", "refused"):
            assert f'headway_buffer_leases_total{{what="{what}"}} 1' in text

    play(test, tmp_path)


def test_failed_attempt_is_offered_again(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        member = served.member()
        lease = await served.lease()
        for repeated in (False, True):
            failed = {"uid": "0-0.1", "failed": True, "repeated": repeated}
            assert await served.post("/buffer/fail", named(lease, cause="no disk")) == (200, failed)
        again = await served.lease()
        assert again["attempt"] == 2
        assert again["api_key"] != lease["api_key"]
        status, refused = await served.post("/buffer/finish", named(lease, reward=1.0))
        assert (status, refused["error"]["code"]) == (409, "lease_ended")
        assert "failed, its worker abandoned it: no disk; attempt 2 is leased" in refused["error"]["message"]
        await served.post("/buffer/fail", named(again, cause="no disk", infrastructure=False))
        assert (await member).failure is not None

    play(test, tmp_path)


def test_model_is_called_where_the_worker_has_reached_the_run(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        members = [served.member(0, place) for place in range(2)]
        proxied = {"host": "run.example:8443", "x-forwarded-proto": "https"}
        for headers, base in ({"host": "run.example:1"}, "http://run.example:1"), (proxied, "https://run.example:8443"):
            _, lease = await served.post("/buffer/lease", {"wait_s": 5}, headers=headers)
            assert lease["base_url"] == f"{base}/v1"
        for member in members:
            member.cancel()

    play(test, tmp_path)


def test_lease_is_null_when_nothing_is_offered_in_time(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        assert await served.post("/buffer/lease", {"wait_s": 0.05}) == (200, None)
        assert await served.post("/buffer/lease", {}) == (200, None)

    play(test, tmp_path)


BAD_CALLS = {
    "no key": ("/buffer/lease", {}, {"key": ""}, 401, "invalid_api_key"),
    "wrong key": ("/buffer/lease", {}, {"key": "another-key-than-it-has"}, 401, "invalid_api_key"),
    "wrong key of peek": ("/buffer/peek", None, {"key": "x", "method": "GET"}, 401, "invalid_api_key"),
    "wrong key of metrics": ("/buffer/metrics", None, {"key": "x", "method": "GET"}, 401, "invalid_api_key"),
    "method": ("/buffer/finish", None, {"method": "GET"}, 405, "method_not_allowed"),
    "unknown path": ("/buffer/take", {}, {}, 404, "unknown_url"),
    "not JSON": ("/buffer/lease", b"{", {}, 400, None),
    "not UTF-8": ("/buffer/lease", b'{"wait_s": "\xff"}', {}, 400, None),
    "deep": ("/buffer/lease", b"[" * 100_000, {}, 400, None),
    "not an object": ("/buffer/lease", [1], {}, 400, None),
    "wait": ("/buffer/lease", {"wait_s": 1e9}, {}, 400, None),
    "unknown lease": (
        "/buffer/finish",
        {"group": "9", "member": 0, "attempt": 1, "reward": 1},
        {},
        404,
        "lease_unknown",
    ),
    "unknown attempt": ("/buffer/renew", {"group": "0", "member": 0, "attempt": 2}, {}, 404, "lease_unknown"),
    "group of a wrong type": ("/buffer/renew", {"group": [], "member": 0, "attempt": 1}, {}, 400, None),
    "no member": ("/buffer/renew", {"group": "0", "attempt": 1}, {}, 400, None),
    "negative member": ("/buffer/renew", {"group": "0", "member": -1, "attempt": 1}, {}, 400, None),
    "NaN": ("/buffer/finish", b'{"group": "0", "member": 0, "attempt": 1, "reward": NaN}', {}, 400, None),
    "infinite": ("/buffer/finish", b'{"group": "0", "member": 0, "attempt": 1, "reward": 1e999}', {}, 400, None),
    "beyond all use": ("/buffer/finish", {"group": "0", "member": 0, "attempt": 1, "reward": 1.7e308}, {}, 400, None),
    "reward as text": ("/buffer/finish", {"group": "0", "member": 0, "attempt": 1, "reward": "1"}, {}, 400, None),
    "metadata": ("/buffer/finish", {"group": "0", "member": 0, "attempt": 1, "metadata": [1]}, {}, 400, None),
    "huge integer": (
        "/buffer/finish",
        {"group": "0", "member": 0, "attempt": 1, "metadata": {"n": 1 << 70}},
        {},
        400,
        None,
    ),
    "half a surrogate pair": (
        "/buffer/fail",
        b'{"group": "0", "member": 0, "attempt": 1, "cause": "\\ud800"}',
        {},
        400,
        None,
    ),
    "300 kB of extra": (
        "/buffer/finish",
        {"group": "0", "member": 0, "attempt": 1, "extra": {"log": "x" * 300_000}},
        {},
        400,
        None,
    ),
    "long group": ("/buffer/renew", {"group": "9" * 5000, "member": 0, "attempt": 1}, {}, 400, None),
    "group that no number holds": (
        "/buffer/renew",
        {"group": "9" * 200, "member": 0, "attempt": 1},
        {},
        404,
        "lease_unknown",
    ),
    "10 MB": ("/buffer/finish", b" " * 10_000_000, {}, 413, "request_too_large"),
    "no session": (
        "/buffer/finish",
        {"group": "0", "member": 0, "attempt": 1, "reward": 1},
        {},
        400,
        "session_not_recorded",
    ),
    "text": ("/buffer/write", {"uid": "0-0.1", "messages": [], "reward": 1}, {}, 400, "session_not_recorded"),
    "uid": ("/buffer/write", {"uid": "0-0", "reward": 1}, {}, 400, None),
    "uid of a wrong type": ("/buffer/write", {"uid": {"a": 1}, "reward": 1}, {}, 400, None),
    "empty uid": ("/buffer/write", {"uid": "", "messages": [{"role": "assistant", "content": "3"}]}, {}, 400, None),
    "uid 0": ("/buffer/write", {"uid": 0, "messages": [{"role": "assistant", "content": "3"}]}, {}, 400, None),
    "group by another name": ("/buffer/renew", {"group": "00", "member": 1, "attempt": 1}, {}, 404, "lease_unknown"),
    "nothing to learn": ("/buffer/write", {"messages": [{"role": "user", "content": "x"}]}, {}, 400, None),
    "no messages": ("/buffer/write", {"reward": 1}, {}, 400, None),
    "role": ("/buffer/write", {"messages": [{"role": "wizard", "content": "x"}]}, {}, 400, None),
    "batch": ("/buffer/read", {"batch_size": "all"}, {}, 400, None),
}


def test_bad_calls_are_refused_and_the_lease_goes_on(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        member = served.member()
        lease = await served.lease()
        for name, (path, body, how, status, code) in BAD_CALLS.items():
            found, answer = await served.post(path, body, **how)
            assert (found, answer["error"]["code"]) == (status, code), (name, answer)
            assert answer["error"]["message"], name
        await served.ask(lease)
        assert (await served.post("/buffer/finish", named(lease, reward=0.5)))[0] == 200
        status, refused = await served.post("/buffer/finish", named(lease, reward=0.25))
        assert (status, refused["error"]["code"]) == (409, "finished_otherwise")
        assert (await member).reward == 0.5

    play(test, tmp_path)


def test_finish_of_a_former_process_is_answered_by_the_books(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        served.buffer.end_group(1, "overdue", "too old")
        body = {"group": "1", "member": 0, "attempt": 1, "reward": 1.0}
        status, refused = await served.post("/buffer/finish", body)
        assert (status, refused["error"]["code"]) == (409, "lease_ended")
        assert "group 1 accepts no more finishes: overdue" in refused["error"]["message"]
        # A worker that repeats its call before the resumed run has offered the member again has to repeat it.
        status, refused = await served.post("/buffer/finish", {**body, "group": "2"})
        assert (status, refused["error"]["code"]) == (503, "not_offered_yet")
        status, refused = await served.post("/buffer/finish", {**body, "group": "2", "member": 2})  # there is none
        assert (status, refused["error"]["code"]) == (404, "lease_unknown")

    play(test, tmp_path)


def test_finish_of_a_whole_group_is_repeated_in_a_later_process(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        members = [served.member(2, place) for place in range(2)]
        leases = [await served.lease() for _ in range(2)]
        for lease in leases:
            await served.ask(lease)
            await served.post("/buffer/finish", named(lease, reward=0.5, metadata={"a": 1, "b": [2]}))
        if not whole:
            for member in members:
                await member
            return
        rollouts = tuple([await member for member in members])
        served.buffer.finish_group(FinishedGroup(group=GROUPS[2], rollouts=rollouts))

    async def again(served: Served) -> None:
        said = {"group": "2", "member": 1, "attempt": 1, "reward": 0.5, "metadata": {"b": [2], "a": 1}}
        assert await served.post("/buffer/finish", said) == (200, {"uid": "2-1.1", "finished": True, "repeated": True})
        for other, code in ({"reward": 0.25}, "finished_otherwise"), ({"attempt": 2}, "lease_unknown"):
            status, refused = await served.post("/buffer/finish", {**said, **other})
            assert (status, refused["error"]["code"]) == (404 if code == "lease_unknown" else 409, code)
        status, refused = await served.post("/buffer/fail", {**said, "cause": "no disk"})
        assert (status, refused["error"]["code"]) == (409, "lease_ended")

    for whole in (False, True):
        folder = tmp_path / str(whole)
        folder.mkdir()
        play(test, folder)
        play(again, folder)


def test_answer_that_its_worker_has_not_read_does_not_finish_a_member(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        member = served.member()
        lease = await served.lease()
        await asyncio.to_thread(leave_unread, served.address, lease)
        status, refused = await served.post("/buffer/finish", named(lease, reward=1.0))
        assert (status, refused["error"]["code"]) == (400, "session_not_recorded")
        await served.ask(lease)  # the lease goes on
        assert (await served.post("/buffer/finish", named(lease, reward=1.0)))[0] == 200
        assert (await member).reward == 1.0

    play(test, tmp_path)


def leave_unread(address: str, lease: Mapping[str, Any]) -> None:
    """Make a model call whose answer arrives and is never read."""
    body = json.dumps({"model": lease["model"], "messages": [{"role": "user", "content": "1+2?"}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {lease['api_key']}"
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        connection.recv(1, socket.MSG_PEEK)  # it has arrived
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes by a reset
    time.sleep(0.1)


def test_text_of_shown_groups_is_decoded_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's loops don't wait for a reader, however much it asks to see."""
    decoded_by: list[threading.Thread] = []
    decode = Tokenizer.decode

    def noted(self: Tokenizer, *arguments: Any, **more: Any) -> str:
        decoded_by.append(threading.current_thread())
        return decode(self, *arguments, **more)

    async def test(served: Served) -> None:
        member = served.member(0, 0)
        lease = await served.lease()
        await served.ask(lease)
        await served.post("/buffer/finish", named(lease, reward=1.0))
        rollout = await member
        both = (rollout, msgspec.structs.replace(rollout, member=1))
        served.buffer.finish_group(FinishedGroup(group=GROUPS[0], rollouts=both))
        monkeypatch.setattr(Tokenizer, "decode", noted)
        assert (await served.post("/buffer/read", {}))[1]["data"]["meta_info"]["total_samples"] == 2
        assert decoded_by
        assert threading.main_thread() not in decoded_by

    play(test, tmp_path)


def test_groups_are_shown_in_the_format_of_tritonforge_until_they_are_trained(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        members = [served.member(2, place) for place in range(2)]
        for reward in (1.0, 0.0):
            lease = await served.lease()
            await served.ask(lease)
            item = {"uid": lease["uid"], "instance_id": "2", "reward": reward, "messages": [], "extra_info": {"n": 1}}
            status, written = await served.post("/buffer/write", item)
            assert (status, written["success"], written["data"]["data"]) == (200, True, [item])
        served.buffer.finish_group(FinishedGroup(group=GROUPS[2], rollouts=tuple([await member for member in members])))
        status, shown = await served.post("/buffer/peek", None, method="GET")
        assert (status, shown["success"], shown["data"]["meta_info"]["finished_groups"]) == (200, True, ["2"])
        first = shown["data"]["data"][0]
        assert first["messages"] == [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "three"}]
        assert (first["uid"], first["instance_id"], first["reward"]) == ("2-0", "2", 1.0)
        for path in ("/buffer/read", "/get_rollout_data"):
            assert (await served.post(path, {"batch_size": 1}))[1]["data"] == shown["data"]
        others = tuple(
            Rollout(group=1, member=place, prompt_ids=(5,), response_ids=(), finish_reason="stop") for place in range(2)
        )
        served.buffer.finish_group(FinishedGroup(group=GROUPS[1], rollouts=others))
        for most, groups in ({"batch_size": 0}, 0), ({"batch_size": 1}, 1), ({"batch_size": -1}, 2), ({}, 2):
            assert (await served.post("/buffer/read", most))[1]["data"]["meta_info"]["num_groups"] == groups
        stats = (await served.post("/buffer/stats", None, method="GET"))[1]["data"]
        assert (stats["current_size"], stats["total_written"], stats["total_read"]) == (4, 4, 0)
        assert (await served.post("/start_rollout", {}))[1]["data"] == {"status": "running"}

    play(test, tmp_path)


def test_text_without_uid_is_kept_for_sft(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        said = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
        for _ in range(2):
            status, written = await served.post("/buffer/write", {"instance_id": "a", "messages": said, "reward": 1.0})
            assert (status, written["success"]) == (200, True)
        rows = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
        assert rows == [{"messages": said, "instance_id": "a", "reward": 1.0, "extra_info": {}}] * 2
        assert (await served.post("/get_rollout_data", {}))[1]["success"] is False

    play(test, tmp_path)


@pytest.mark.parametrize("key", ["", "anything"])
def test_service_without_keys_asks_for_none(key: str, tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        assert await served.post("/buffer/lease", {}, key=key) == (200, None)

    play(test, tmp_path, keys=())


def test_worker_that_leaves_while_it_waits_takes_no_lease(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        host, _, port = served.address.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"wait_s": 10}).encode()
        head = f"POST /buffer/lease HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
        member = served.member()
        lease = await served.lease()
        assert lease["attempt"] == 1
        await served.ask(lease)
        await served.post("/buffer/finish", named(lease, reward=1.0))
        assert (await member).attempts == 1

    play(test, tmp_path)


def remote_experiment(folder: Path, **sections: Any) -> schema.Experiment:
    raw: dict[str, Any] = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "tasks": {"train": {"path": "tasks.jsonl"}},
        "environment": {"name": "remote"},
    }
    return validate_experiment(raw | sections, "a test")


def test_address_that_other_machines_reach_needs_keys(tmp_path: Path) -> None:
    experiment = remote_experiment(tmp_path, endpoint={"address": "0.0.0.0:0"})

    async def main() -> None:
        async with open_remote(experiment, RealClock(), lambda name, detail, /, **data: None):
            raise AssertionError("it was opened")

    with pytest.raises(
        ConfigurationError, match=r"other machines can reach it, so keys are required: buffer\.service\.keys"
    ):
        asyncio.run(main())


def test_service_of_other_environments_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\[buffer\.service\] has no effect with environment\.name = 'single"):
        remote_experiment(tmp_path, environment={}, buffer={"service": {"lease_s": 5.0}})
