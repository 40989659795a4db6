"""`headway serve` without its engine: whose calls belong together, when a session is over, what the engine is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from endpoint_server import chat

from headway.config.load import validate_experiment
from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.sessions import KeyRefused, NoSuchRollout, Session
from headway.generator.routing.limiter import Permit
from headway.records.conversations import ClientSampling, RecordedConversation, RequestRefused
from headway.records.errors import ConfigurationError
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.tokens import restored
from headway.runtime.clock import Clock, run_virtual
from headway.services.serve import ServedSessions, sampling, serve_settings_from
from headway.services.session_record import recorded_line
from headway.tokens.messages import normal_messages

KEYS = ("a-key-of-16-bytes", "another-key-of-16")


class Engine:
    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.places: list[tuple[int, int]] = []  # tokens asked for and used
        self.clock: Clock | None = None  # on which an answer takes this long
        self.takes_s = 0.0

    @asynccontextmanager
    async def permit_for(self, tokens: int) -> AsyncIterator[Permit]:
        place = Permit(tokens)
        yield place
        self.places.append((tokens, place.used_tokens))

    async def generate(self, request: GenerationRequest, watch: Any = None, /) -> GenerationResult:
        self.requests.append(request)
        if self.clock is not None:
            await self.clock.sleep(self.takes_s)
        response = PartialResponse(ids=(5, 6), logprobs=(-1.0, -2.0), versions=(VersionSpan(version=0, tokens=2),))
        return GenerationResult(request_id=request.request_id, response=response, finish_reason="stop")


def sessions(
    clock: Clock, keys: Sequence[str] = (), over: list[Session] | None = None, **limits: Any
) -> tuple[ServedSessions, Engine]:
    experiment = validate_experiment(
        {"run": {"directory": "none"}, "model": {"path": "none"}, "tasks": {"train": {"path": "none"}}}, "test"
    )
    engine, ended = Engine(), [] if over is None else over
    sample_of = sampling(engine.generate, chat().tokenizer, engine.permit_for)
    return ServedSessions(chat(), experiment, sample_of, clock, tuple(keys), ended.append, **limits), engine


async def ask(session: Session, text: str = "1+2?", **client: Any) -> None:
    seed = client.get("seed")
    request = CallRequest(messages=normal_messages([{"role": "user", "content": text}]), seed=seed)
    answering = session.call(request, ClientSampling(**client))
    assert answering.task is not None
    await answering.task
    assert answering.error is None
    answering.note_received()


def test_calls_of_one_key_and_one_name_are_a_rollout() -> None:
    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, KEYS)
        mine, other = access.session(KEYS[0], "x"), access.session(KEYS[1], "x")
        assert mine is access.session(KEYS[0], "x")
        assert mine is not other
        assert access.session(KEYS[0]) is not access.session(KEYS[0])
        assert access.rollout(KEYS[0], "x") is mine
        for key in ("", "a-key-of-16-byte"):
            with pytest.raises(KeyRefused):
                access.session(key, "x")
        with pytest.raises(RequestRefused, match="256 characters"):
            access.session(KEYS[0], "x" * 257)
        for name in ("y", ""):
            with pytest.raises(NoSuchRollout):
                access.rollout(KEYS[0], name)
        anyones, _ = sessions(clock)
        anyones.session("", "x")

    run_virtual(main)


def test_a_session_is_over_when_it_is_not_used_for_long() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, over=over)
        await ask(access.session("", "used"))
        await ask(access.session(""))
        access.session("", "unused")
        await clock.sleep(500)
        used = access.session("", "used")
        await clock.sleep(300)
        access.sweep()
        assert [session.rollout for session in over] == ["unused"]
        assert access.session("", "used") is used
        access.seal_all()
        assert [session.rollout for session in over] == ["unused", "used"]
        assert access.session("", "used") is not used

    run_virtual(main)
    assert recorded_line(over[0]) is None
    line = recorded_line(over[1])
    assert line is not None
    data = json.loads(line)
    assert (data.pop("rollout"), data["calls"]) == ("used", 1)
    assert msgspec.convert(data, RecordedConversation, dec_hook=restored) == over[1].seal()


def test_recorded_lines_of_one_name_tell_their_keys_apart() -> None:
    over: list[Session] = []

    async def main(clock: Clock) -> None:
        access, _ = sessions(clock, KEYS, over=over)
        for key in KEYS:
            await ask(access.session(key, "same"))
        access.seal_all()

    run_virtual(main)
    lines = [json.loads(recorded_line(session) or b"") for session in over]
    assert [line["rollout"] for line in lines] == ["same", "same"]
    assert len({line["key"] for line in lines}) == 2
    assert all(len(line["key"]) == 16 and key not in str(line) for line, key in zip(lines, KEYS, strict=True))


def test_the_client_says_how_it_is_sampled() -> None:
    async def main(clock: Clock) -> list[GenerationRequest]:
        access, engine = sessions(clock)
        await ask(access.session(""))
        await ask(access.session(""), temperature=0.0, top_p=0.0, top_k=-1)
        await ask(access.session(""), seed=5)
        await ask(access.session(""), seed=5)
        await ask(access.session(""), seed=6)
        return engine.requests

    plain, other, *seeded = (request.sampling for request in run_virtual(main))
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
    assert (other.temperature, other.top_k, 0 < other.top_p < 1e-3) == (0.0, 0, True)
    assert plain.seed != other.seed
    assert seeded[0].seed == seeded[1].seed != seeded[2].seed


def test_each_call_takes_a_place_and_says_what_it_used() -> None:
    async def main(clock: Clock) -> tuple[GenerationRequest, list[tuple[int, int]]]:
        access, engine = sessions(clock)
        await ask(access.session("", "x"))
        return engine.requests[0], engine.places

    request, places = run_virtual(main)
    prompt = len(request.prompt_ids)
    assert places == [(prompt + request.sampling.max_tokens, prompt + 2)]


def test_calls_of_a_session_are_told_from_those_of_others() -> None:
    async def main(clock: Clock) -> list[str]:
        access, engine = sessions(clock)
        for name in ("x", "x", "y", ""):
            await ask(access.session("", name))
        return [request.session for request in engine.requests]

    first, again, other, alone = run_virtual(main)
    assert first == again != other
    assert (bool(first), bool(other), alone) == (True, True, "")


def test_what_is_served(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "keys").write_text(f"# mine\n{KEYS[0]}\n\n{KEYS[1]}\n")
    model = str(tmp_path)
    wanted = serve_settings_from(model, "127.0.0.1:0", None, "", "", ["--generator.slots=3", "--endpoint.calls=7"])
    experiment = wanted.experiment
    assert (experiment.max_sequence_tokens, experiment.generator.slots, experiment.endpoint.calls) == (512, 3, 7)
    assert serve_settings_from(model, "0.0.0.0:0", 100, f"{tmp_path}/keys", "", []).keys == KEYS
    for arguments, says in (
        (("0.0.0.0:80", None, "", "", []), "keys are required: --keys FILE"),
        (("127.0.0.1:0", 513, "", "", []), "--context 513: valid: 2 to 512"),
        (("127.0.0.1:0", None, f"{tmp_path}/none", "", []), "none"),
        (("127.0.0.1:0", None, "", "", ["--run.seed=1"]), "valid: keys of"),
        (("nowhere", None, "", "", []), "endpoint.address"),
        (("127.0.0.1:0", None, "", "", [], ["poet"]), "--adapter poet: valid: NAME=FOLDER"),
        (("127.0.0.1:0", None, "", "", [], ["base=x"]), "the name 'base' is taken"),
        (("127.0.0.1:0", None, "", "", [], ["headway=x"]), "the name 'headway' is taken"),
        (("127.0.0.1:0", None, "", "", [], [f"poet={tmp_path}"]), "no adapter_config.json"),
        (
            ("127.0.0.1:0", None, "", "", ["--generator.engine=vllm"], ["poet=x"]),
            "valid with generator.engine = 'torch'",
        ),
    ):
        with pytest.raises(ConfigurationError, match=says):
            serve_settings_from(model, *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"environment": {"name": "agent"}}, "needs agent = "),
        ({"environment": {"agent": "m:f"}}, "agent has no effect"),
        ({"environment": {"name": "agent", "agent": "m"}}, "module:function"),
        ({"environment": {"name": "agent", "agent": ["sh", "-c", "x {prompt}"]}}, "a separate argument"),
        ({"environment": {"name": "agent", "agent": ["x"]}, "hooks": {"rollout": "m:f"}}, "leave one of them out"),
        (
            {"environment": {"name": "agent", "agent": ["x"]}, "rollout": {"stop": ["a"]}},
            "environments decide",
        ),
        (
            {
                "environment": {"name": "agent", "agent": ["x"]},
                "pruning": {"pruners": [{"kind": "length", "tokens": 9}]},
            },
            "pruners read",
        ),
        ({"environment": {"name": "agent", "agent": ["x"]}, "algorithm": {"overlong": "penalty"}}, "no common limit"),
        ({"environment": {"name": "agent", "agent": ["x"]}, "algorithm": {"turn_discount": 1}}, "have one reward"),
        ({"endpoint": {"address": "8000"}}, "HOST:PORT"),
        ({"endpoint": {"model": " "}}, "a name is needed"),
    ],
)
def test_settings_that_contradict_each_other(sections: dict[str, Any], says: str) -> None:
    raw = {"run": {"directory": "none"}, "model": {"path": "none"}, "tasks": {"train": {"path": "none"}}, **sections}
    with pytest.raises(ConfigurationError, match=says):
        validate_experiment(raw, "test")


def test_an_agent_is_a_complete_environment() -> None:
    environment = {"name": "agent", "agent": ["python", "agent.py", "{prompt}"], "variables": {"X": "1"}}
    raw = {"run": {"directory": "none"}, "model": {"path": "none"}, "tasks": {"train": {"path": "none"}}}
    experiment = validate_experiment({**raw, "environment": environment}, "test")
    assert (experiment.environment.failed_exit, experiment.endpoint.address) == ("fail", "127.0.0.1:0")
