"""Tenants of the Tinker service: keys and scopes, quotas that name themselves, shares, accounts, and staleness."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scratch_folders import scratch_folder
from test_tinker_dispatch import Client, session_of
from tinker_service import CountingSampler, Disk, HistoryTrainer, Service, call

from headway.config.services.tinker import TinkerConfig
from headway.generator.endpoint.errors import HttpError
from headway.generator.recording.sessions import KeyRefused
from headway.records.errors import ConfigurationError
from headway.runtime.clock import Clock, run_virtual
from headway.services.tinker import tenants
from headway.services.tinker.tenants import TenantKeys
from headway.services.tinker.wire import message_classes

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def keys(tmp_path: Path) -> TenantKeys:
    file = tmp_path / "keys"
    lines = ["# names", f"anna train,sample {digest('tml-anna')}", f"anna sample {digest('tml-samples')}", "",
             f"ops operate {digest('tml-ops')}"]  # fmt: skip
    file.write_text("\n".join(lines))
    return TenantKeys(str(file))


def opened(clock: Clock, keys: TenantKeys | None = None, step_s: float = 1.0, **settings: Any) -> Service:
    disk, store = Disk(), scratch_folder("tinker")
    trainer, sampler = HistoryTrainer(disk, clock, step_s), CountingSampler(disk, clock, step_s)
    config = TinkerConfig(store=str(store), **settings)
    return Service(store, trainer, sampler, clock, clock.now, config, keys=keys)


def test_keys_are_digests_with_scopes(keys: TenantKeys, tmp_path: Path) -> None:
    assert keys.tenant_of("tml-anna", "train") == keys.tenant_of("tml-samples", "sample") == "anna"
    with pytest.raises(HttpError, match="this key of anna may sample: valid: one that may train") as refused:
        keys.tenant_of("tml-samples", "train")
    assert refused.value.status == 403
    for wrong in ("", "tml-ANNA", digest("tml-anna")):
        with pytest.raises(KeyRefused):
            keys.tenant_of(wrong)
    assert TenantKeys("").tenant_of("anything", "operate") == "default"
    for text in ("anna train tml-anna", f"anna train,own {digest('x')}", f"an/na train {digest('x')}", "# none"):
        (tmp_path / "wrong").write_text(text)
        with pytest.raises(ConfigurationError, match="valid: "):
            TenantKeys(str(tmp_path / "wrong"))
    with pytest.raises(ConfigurationError, match=r"tinker\.keys"):
        TenantKeys(str(tmp_path / "missing"))


def test_a_key_may_do_what_its_scopes_name(keys: TenantKeys) -> None:
    async def main(clock: Clock) -> None:
        service = opened(clock, keys)

        async def status_of(method: str, path: str, key: str, **fields: Any) -> int:
            return (await call(service.app, method, path, fields, key=key))[0]

        assert await status_of("POST", "create_session", "tml-none", sdk_version="0.38.0") == 401
        _, body = await call(service.app, "POST", "create_session", {"sdk_version": "0.38.0"}, key="tml-samples")
        model = {"session_id": body["session_id"], "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert await status_of("POST", "create_model", "tml-samples", **model) == 403
        assert await status_of("POST", "create_model", "tml-anna", **model) == 200
        sampler = {"session_id": body["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert await status_of("POST", "create_sampling_session", "tml-ops", **sampler) == 403
        assert await status_of("POST", "create_sampling_session", "tml-samples", **sampler) == 200
        root = {
            "tenants": {"tml-anna": 200, "tml-ops": 200, "tml-x": 401},
            "metrics": {"tml-anna": 403, "tml-ops": 200},
        }
        for path, statuses in root.items():
            for key, status in statuses.items():
                assert (await call(service.app, "GET", path, key=key, prefix="/"))[0] == status
        await service.kill()

    run_virtual(main, 100.0)


def test_quotas_refuse_by_name_and_until_when(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: Clock) -> None:
        service = opened(clock, models_per_tenant=2, store_gb=2e-7, session_timeout_s=50)
        sessions = [await session_of(service) for _ in range(2)]
        for number in range(3):
            body = {"session_id": sessions[number > 0], "model_seq_id": number, "base_model": "tiny"}
            _, future = await service.post("create_model", {**body, "lora_config": {"rank": 4}})
            _, reply = await service.post("retrieve_future", {"request_id": future["request_id"]})
            assert ("error" in reply) == (number == 2)
        assert (
            "a has 2 models, the quota (models_per_tenant): valid: again when one of its sessions has ended"
            in (reply["error"])
        )
        client = Client(f"{sessions[0]}:train:0", sessions[0], ["save_weights", "save_weights", "save_weights"])
        for number, bytes_kept in ((1, 123), (2, 246)):
            assert await client.post(service, number) == 200
            _, reply = await service.post("retrieve_future", {"request_id": f"{client.model_id}:{number}"})
            assert "path" in reply
            assert service.dispatch.accounts.rows("a")[0]["store_bytes"] == bytes_kept
        await client.post(service, 3)
        _, reply = await service.post("retrieve_future", {"request_id": f"{client.model_id}:3"})
        assert (
            "a keeps 0.00 GB of checkpoints, and store_gb is 2e-07: valid: again when some are deleted"
            in (reply["error"])
        )
        monkeypatch.setattr(tenants, "_QUEUED_TOKENS", 100)
        sampler = {"session_id": sessions[0], "sampling_session_seq_id": 0, "base_model": "tiny"}
        await service.post("create_sampling_session", sampler)
        sample = {"sampling_session_id": f"{sessions[0]}:sample:0", "prompt": PROMPT, "num_samples": 4,
                  "sampling_params": {"max_tokens": 20}}  # fmt: skip
        wrong = [{"sampling_params": "abc"}, {"sampling_params": {"max_tokens": -5}}, {"num_samples": [2]}]
        for number, fields in enumerate(wrong, 5):  # they fail with their futures
            assert (await service.post("asample", {**sample, **fields, "seq_id": number}))[0] == 200
        await clock.sleep(5)
        statuses = [(await service.post("asample", {**sample, "seq_id": number}))[0] for number in range(2)]
        assert statuses == [200, 429]
        await clock.sleep(10)
        assert (await service.post("asample", {**sample, "seq_id": 1}))[0] == 200
        await clock.sleep(60)  # both sessions are dead: their models no longer count
        session = await session_of(service)
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        _, future = await service.post("create_model", body)
        _, reply = await service.post("retrieve_future", {"request_id": future["request_id"]})
        assert reply["type"] == "create_model"
        await service.kill()

    run_virtual(main, 1000.0)


def test_a_tenant_with_a_long_queue_does_not_hold_up_another() -> None:
    async def main(clock: Clock) -> None:
        service = opened(clock)
        clients: list[tuple[str, Client]] = []
        for key in ("tml-a", "tml-b"):
            _, body = await call(service.app, "POST", "create_session", {"sdk_version": "0.38.0"}, key=key)
            kinds = ["forward_backward"] * (10 if key == "tml-a" else 2)
            for number in range(6 if key == "tml-a" else 1):  # whose models take turns with each other
                model_id = f"{body['session_id']}:train:{number}"
                clients.append((key, Client(model_id, body["session_id"], kinds)))
        for key, client in clients:
            for number in range(len(client.posts)):
                path, fields = client.posts[number]
                status, _ = await call(service.app, "POST", path, fields, key=key)
                assert status == 200
        await clock.sleep(30)
        open_requests = {row["tenant"]: row["open_requests"] for row in service.dispatch.accounts.rows()}
        assert open_requests["b"] == 0
        assert open_requests["a"] > 20
        await service.kill()

    run_virtual(main, 1000.0)


def test_accounts_are_committed_with_the_replies_and_lags_measured() -> None:
    async def main(clock: Clock) -> None:
        disk, store = Disk(), scratch_folder("tinker")

        def start() -> Service:
            trainer, sampler = HistoryTrainer(disk, clock), CountingSampler(disk, clock)
            config = TinkerConfig(store=str(store), prices="services.tinker-235b")
            return Service(store, trainer, sampler, clock, clock.now, config)

        service = start()
        session = await session_of(service)
        kinds = ["save_weights_for_sampler", "forward_backward", "optim_step", "optim_step"]
        client = Client(f"{session}:train:0", session, kinds)
        for number in range(5):
            await client.post(service, number)
        await client.replies(service)
        sampler_id = f"{session}:sample:101"
        sample = {"sampling_session_id": sampler_id, "seq_id": 0, "num_samples": 2, "prompt": PROMPT,
                  "sampling_params": {"max_tokens": 3}}  # fmt: skip
        _, body = await service.post("asample", sample)
        await service.post("retrieve_future", {"request_id": body["request_id"]})
        message = message_classes()["ForwardBackwardRequest"](
            model_id=client.model_id, seq_id=5, loss_fn="cross_entropy"
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(6, dtype="i4").tobytes()
        for name, dtype, array in (("target_tokens", 2, np.arange(6)), ("weights", 1, np.ones(6, "f4"))):
            datum.loss_fn_inputs[name].dtype = dtype
            datum.loss_fn_inputs[name].dense = array.tobytes()
        for sequence, length in ((body["sample_sequence_ids"][0], 4), ("unknown:sample:1:0/0", 2)):
            span = datum.loss_fn_input_spans.add().sampled_tokens
            span.sequence_id, span.length = sequence, length
        await service.post("forward_backward", message.SerializeToString())
        _, reply = await service.post("retrieve_future", {"request_id": f"{client.model_id}:5"})
        metrics = message_classes()["ForwardBackwardOutput"].FromString(reply).metrics
        assert (metrics["staleness_steps:mean"], metrics["staleness_steps:max"]) == (2.0, 2.0)
        (row,) = service.dispatch.accounts.rows()
        used = (row["prefilled_tokens"], row["sampled_tokens"], row["trained_tokens"])
        assert used == (2, 6, 6 + service_tokens(client))
        assert row["dollars"] == pytest.approx((2 * 0.68 + 6 * 1.7 + used[2] * 2.04) / 1e6)
        assert row["staleness_mean_steps"] == 2.0
        assert row["device_s"] >= 4.0
        assert row["queued_s"] > 0
        await clock.sleep(20)
        assert service.dispatch.accounts.rows("a")[0]["client_s"] >= 20
        await service.kill()
        service = start()
        (again,) = service.dispatch.accounts.rows()
        assert all(again[name] == row[name] for name in ("prefilled_tokens", "sampled_tokens", "trained_tokens"))
        status, body = await call(service.app, "GET", "metrics", prefix="/")
        assert status == 200
        assert b'headway_tinker_tenant_sampled_tokens{tenant="a"} 6.0' in body
        await service.kill()

    run_virtual(main, 1000.0)


def service_tokens(client: Client) -> int:
    bodies = [body for path, body in client.posts if path == "forward_backward"]
    messages = [message_classes()["ForwardBackwardRequest"].FromString(body) for body in bodies]
    return sum(len(chunk.encoded_text.tokens) // 4 for m in messages for d in m.data for chunk in d.model_input)


def test_snapshots_without_names_expire_unless_they_are_used() -> None:
    async def main(clock: Clock) -> None:
        service = opened(clock)
        session = await session_of(service)
        client = Client(f"{session}:train:0", session, ["save_weights_for_sampler"] * 2)
        for number in range(3):
            await client.post(service, number)
        await client.replies(service)
        sample = {"sampling_session_id": f"{session}:sample:101", "num_samples": 1, "prompt": PROMPT,
                  "sampling_params": {"max_tokens": 1}}  # fmt: skip
        for hour in range(3):
            for _ in range(10):
                await clock.sleep(200)
                service.dispatch.keep_alive(session)
            await service.post("asample", {**sample, "seq_id": hour})
            await clock.sleep(10)
            kept = {entry.path.rpartition("/")[2] for entry in service.log.all("checkpoints")}
            assert kept == ({"-000001", "-000002"} if hour == 0 else {"-000001"})
        await call(service.app, "POST", f"sessions/{session}/finish", {"reason": {"type": "success"}})
        await clock.sleep(5)
        assert service.log.all("checkpoints") == []
        await service.kill()

    run_virtual(main, 20_000.0)
