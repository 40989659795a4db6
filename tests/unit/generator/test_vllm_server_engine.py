"""The engine behind a `vllm serve`, over a server of a few lines: whose tokens are believed, what ends the process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_hub import make_hub_model

from headway.config.model import ModelConfig
from headway.control.logprob_limits import disagreement
from headway.generator import service as service_module
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.reference import PublishedModel
from headway.generator.engines.vllm.server_client import EventStream, ServerError
from headway.generator.engines.vllm.server_engine import VllmServerEngine
from headway.generator.engines.vllm.server_info import ServerInfo
from headway.generator.service import GeneratorService
from headway.models.hf.model import load_hf
from headway.models.loading import weights_of
from headway.records.errors import WeightsMismatch
from headway.records.generation import (
    GenerationRequest,
    PathScores,
    Probe,
    ProbeScores,
    PublishedWeights,
    SamplingParameters,
    TokenDelta,
    probe_ids,
)
from headway.weights.shared_memory import Publisher
from headway.weights.slots import reap, reap_folders
from tests.conformance.reference import random_model

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
MODEL = random_model(0)
SERVED = ServerInfo(context_tokens=200, kv_capacity_tokens=1000, dtype="float32", quantised=False)


class FakeServer:
    """Computes as the engine's own copy of the model does, and names its weights as it was told to."""

    address = "http://there:8000"

    def __init__(self) -> None:
        self.published = PublishedModel(MODEL.config)
        self.published.take(weights_of(MODEL))
        self.version = "default"  # as a vLLM that nobody has told
        self.wrong = 0.0  # nats by which it computes something else
        self.fails: dict[str, Exception] = {}  # by the beginning of a path
        self.asked: list[tuple[socket.socket, Any]] = []

    def get(self, path: str) -> bytes:
        return b""

    def last_output(self) -> str:
        return ""

    def post(self, path: str, body: Any = None) -> Any:
        for start, error in self.fails.items():
            if path.startswith(start):
                raise error
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/inference/v1/generate":
            return self._probed(body["token_ids"])
        if path == "/inference/v1/abort_requests":
            for index, (_, request) in enumerate(self.asked):
                if f"generate-tokens-{request['request_id']}" in body["request_ids"]:
                    self.say(index, 0, "abort")
        return None

    def _probed(self, ids: list[int]) -> Any:
        logprobs = self.published.logprobs(ids)
        sampled = self.published.logprobs([*ids, 7], 0.5)[-1]
        return {
            "choices": [{"logprobs": {"content": [{"token_id": 7, "logprob": sampled}]}}],
            "prompt_logprobs": [None]
            + [{str(token): {"logprob": one + self.wrong}} for token, one in zip(ids[1:], logprobs, strict=True)],
        }

    def stream(self, path: str, body: Any) -> EventStream:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.sendall(HEAD)
        self.asked.append((theirs, body))
        return EventStream(ours)

    def say(self, index: int, tokens: int, ended: str | None = None, spans: Sequence[tuple[str, int]] = ()) -> None:
        """More tokens of a request; with its end, the ``spans`` that it says were sampled by whom."""
        choice: dict[str, Any] = {"token_ids": [3] * tokens, "finish_reason": ended}
        choice["logprobs"] = {"content": [{"token_id": 3, "logprob": -1.0}] * tokens}
        if ended is not None:
            first, told = 0, []
            for version, count in spans:
                told.append({"version": version, "start": first, "end": first + count})
                first += count
            choice["weight_versions"] = told
        self.send(index, {"choices": [choice]})

    def send(self, index: int, chunk: Any) -> None:
        self.asked[index][0].sendall(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


def engine_of(
    server: FakeServer, folder: Path, now: Callable[[], float] = time.monotonic, **settings: Any
) -> VllmServerEngine:
    return VllmServerEngine(
        server,  # type: ignore[arg-type]
        SERVED,
        server.published,
        EngineSettings(
            model_path="",
            dtype="float32",
            slots=8,
            max_context_tokens=200,
            exchange_directory=str(folder),
            **settings,
        ),
        now=now,
    )


def asked(*names: str) -> list[GenerationRequest]:
    how = SamplingParameters(max_tokens=50)
    return [GenerationRequest(request_id=name, prompt_ids=(1, 2), sampling=how) for name in names]


def streamed(engine: VllmServerEngine, server: FakeServer, count: int = 2) -> None:
    """``count`` requests have three tokens each, which the pool has been told of."""
    engine.submit(asked(*"abcdef"[:count]))
    engine.step()
    for index in range(count):
        server.say(index, 3)
    engine.step()
    assert [len(delta.ids) for delta in engine.take_deltas()] == [3] * count


@pytest.fixture
def published() -> Iterator[PublishedWeights]:
    with Publisher(f"server-engine-{os.getpid()}") as publisher:
        yield publisher.publish(1, weights_of(random_model(1)))


def void(deltas: list[TokenDelta]) -> set[str]:
    """Of whom nothing is to be believed: they have ended, and have no tokens."""
    assert all(delta.finish_reason == "error" and not delta.ids for delta in deltas if delta.void)
    return {delta.request_id for delta in deltas if delta.void}


def test_grammars_are_the_servers_own(tmp_path: Path) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    engine._tokenizer = object()  # type: ignore[assignment]
    how = SamplingParameters(grammar='start: "a"')
    engine.submit([*asked("a"), GenerationRequest(request_id="b", prompt_ids=(1,), sampling=how)])
    engine.step()
    free, within = (body["sampling_params"] for _, body in server.asked)
    assert "structured_outputs" not in free
    assert within["structured_outputs"] == {"grammar": 'start: "a"'}


# --- whose tokens are believed --------------------------------------------------------------------------------


def test_a_server_that_was_restarted_voids_what_it_has_and_ends_the_process(tmp_path: Path) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    server.say(0, 1, "length", [("default", 4)])
    assert not engine.step()
    deltas = engine.take_deltas()
    assert void(deltas) == {"a", "b"}
    assert "samples from weights 'default', which this run did not publish: it was restarted" in deltas[0].error
    with pytest.raises(ConnectionError, match="it was restarted, or serves another run too"):
        engine.step()


def test_it_is_seen_in_an_update_too_and_told_before_the_process_ends(
    tmp_path: Path, published: PublishedWeights
) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    server.say(0, 1, "length", [("default", 4)])
    engine.apply(published, "keep")
    assert not engine.step()
    assert void(engine.take_deltas()) == {"a", "b"}
    with pytest.raises(ConnectionError):
        engine.step()


def test_the_process_hands_it_out_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    monkeypatch.setattr(service_module, "build_engine", lambda settings, context: engine)
    events: list[bytes] = []

    class Context:
        emit = staticmethod(events.append)

    service = GeneratorService(Context(), model_path="", dtype="", slots=1, max_context_tokens=1)  # type: ignore[arg-type]
    streamed(engine, server)
    server.say(0, 1, "length", [("default", 4)])
    service.tick()
    assert void(msgspec.msgpack.decode(events[-1], type=list[TokenDelta])) == {"a", "b"}
    with pytest.raises(ConnectionError):
        service.tick()


def test_versions_of_two_runs_on_one_server_are_not_taken_for_one_another(tmp_path: Path) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    own = server.version
    engine_of(server, tmp_path)  # gives it its own version 0
    assert server.version != own
    server.say(0, 1, "length", [(own, 1), (server.version, 3)])
    assert not engine.step()
    assert void(engine.take_deltas()) == {"a", "b"}


def test_tokens_under_wrong_labels_are_void_and_their_neighbours_are_not(
    tmp_path: Path, published: PublishedWeights
) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    before = server.version
    engine.apply(published, "keep")
    server.say(0, 1, "length", [(before, 2), (server.version, 2)])  # three were labelled with the version before
    server.say(1, 1, "length", [(before, 3), (server.version, 1)])
    while engine.open_requests:
        engine.step()
    deltas = engine.take_deltas()
    assert void(deltas) == {"a"}
    assert "its tokens were labelled with versions [[0, 3], [1, 1]], the server reports" in deltas[0].error
    (ended,) = (delta for delta in deltas if delta.finish_reason == "length")
    assert (ended.request_id, ended.version, len(ended.ids)) == ("b", 1, 1)


def test_what_was_sampled_from_weights_that_a_probe_refuses_is_void(
    tmp_path: Path, published: PublishedWeights
) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    server.wrong = 0.1
    with pytest.raises(WeightsMismatch, match="version 1: log-probabilities of a probe differ"):
        engine.apply(published, "keep")
    assert void(engine.take_deltas()) == {"a", "b"}
    assert not engine.step()
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_with_other_weights_is_found_by_positions_share_and_largest_difference(tmp_path: Path) -> None:
    """The server agrees with its own reference, so that only the comparison with the trainer can tell."""
    engine = engine_of(FakeServer(), tmp_path)
    ids = probe_ids(3, MODEL.config.vocabulary_size, 200)
    found = engine.score(Probe(ids=ids))
    assert (found.probe.ids, found.precision, found.paths["prefill"].hidden) == (ids, "tf32", None)
    for model, agrees in ((MODEL, True), (random_model(5), False)):
        reference = PublishedModel(model.config)
        reference.take(weights_of(model))
        alone = PathScores(logprobs=np.asarray(reference.logprobs(ids)))
        trainer = ProbeScores(probe=found.probe, precision="float32", paths={"alone": alone, "packed": alone})
        largest, wrong = disagreement(trainer, found, "float32")
        assert list(largest) == ["packed", "prefill"]
        assert (wrong == "") is agrees
    assert "the limits are 0.001 and 0.001 (tf32). 31 of 31 tokens (100%) differ" in wrong
    assert "hidden states" not in wrong


@pytest.mark.parametrize("kind", ["Olmoe", "GPT2"])
def test_a_model_that_the_trainer_runs_in_transformers_is_written_by_the_names_of_its_folder(
    tmp_path: Path, kind: str
) -> None:
    """Experts apart; of a tied head nothing but the embedding."""
    folder = make_hub_model(tmp_path / "m", kind, max_position_embeddings=256)
    server, given = FakeServer(), list[dict[str, Any]]()
    server.published = PublishedModel.of(ModelConfig(path=folder))
    server.published.load("float32")
    post = server.post

    def load(path: str, body: Any = None) -> Any:
        if path == "/collective_rpc":
            given.append(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
        return post(path, body)

    server.post = load  # type: ignore[method-assign]
    engine, trained = engine_of(server, tmp_path), load_hf(folder, "float32", "cpu")
    for parameter in trained.parameters():
        parameter.data *= 2
    with Publisher(f"server-engine-hub-{os.getpid()}") as publisher:
        engine.apply(publisher.publish(1, weights_of(trained)), "recompute")
    trained.save(tmp_path / "saved")
    for found, stored in zip(given, (folder, tmp_path / "saved"), strict=True):
        expected = load_file(Path(stored) / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all((found[name] == one).all() for name, one in expected.items())


def test_tokens_that_are_never_sampled_are_told_to_the_server(tmp_path: Path) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    engine.submit(asked("a"))
    engine.step()
    engine.bias = {5: -100.0}
    engine.submit(asked("b"))
    engine.step()
    plain, told = (body["sampling_params"] for _, body in server.asked)
    assert "logit_bias" not in plain
    assert told["logit_bias"] == {5: -100.0}


# --- what ends the process ------------------------------------------------------------------------------------

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def test_an_engine_that_is_dead_ends_no_request_but_the_process(tmp_path: Path) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    server.send(0, {"error": {"message": DEAD}})
    with pytest.raises(ConnectionError, match="its engine is dead"):
        engine.step()
    assert engine.take_deltas() == []  # they go on elsewhere from the tokens they have
    assert engine.open_requests == 2


def test_any_other_error_is_the_requests_own(tmp_path: Path) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    streamed(engine, server)
    server.send(0, {"error": {"message": "KV load failed"}})
    engine.step()
    (delta,) = engine.take_deltas()
    assert (delta.request_id, delta.finish_reason, delta.refused, delta.void) == ("a", "error", False, False)
    assert engine.open_requests == 1


@pytest.mark.parametrize("path", ["/pause", "/update_weight_version", "/resume"])
def test_an_update_that_the_server_fails_ends_the_process(
    path: str, tmp_path: Path, published: PublishedWeights
) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    server.fails[path] = ServerError(503, "upstream fell over")
    with pytest.raises(SystemExit, match="the server failed: HTTP 503: upstream fell over"):
        engine.apply(published, "keep")


def test_an_abort_that_the_server_fails_cuts_the_request_off(tmp_path: Path) -> None:
    server, ticks = FakeServer(), iter(range(100_000))
    engine = engine_of(server, tmp_path, now=lambda: float(next(ticks)))
    streamed(engine, server)
    server.fails["/inference/v1/abort_requests"] = ServerError(500, "no")
    engine.abort(["a"])
    (delta,) = engine.take_deltas()
    assert (delta.request_id, delta.finish_reason) == ("a", "abort")


# --- the folder weights are handed over in --------------------------------------------------------------------


def killed_in_an_update(folder: Path) -> None:
    code = (
        "import os, signal; from headway.weights.slots import exchange_folder\n"
        f"with exchange_folder({str(folder)!r}) as one:\n"
        "    (one / 'model.safetensors').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code])


def test_a_folder_that_a_killed_update_left_is_removed_by_the_successor_and_by_any_run(tmp_path: Path) -> None:
    killed_in_an_update(tmp_path)
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 1
    engine_of(FakeServer(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    killed_in_an_update(tmp_path)
    assert len(reap("another", directory=tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_stays(tmp_path: Path, published: PublishedWeights) -> None:
    server = FakeServer()
    engine = engine_of(server, tmp_path)
    removed: list[str] = []
    post = server.post

    def reaped(path: str, body: Any = None) -> Any:
        if path == "/collective_rpc":
            removed.extend(reap_folders(tmp_path))
            assert (Path(body["kwargs"]["weights_path"]) / "model.safetensors").exists()
        return post(path, body)

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, server, "post", post)
        server.post = reaped  # type: ignore[method-assign]
        engine.apply(published, "keep")
    assert removed == []
    assert list(tmp_path.iterdir()) == []
