"""Requests of the Tinker service: in order, each once, whatever is killed, and what their replies' ends are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scratch_folders import scratch_folder
from tinker_service import BASE, CountingSampler, Disk, HistoryTrainer, Service, call

from headway.records.errors import ConfigurationError, RunLocked, StorageFailed
from headway.runtime.clock import Clock, run_virtual
from headway.services.tinker.log import TinkerLog
from headway.services.tinker.ordering import RETAINED_S
from headway.services.tinker.wire import message_classes

KILLS = ["create:before", "create:after", "forward_backward:before", "forward_backward:after", "optim_step:before",
         "optim_step:after", "save:before", "save:after", "load:before", "load:after", "restore:before"]  # fmt: skip
LORA = {"rank": 4, "seed": 7}


def forward_backward(model_id: str, sequence: int, token: int, **fields: Any) -> bytes:
    message = message_classes()["ForwardBackwardRequest"](
        model_id=model_id, seq_id=sequence, loss_fn="cross_entropy", **fields
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([token, 2, 3], "i4").tobytes()
    for name, dtype, numbers in (
        ("target_tokens", 2, np.array([2, 3, 4], "i8")),
        ("weights", 1, np.ones(3, "f4")),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, numbers.tobytes()
        tensor.shape.append(3)
    return message.SerializeToString()


class Client:
    """Posts the numbered requests of one model, in any order and as often as it likes."""

    def __init__(self, model_id: str, session: str, kinds: list[str]) -> None:
        self.model_id = model_id
        self.posts: list[tuple[str, Any]] = [
            ("create_model", {"session_id": session, "model_seq_id": int(model_id.rpartition(":")[2]),
                              "base_model": "tiny", "lora_config": LORA})]  # fmt: skip
        for sequence, kind in enumerate(kinds, 1):
            fields: dict[str, Any] = {"model_id": model_id, "seq_id": sequence}
            match kind:
                case "forward_backward" | "forward_only":
                    body = forward_backward(model_id, sequence, sequence % 50, forward_only=kind == "forward_only")
                    self.posts.append(("forward_backward", body))
                case "refused":
                    self.posts.append(("optim_step", fields))
                case "optim_step":
                    self.posts.append((kind, {**fields, "adam_params": {"learning_rate": sequence / 100}}))
                case "load_weights":
                    path = f"tinker://{model_id}/weights/start"
                    self.posts.append((kind, {**fields, "path": path, "optimizer": True}))
                case _:
                    fields |= {"path": f"n{sequence}"} if kind == "save_weights" else {
                        "sampling_session_seq_id": 100 * (1 + int(model_id[-1])) + sequence}  # fmt: skip
                    self.posts.append((kind, fields))

    async def post(self, service: Service, sequence: int) -> int:
        status, body = await service.post(*self.posts[sequence])
        if status == 200:
            assert body["request_id"] == f"{self.model_id}:{sequence}"
        return status

    async def replies(self, service: Service) -> list[Any]:
        replies: list[Any] = []
        for sequence in range(len(self.posts)):
            fields = {"request_id": f"{self.model_id}:{sequence}", "allow_metadata_only": True}
            while True:
                status, body = await service.post("retrieve_future", fields)
                assert status == 200
                if isinstance(body, bytes) or body.get("type") != "try_again":
                    break
            replies.append(body)
        return replies


async def session_of(service: Service, key: str = "tml-a") -> str:
    status, body = await service.post(
        "create_session", {"sdk_version": "0.38.0", "tags": [], "user_metadata": None}, key=key
    )
    assert status == 200, body
    return body["session_id"]


def opened(
    store: Path,
    disk: Disk,
    clock: Clock,
    trainer: HistoryTrainer | None = None,
    sample_s: float = 1.0,
    **options: Any,
) -> Service:
    trainer = trainer or HistoryTrainer(disk, clock)
    return Service(store, trainer, CountingSampler(disk, clock, sample_s), clock, clock.now, **options)


STEPS = st.lists(
    st.sampled_from(
        [
            "forward_backward",
            "forward_backward",
            "optim_step",
            "forward_only",
            "save_weights",
            "save_weights_for_sampler",
            "refused",
        ]
    ),
    min_size=2,
    max_size=9,
)


async def undisturbed(clock: Clock, kinds: list[list[str]], session: str) -> tuple[Any, list[Any]]:
    """The states and replies of the same requests in order, with nothing killed."""
    disk = Disk()
    service = opened(scratch_folder("tinker"), disk, clock)
    await rename_session(service, await session_of(service), session)
    clients = [Client(f"{session}:train:{index}", session, steps) for index, steps in enumerate(kinds)]
    for client in clients:
        for sequence in range(len(client.posts)):
            await client.post(service, sequence)
    replies = [await client.replies(service) for client in clients]
    await service.kill()
    return disk, replies


async def rename_session(service: Service, made: str, session: str) -> None:
    service.log.commit([("UPDATE sessions SET id = ? WHERE id = ?", (session, made))])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(STEPS, min_size=1, max_size=2), seed=st.integers(0, 1 << 32))
def test_steps_happen_once_in_order_whatever_is_killed_repeated_and_reordered(
    monkeypatch: pytest.MonkeyPatch, kinds: list[list[str]], seed: int
) -> None:
    async def scenario(clock: Clock) -> None:
        choice = random.Random(seed)
        monkeypatch.setattr("headway.services.tinker.dispatch._ATTEMPTS", 1000)
        expected, expected_replies = await undisturbed(clock, kinds, "s")
        disk, store = Disk(), scratch_folder("tinker")
        trainer = HistoryTrainer(disk, clock)
        service = opened(store, disk, clock, trainer)
        await rename_session(service, await session_of(service), "s")
        clients = [Client(f"s:train:{index}", "s", steps) for index, steps in enumerate(kinds)]
        posts = [(client, number) for client in clients for number in range(1, len(client.posts))]
        choice.shuffle(posts)
        posts = [(client, 0) for client in clients] + posts + choice.sample(posts, len(posts) // 2)
        for client, number in posts:
            assert await client.post(service, number) == 200
            event = choice.random()
            if event < 0.25:
                await service.kill()
                service = opened(store, disk, clock, trainer)
            elif event < 0.6:
                trainer.faults.append(choice.choice(KILLS))
            elif event < 0.7:
                trainer.loaded.clear()
            await clock.sleep(choice.choice([0.0, 0.3, 1.5, 4.0]))
        replies = [await client.replies(service) for client in clients]
        assert disk.states == expected.states
        assert replies == expected_replies
        assert set(expected.folders) <= set(disk.folders)
        assert all(disk.folders[path] == expected.folders[path] for path in expected.folders)
        for client in clients:
            for number in range(len(client.posts)):
                assert await client.post(service, number) == 200
        await clock.sleep(20.0)
        assert disk.states == expected.states
        await service.kill()

    run_virtual(scenario, 5000.0)


def play(scenario: Any) -> None:
    """Run ``scenario(service, disk, trainer, clock)`` on a fresh service."""

    async def main(clock: Clock) -> None:
        disk = Disk()
        trainer = HistoryTrainer(disk, clock)
        service = opened(scratch_folder("tinker"), disk, clock, trainer)
        await scenario(service, disk, trainer, clock)
        await service.kill()

    run_virtual(main, 5000.0)


def test_a_gap_waits_with_its_age_and_ends_with_its_session() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["forward_backward"] * 3 + ["optim_step"])
        for number in (0, 1, 3, 4):
            await client.post(service, number)
        future = {"request_id": f"{client.model_id}:4"}
        _, body = await service.post("retrieve_future", future)
        assert body["type"] == "try_again"
        assert body["queue_state_reason"] == f"waits for request 2 of {client.model_id}, which hasn't arrived for 30 s"
        assert service.dispatch.gaps({"a"})[client.model_id].waiting == 2
        await clock.sleep(302.0)
        _, body = await service.post("retrieve_future", future)
        assert body["error"].startswith("the session ended while this request waited for request 2")
        assert trainer.calls["optim_step:before"] == 0
        assert client.model_id not in trainer.loaded
        # The missing one is still the next: it runs, on the state that the store has, and what comes after too.
        assert await client.post(service, 2) == 200
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:2"})
        assert isinstance(body, bytes)
        assert trainer.calls["restore:before"] == 2
        assert len(trainer.loaded[client.model_id]) == 2
        step = {"model_id": client.model_id, "seq_id": 5, "adam_params": {}}
        await service.post("optim_step", step)
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:5"})
        assert body == {"metrics": {"gradients:sum": 2.0}}

    play(scenario)


def test_another_request_under_a_used_number_is_a_conflict() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["forward_backward", "optim_step"])
        await client.post(service, 0)
        await client.post(service, 1)
        status, body = await service.post("forward_backward", forward_backward(client.model_id, 1, 9))
        assert (status, body["error"]["code"]) == (409, "sequence_conflict")
        status, _ = await service.post("optim_step", {"model_id": client.model_id, "seq_id": 1, "adam_params": {}})
        assert status == 409
        create = {**client.posts[0][1], "lora_config": {"rank": 8}}
        assert (await service.post("create_model", create))[0] == 409
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert [(await service.post("create_sampling_session", sampler))[0] for _ in range(2)] == [200, 200]
        status, _ = await service.post("create_sampling_session", {**sampler, "model_path": "tinker://x/weights/y"})
        assert status == 400
        assert (await service.post("create_sampling_session", {**sampler, "type": "other"}))[0] == 409

    play(scenario)


def test_a_sampling_session_that_is_asked_for_again_under_another_number_is_the_same() -> None:
    """As the SDK does it when a reply was lost."""

    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, [])
        await client.post(service, 0)
        fields: dict[str, Any] = {"model_id": client.model_id, "seq_id": 1, "kind": "snapshot"}
        first = await service.post("save_weights_for_sampler", fields | {"sampling_session_seq_id": 0})
        again = await service.post("save_weights_for_sampler", fields | {"sampling_session_seq_id": 1})
        assert first[0] == 200
        assert again == first
        _, answer = await service.post("retrieve_future", {"request_id": first[1]["request_id"]})
        assert answer["sampling_session_id"] == f"{session}:sample:0"
        other = fields | {"kind": "inflight", "sampling_session_seq_id": 0}
        assert (await service.post("save_weights_for_sampler", other))[0] == 409

    play(scenario)


def test_replies_are_released_when_they_were_fetched_and_their_numbers_stay_used() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["forward_backward", "optim_step"] * 2)
        for number in range(5):
            await client.post(service, number)
        await client.replies(service)
        await clock.sleep(RETAINED_S - 10)
        assert len(service.log.replied(client.model_id)) == 5
        await clock.sleep(20)
        assert service.log.replied(client.model_id) == [4]  # the newest stays
        steps = trainer.calls["optim_step:before"]
        assert await client.post(service, 2) == 200
        status, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:2"})
        assert (status, body["category"]) == (200, "user")
        assert "isn't kept any longer; the request was done once" in body["error"]
        await clock.sleep(30)
        assert trainer.calls["optim_step:before"] == steps

    play(scenario)


def test_replies_that_no_optim_step_made_durable_are_kept_for_a_restart() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["forward_backward"] * 3 + ["optim_step"])
        for number in range(4):
            await client.post(service, number)
        for number in range(4):
            await service.post("retrieve_future", {"request_id": f"{client.model_id}:{number}"})
        for _ in range(10):
            await clock.sleep(100)
            service.dispatch.keep_alive(session)
        trainer.loaded.clear()
        await client.post(service, 4)
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:4"})
        assert body == {"metrics": {"gradients:sum": 3.0}}

    play(scenario)


def test_an_outage_of_the_trainer_is_waited_for_and_a_request_that_kills_it_is_failed() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["forward_backward", "optim_step", "optim_step"])
        await client.post(service, 0)
        trainer.unavailable = True
        await client.post(service, 1)
        await clock.sleep(150)
        trainer.unavailable = False
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:1"})
        assert isinstance(body, bytes)
        trainer.faults += ["optim_step:before"] * 3
        await client.post(service, 2)
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:2"})
        assert body["category"] == "server"
        assert "in each of 3 attempts" in body["error"]
        await client.post(service, 3)
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:3"})
        assert body == {"metrics": {"gradients:sum": 1.0}}

    play(scenario)


def test_a_full_disk_refuses_new_requests_and_keeps_outcomes_until_they_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["forward_backward", "optim_step", "optim_step"])
        for number in range(3):
            await client.post(service, number)

        def full(*_: Any, **__: Any) -> None:
            raise StorageFailed("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(service.log, "reply", full)
            patch.setattr(service.log, "submit", full)
            assert await client.post(service, 3) == 503
            await clock.sleep(20)
        replies = [(await service.post("retrieve_future", {"request_id": f"{client.model_id}:{n}"}))[1] for n in (1, 2)]
        assert isinstance(replies[0], bytes)
        assert replies[1] == {"metrics": {"gradients:sum": 1.0}}
        assert trainer.calls["optim_step:before"] == 1

    play(scenario)


def test_a_session_that_is_dead_frees_its_memory_and_samples_again_when_it_returns() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["save_weights_for_sampler"])
        for number in range(2):
            await client.post(service, number)
        await client.replies(service)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        sample = {"sampling_session_id": f"{session}:sample:101", "seq_id": 0, "num_samples": 2, "prompt": prompt,
                  "sampling_params": {"max_tokens": 2}, "prompt_logprobs": True}  # fmt: skip
        status, body = await service.post("asample", sample)
        assert (status, body["sample_sequence_ids"]) == (
            200,
            [f"{session}:sample:101:0/0", f"{session}:sample:101:0/1"],
        )
        _, first = await service.post("retrieve_future", {"request_id": body["request_id"]})
        await clock.sleep(305)
        assert trainer.loaded == {}
        assert service.dispatch.counts["dead_sessions"] == 1
        _, body = await service.post("asample", {**sample, "seq_id": 1})
        _, again = await service.post("retrieve_future", {"request_id": body["request_id"]})
        assert first == again
        answer = message_classes()["SampleResponse"].FromString(first)
        assert np.frombuffer(answer.sequences[1].tokens, "i4").tolist() == [7, 8]
        assert np.frombuffer(answer.prompt_logprobs, "f4").tolist()[1:] == [-1.0]

    play(scenario)


def test_samples_of_a_dead_session_leave_the_engine_and_are_sampled_when_it_returns() -> None:
    async def main(clock: Clock) -> None:
        disk, store = Disk(), scratch_folder("tinker")
        service = opened(store, disk, clock, sample_s=400.0)
        sessions = [await session_of(service) for _ in range(2)]
        for session in sessions:
            sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            await service.post("create_sampling_session", sampler)
            sample = {"sampling_session_id": f"{session}:sample:0", "prompt": {"chunks": [{"tokens": [5]}]},
                      "sampling_params": {}}  # fmt: skip
            assert (await service.post("asample", {**sample, "seq_id": 0}))[0] == 200
        await call(service.app, "POST", f"sessions/{sessions[1]}/finish", {"reason": {"type": "success"}})
        _, body = await service.post("retrieve_future", {"request_id": f"{sessions[1]}:sample:0:0"})
        assert body["error"] == "the session was finished while this request was sampled"
        await clock.sleep(305)
        assert not service.dispatch._samples
        future = {"request_id": f"{sessions[0]}:sample:0:0"}
        assert (await service.post("retrieve_future", future))[1]["type"] == "try_again"
        assert list(service.dispatch._samples) == [(f"{sessions[0]}:sample:0", 0)]
        for _ in range(10):
            await service.post("session_heartbeat", {"session_id": sessions[0]})
            await clock.sleep(100)
        assert isinstance((await service.post("retrieve_future", future))[1], bytes)
        await service.kill()

    run_virtual(main, 5000.0)


def test_samples_go_on_after_a_kill_and_a_cancelled_one_fails() -> None:
    async def main(clock: Clock) -> None:
        disk, store = Disk(), scratch_folder("tinker")
        service = opened(store, disk, clock)
        session = await session_of(service)
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        await service.post("create_sampling_session", sampler)
        sample = {"sampling_session_id": f"{session}:sample:0", "prompt": {"chunks": [{"tokens": [5]}]},
                  "sampling_params": {}}  # fmt: skip
        for number in (0, 1, 2_000_000_000):
            assert (await service.post("asample", {**sample, "seq_id": number}))[0] == 200
        await service.kill()
        service = opened(store, disk, clock)
        future = {"request_id": f"{session}:sample:0:1"}
        assert (await service.post("cancel_future", future))[0] == 200
        assert (await service.post("retrieve_future", future))[1] == {
            "error": "the client cancelled the request", "category": "user"}  # fmt: skip
        for number in (0, 2_000_000_000):
            _, body = await service.post("retrieve_future", {"request_id": f"{session}:sample:0:{number}"})
            assert isinstance(body, bytes)
        await service.kill()

    run_virtual(main, 5000.0)


def test_a_store_is_one_services_and_one_bases(tmp_path: Path) -> None:
    log = TinkerLog(tmp_path, BASE)
    with pytest.raises(RunLocked, match=r"tinker\.store"):
        TinkerLog(tmp_path, BASE)
    log.close()
    other = msgspec.structs.replace(BASE, digest="b2")
    with pytest.raises(ConfigurationError, match="is of the base b1, and tiny is b2"):
        TinkerLog(tmp_path, other)
    TinkerLog(tmp_path, BASE).close()


def test_a_finished_session_takes_no_new_requests_and_answers_old_ones() -> None:
    async def scenario(service: Service, disk: Disk, trainer: HistoryTrainer, clock: Clock) -> None:
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["optim_step", "optim_step"])
        for number in range(2):
            await client.post(service, number)
        assert (await call(service.app, "POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}))[
            0
        ] == 200
        assert await client.post(service, 2) == 400
        assert await client.post(service, 1) == 200
        _, body = await service.post("retrieve_future", {"request_id": f"{client.model_id}:1"})
        assert body == {"metrics": {"gradients:sum": 0.0}}
        await clock.sleep(2)
        assert trainer.loaded == {}

    play(scenario)
