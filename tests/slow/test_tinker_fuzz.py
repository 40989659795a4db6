"""Ten thousand requests of two tenants over all routes and encodings: no answer is a failure of the service, nothing of
the other tenant is in one, and memory stays flat."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from tinker_service import CountingSampler, Disk, HistoryTrainer, Service, call

from headway.runtime.clock import Clock, run_virtual
from headway.runtime.devices import resident_bytes
from headway.services.tinker.wire import message_classes

CASES = 10_000
NAMES = [
    "session_id",
    "model_id",
    "seq_id",
    "model_seq_id",
    "sampling_session_id",
    "path",
    "num_samples",
    "prompt",
    "request_id",
    "lora_config",
    "kind",
    "adam_params",
    "sampling_params",
    "ttl_seconds",
    "tinker_path",
    "base_model",
    "user_metadata",
    "sampling_session_seq_id",
    "optimizer",
    "events",
    "sdk_version",
    "reason",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "target_prompt_logprobs",
    "overwrite",
]
POSTS = [
    "create_model",
    "load_weights",
    "get_info",
    "create_sampling_session",
    "asample",
    "cancel_future",
    "telemetry",
    "weights_info",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "retrieve_future",
    "session_heartbeat",
    "forward_backward",
    "client/config",
    "client/dynamic_config",
    "create_session",
]
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**80, 1.5, 1e308, "", "x", "../..", "tiny", "\x00", "ä" * 40, [], {}, [[]],
    {"rank": 2}, {"rank": 10**9}, {"tokens": [1]}, {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    {"chunks": [{"type": "image"}]}, {"max_tokens": 2}, {"max_tokens": -1, "temperature": -1}, {"learning_rate": "x"},
    "snapshot", "inflight", "0.38.0", "0.1",
)  # fmt: skip
QUERIES = (
    "", "", "limit=2", "limit=x&offset=-1", "offset=99999999999999999999", "limit=%D9%A3", "limit=%ff&offset=%00",
    "expires=9999999999&signature=%ff", "expires=" + "9" * 400, "signature=x&signature=y", "&&==%", "\x80=\xff",
)  # fmt: skip


async def make_tenant(service: Service, clock: Clock, key: str) -> dict[str, str]:
    """A session with a model, a sampler and checkpoints, whose metadata has the tenant's mark."""
    created = await service.post("create_session", {"sdk_version": "0.38.0", "user_metadata": {"of": key}}, key=key)
    session = created[1]["session_id"]
    model = f"{session}:train:0"
    fields: dict[str, Any] = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 2},
    }
    await service.post("create_model", fields | {"user_metadata": {"of": key}}, key=key)
    for sequence, kind in enumerate(("save_weights", "save_weights_external"), start=1):
        await service.post(kind, {"model_id": model, "seq_id": sequence, "path": f"of-{key}"}, key=key)
    sampler: dict[str, Any] = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
    await service.post("save_weights_for_sampler", sampler, key=key)
    await clock.sleep(20)
    return {"session": session, "model": model, "sampler": f"{session}:sample:0", "key": key}


class Requests:
    """Random requests, most of them with objects of one of the tenants."""

    def __init__(self, tenants: dict[str, dict[str, str]], seed: int) -> None:
        self._random, self._tenants = random.Random(seed), tenants
        self._numbers = {ids["model"]: itertools.count(4) for ids in tenants.values()}

    def next(self) -> tuple[str, str, bytes, dict[str, str], str]:
        """Method, route, body, headers and key."""
        choice = self._random
        key, ids = choice.choice(list(self._tenants.items()))
        key = key if choice.random() < 0.7 else choice.choice(["tml-a", "tml-b", "", "x", "tml-\x80"])
        headers = {"content-encoding": choice.choice([*[""] * 12, "zstd", "gzip"])}
        if choice.random() < 0.3:
            method, route = choice.choice(["GET", "GET", "GET", "POST", "PUT", "DELETE", "PATCH"]), self._resource(ids)
            return method, route, self._damaged(msgspec.json.encode(self._fields(ids))), {}, key
        route = choice.choice(POSTS)
        if route == "forward_backward":
            body = self._pass(ids)
            if headers["content-encoding"] == "zstd" and choice.random() < 0.8:
                body = zstandard.ZstdCompressor().compress(body)
            return "POST", route, self._damaged(body), headers, key
        fields = self._right(route, ids) if choice.random() < 0.8 else {}
        for name in choice.sample([*fields, *NAMES], choice.choice([0, 0, 1, 1, 2, 8])):
            fields[name] = self._fields(ids, [name])[name]
        return "POST", route, self._damaged(msgspec.json.encode(fields)), headers, key

    def _right(self, route: str, ids: dict[str, str]) -> dict[str, Any]:
        """What the SDK would send."""
        sequence, name = next(self._numbers[ids["model"]]), f"n{self._random.randrange(20)}"
        to_model: dict[str, Any] = {"model_id": ids["model"], "seq_id": sequence}
        checkpoint = f"tinker://{ids['model']}/weights/of-{ids['key']}"
        in_session: dict[str, Any] = {"session_id": ids["session"], "base_model": "tiny"}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        sampled = {"num_samples": 1, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
        fields: dict[str, dict[str, Any]] = {
            "create_model": in_session | {"model_seq_id": sequence, "lora_config": {"rank": 2}},
            "load_weights": in_session | {"model_seq_id": sequence, "path": checkpoint, "optimizer": False},
            "get_info": {"model_id": ids["model"]},
            "create_sampling_session": in_session | {"sampling_session_seq_id": sequence},
            "asample": {"sampling_session_id": ids["sampler"], "seq_id": sequence} | sampled,
            "weights_info": {"tinker_path": checkpoint},
            "optim_step": to_model | {"adam_params": {"learning_rate": 0.1}},
            "save_weights": to_model | {"path": name},
            "save_weights_for_sampler": to_model | {"path": name},
            "save_weights_external": to_model | {"path": name},
            "retrieve_future": {"request_id": f"{ids['model']}:{self._random.randrange(4)}"},
            "cancel_future": {"request_id": f"{ids['sampler']}:{sequence}"},
            "session_heartbeat": {"session_id": ids["session"]},
            "create_session": {"sdk_version": "0.38.0"},
            "client/config": {"sdk_version": "0.38.0"},
        }
        return fields.get(route, {})

    def _resource(self, ids: dict[str, str]) -> str:
        choice = self._random
        model = choice.choice([ids["model"], "x", "..", "%2e%2e"])
        kind = choice.choice(["weights", "external_weights", ".."])
        checkpoint = f"training_runs/{model}/checkpoints/{kind}/of-tml-a"
        return choice.choice([
            "sessions", f"sessions/{ids['session']}", f"samplers/{ids['sampler']}", "checkpoints", "training_runs",
            "get_server_capabilities", "healthz", f"training_runs/{model}", f"training_runs/{model}/checkpoints",
            checkpoint, f"{checkpoint}/publish", f"{checkpoint}/ttl", f"{checkpoint}/external_weights_urls", "files/x",
            "files/../../etc/passwd", "nothing", "",
        ])  # fmt: skip

    def _fields(self, ids: dict[str, str], names: list[str] | None = None) -> dict[str, Any]:
        choice = self._random
        known = [*ids.values(), f"{ids['model']}:{choice.randrange(6)}", f"tinker://{ids['model']}/weights/of-tml-a"]
        names = names or choice.sample(NAMES, choice.randrange(8))
        return {name: choice.choice(known if choice.random() < 0.5 else ODD) for name in names}

    def _pass(self, ids: dict[str, str]) -> bytes:
        choice, classes = self._random, message_classes()
        message = classes["ForwardBackwardRequest"](
            model_id=choice.choice([ids["model"], "x", ""]),
            seq_id=next(self._numbers[ids["model"]]) if choice.random() < 0.7 else choice.choice([-1, 0, 1, 2**31 - 1]),
            loss_fn=choice.choice(["cross_entropy", "ppo", "dro", "custom", "stable_reinforce", ""]),
        )
        for _ in range(choice.randrange(3)):
            datum = message.data.add()
            tokens = [choice.choice([1, 2, 99, 100, -1, 2**31 - 1]) for _ in range(choice.randrange(5))]
            datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()[
                : choice.choice([20, 20, 3])
            ]
            for name in choice.sample(["target_tokens", "weights", "logprobs", "advantages", "x"], choice.randrange(4)):
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype = choice.choice([0, 1, 2])
                tensor.shape.extend(choice.choice([[], [len(tokens)], [len(tokens), 2], [-1], [2**40]]))
                tensor.dense = bytes(choice.randrange(256) for _ in range(choice.choice([0, 4, 8 * len(tokens), 7])))
        return message.SerializeToString()

    def _damaged(self, body: bytes) -> bytes:
        choice = self._random
        if choice.random() < 0.2 and body:
            body = body[: choice.randrange(len(body))]
        if choice.random() < 0.1 and body:
            index = choice.randrange(len(body))
            body = body[:index] + bytes([choice.randrange(256)]) + body[index + 1 :]
        return body


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_requests_fail_no_service_and_show_nothing_of_others(seed: int, tmp_path: Path) -> None:
    counts: dict[int, int] = {}

    async def main(clock: Clock) -> None:
        disk = Disk()
        trainer, sampler = HistoryTrainer(disk, clock, 0.01), CountingSampler(disk, clock, 0.01)
        service = Service(tmp_path, trainer, sampler, clock, clock.now)
        tenants = {key: await make_tenant(service, clock, key) for key in ("tml-a", "tml-b")}
        requests, early_bytes = Requests(tenants, seed), 0
        for case in range(CASES):
            method, route, body, headers, key = requests.next()
            query = QUERIES[case % len(QUERIES)] if method == "GET" else ""
            status, answer = await call(service.app, method, route, body, headers=headers, key=key, query=query)
            counts[status] = counts.get(status, 0) + 1
            assert status < 500, (method, route, body, answer)
            text = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
            for other, ids in tenants.items():
                if other != key:
                    marks = [f'"of":"{other}"', f'"of": "{other}"', ids["session"]]
                    shown = [mark for mark in marks if mark.encode() in text and mark.encode() not in body]
                    assert not [mark for mark in shown if mark not in route], (method, route, body, answer)
            if case == CASES // 5:
                early_bytes = resident_bytes()
        assert resident_bytes() - early_bytes < 60e6
        await clock.sleep(100)
        for key, ids in tenants.items():
            _, body = await service.post("retrieve_future", {"request_id": f"{ids['model']}:1"}, key=key)
            assert body["path"].endswith(f"/weights/of-{key}")
        await service.kill()

    run_virtual(main, 1e6)
    print(counts)
    assert counts[200] > CASES / 4
