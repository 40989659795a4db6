"""The judge against a real HTTP server on this machine; weighted sums; rewards by turn on their way into a rollout."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from completions_server import Endpoint, completion, serving

from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.rollout import Failure, Rollout, Verdict
from headway.records.task import Task
from headway.rollout.verification.judge import Judge
from headway.rollout.verification.service import VerifierService
from headway.rollout.verification.verdicts import apply_verdict, to_verdict
from headway.rollout.verification.verifiers import resolve_verifier
from headway.runtime.addresses import machine_certificates

TASK = Task(task_id="0", prompt="Name a prime.", answer="7")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    yield from serving()


def judge(endpoint: Endpoint, waits: list[float] | None = None, **parameters: Any) -> Judge:
    settings = {"url": endpoint.url, "model": "m", **parameters}
    built = resolve_verifier(VerifierSettings(name="judge", parameters=settings, timeout_s=1000.0))
    assert isinstance(built, Judge)
    kept: list[float] = [] if waits is None else waits
    object.__setattr__(built.chat, "sleep", kept.append)
    object.__setattr__(built.chat, "draw", lambda: 0.5)
    return built


def test_a_score_becomes_a_reward_and_its_tokens_are_counted(endpoint: Endpoint, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint.answer = lambda body: "Score: 2 at first; but then\n**Score: 7.5**"
    asked = judge(endpoint, api_key_env="JUDGE_KEY", system="Be fair.", body={"temperature": 0},
                  prompt="{prompt}|{answer}|{response}|{lowest}-{highest}", solved_at=0.75,
                  price_prompt=2.0, price_completion=10.0)  # fmt: skip
    found = asked(TASK, "Is it {answer}?")
    assert (found.reward, found.solved, found.detail, found.failure) == (0.75, True, {"score": 7.5}, None)
    assert found.judge_tokens == 110
    assert found.judge_cost == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    [(path, headers, body)] = endpoint.asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    # What the response says of {answer} is left alone.
    assert body == {
        "model": "m",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Name a prime.|7|Is it {answer}?|0-10"},
        ],
    }
    assert "secret" not in repr(asked)


@pytest.mark.parametrize(
    ("replies", "cause"),
    [
        (["It is good."], "the judge's answer holds no score: 'It is good.'"),
        (["Score: 11"], "the judge's score is 11: valid: 0 to 10"),
        (["Score: -1"], "the judge's score is -1: valid: 0 to 10"),
        ([(200, {}, {"error": "busy"})], """the judge's reply isn't a chat completion: '{"error": "busy"}'"""),
        ([(200, {}, completion(None))], "the judge's reply isn't a chat completion"),  # type: ignore[arg-type]
        ([(200, {}, b"<html>")], "the judge's reply isn't JSON: '<html>'"),
        ([(503, {}, {"error": "overloaded"})], 'the judge answered HTTP 503: \'{"error": "overloaded"}\''),
        ([None], "can't be reached: "),
    ],
)
def test_what_is_no_score_is_asked_for_again_and_never_a_reward(
    endpoint: Endpoint, replies: list[Any], cause: str
) -> None:
    endpoint.answer = lambda body: replies[0]
    found = judge(endpoint, retries=2)(TASK, "11")
    assert found.failure is not None
    assert (found.failure.infrastructure, found.failure.boundary) == (True, "reward")
    assert cause in found.failure.cause
    assert found.failure.cause.endswith("requests to the judge: 3")
    assert (found.reward, found.solved, len(endpoint.asked)) == (0.0, False, 3)
    # A moment later all is well.
    asked = len(endpoint.asked)
    endpoint.answer = lambda body: replies[0] if len(endpoint.asked) < asked + 3 else "Score: 10"
    again = judge(endpoint, retries=2)(TASK, "11")
    assert (again.failure, again.reward, again.solved) == (None, 1.0, True)


def test_tokens_of_answers_that_were_no_use_are_paid_for(endpoint: Endpoint) -> None:
    endpoint.answer = lambda body: "no" if len(endpoint.asked) < 3 else "Score: 0"
    found = judge(endpoint, retries=2, price_prompt=1.0)(TASK, "11")
    assert (found.failure, found.reward, found.judge_tokens) == (None, 0.0, 330)
    assert found.judge_cost == pytest.approx(300e-6)


def test_waits_double_with_jitter_and_heed_the_server_up_to_a_limit(endpoint: Endpoint) -> None:
    after = iter(["", "4.5", "3600", "Wed, 21 Oct 2026 07:28:00 GMT"])
    endpoint.answer = lambda body: (429, {"Retry-After": next(after)}, {}) if len(endpoint.asked) < 5 else "Score: 1"
    waits: list[float] = []
    assert judge(endpoint, waits, retries=4, retry_s=1.0)(TASK, "11").reward == 0.1
    assert waits == [0.75, 4.5, 10.0, 6.0]  # 1 x 0.75, what it asks for, the longest there is, 8 x 0.75


@pytest.mark.parametrize("status", [400, 401, 404, 307])
def test_what_will_not_change_is_not_asked_again(endpoint: Endpoint, status: int) -> None:
    endpoint.answer = lambda body: (status, {"Location": f"{endpoint.url}/elsewhere"}, {"error": "no such key"})
    found = judge(endpoint)(TASK, "11")
    assert found.failure is not None
    assert found.failure.infrastructure
    assert f"HTTP {status}" in found.failure.cause
    assert len(endpoint.asked) == 1  # a redirect isn't followed either


def test_a_request_that_hangs_is_given_up(endpoint: Endpoint) -> None:
    released = threading.Event()

    def answer(body: dict[str, Any]) -> str:
        released.wait(20)
        return "Score: 1"

    endpoint.answer = answer
    found = judge(endpoint, timeout_s=0.05, retries=1)(TASK, "11")
    released.set()
    assert found.failure is not None
    assert "can't be reached: TimeoutError: timed out; requests to the judge: 2" in found.failure.cause


def test_a_server_that_is_not_there_is_infrastructure(endpoint: Endpoint) -> None:
    gone = judge(endpoint)
    object.__setattr__(gone.chat, "url", "http://127.0.0.1:9/chat/completions")
    found = gone(TASK, "11")
    assert found.failure is not None
    assert found.failure.infrastructure


def test_so_many_at_once_and_no_more_in_their_order(endpoint: Endpoint) -> None:
    together = threading.Barrier(3)

    def answer(body: dict[str, Any]) -> str:
        together.wait(20)  # passes only when three are asked at once
        return f"Score: {body['messages'][0]['content'][-1]}"

    endpoint.answer = answer
    found = judge(endpoint, concurrency=3, prompt="{response}").score_all(TASK, [str(i) for i in range(9)])
    assert [verdict.reward for verdict in found] == [i / 10 for i in range(9)]
    assert endpoint.most_open == 3


def test_the_worker_scores_with_it_under_its_watchdog(endpoint: Endpoint) -> None:
    endpoint.answer = lambda body: "Score: 10" if body["messages"][0]["content"] == "7" else "hm"
    parameters = {"url": endpoint.url, "model": "m", "prompt": "{response}", "retries": 0}
    worker = VerifierService(None, verifier={"name": "judge", "parameters": parameters, "timeout_s": 100.0})
    good, bad = worker.score(TASK, ["7", "8"])
    assert (good.reward, good.solved, good.failure) == (1.0, True, None)
    assert good.verify_s > 0
    assert bad.failure is not None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "missing a required"),
        ({"url": "localhost", "model": "m"}, "url = 'localhost': String should match pattern '\\^https"),
        ({"url": 3, "model": "m"}, "url = 3: Input should be a valid string"),
        ({"url": "http://h", "model": ""}, "model = '': String should have at least 1 character"),
        ({"url": "http://h", "model": "m", "prompt": "Judge!"}, "doesn't contain {response}"),
        ({"url": "http://h", "model": "m", "api_key_env": "HEADWAY_NO_SUCH"}, "the environment has no HEADWAY_NO_SUCH"),
        (
            {"url": "http://h", "model": "m", "concurrency": 0},
            "concurrency = 0: Input should be greater than or equal to 1",
        ),
        ({"url": "http://h", "model": "m", "retries": -1}, "retries = -1: Input should be greater than or equal to 0"),
        ({"url": "http://h", "model": "m", "timeout_s": 0}, "timeout_s = 0: Input should be greater than 0"),
        ({"url": "http://h", "model": "m", "lowest": 5, "highest": 5}, "lowest below highest"),
        ({"url": "http://h", "model": "m", "pattern": "("}, "pattern = '\\(': "),
        ({"url": "http://h", "model": "m", "price_prompt": -1}, "price_prompt = -1"),
    ],
)
def test_bad_settings(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_verifier(VerifierSettings(name="judge", parameters=parameters, timeout_s=1000.0))


def test_a_worker_would_kill_a_judge_that_takes_longer_than_its_limit() -> None:
    parameters = {"url": "http://h", "model": "m", "timeout_s": 20, "retries": 2}
    with pytest.raises(ConfigurationError, match=r"verifier.timeout_s = 10 would kill 'judge' .* may take 80 s"):
        resolve_verifier(VerifierSettings(name="judge", parameters=parameters))
    resolve_verifier(VerifierSettings(name="judge", parameters=parameters, timeout_s=80.0))


# --- weighted sums ------------------------------------------------------------------------------------------


def turns(task: Task, response: str) -> dict[str, Any]:
    return {"turn_rewards": [1.0, float(response)], "solved": True}


def broken(task: Task, response: str) -> float:
    raise ConnectionError("the service is down")


def weighted(*parts: dict[str, Any], **parameters: Any) -> list[Verdict]:
    settings = VerifierSettings(name="weighted", parameters={"parts": list(parts), **parameters})
    return VerifierService(None, verifier=settings.model_dump()).score(TASK, ["7", "it is 7"])


EXACT = {"name": "exact", "weight": 0.8}
PATTERN = {"name": "regex", "parameters": {"pattern": "it is (.*)"}, "weight": 0.2, "label": "format"}


def test_a_weighted_sum() -> None:
    bare, formatted = weighted(EXACT, PATTERN)
    assert (bare.reward, bare.solved) == (0.8, True)
    assert (formatted.reward, formatted.solved) == (0.2, False)
    assert formatted.detail == {"exact": {"reward": 0.0}, "format": {"reward": 1.0}}
    assert weighted(EXACT, PATTERN, solved_by="format")[1].solved
    assert weighted({"name": "exact"}, {**EXACT, "label": "less", "weight": -0.5})[0].reward == 0.5


def test_a_part_that_fails_fails_the_sum() -> None:
    own = {"name": "tests.unit.rollout.test_verifiers_judge:broken", "label": "service"}
    for found in weighted(EXACT, own):
        assert found.failure is not None
        assert found.failure.infrastructure
        assert found.failure.cause == "service: the verifier raised ConnectionError: the service is down"
    task = msgspec.structs.replace(TASK, answer="seven")
    settings = VerifierSettings(name="weighted", parameters={"parts": [EXACT, {"name": "numeric"}]})
    [found] = VerifierService(None, verifier=settings.model_dump()).score(task, ["7"])
    assert found.failure is not None
    assert found.failure.cause.startswith("numeric: the verifier raised ValueError: task 0: its answer 'seven'")


def test_a_judge_may_be_a_part(endpoint: Endpoint) -> None:
    endpoint.answer = lambda body: "Score: 5"
    part = {"name": "judge", "parameters": {"url": endpoint.url, "model": "m", "retries": 0}, "weight": 0.5}
    parameters = {"parts": [EXACT, part]}
    limited = VerifierSettings(name="weighted", parameters=parameters, timeout_s=5.0)
    with pytest.raises(ConfigurationError, match=r"verifier.timeout_s = 5 would kill 'weighted' .* 30 s"):
        resolve_verifier(limited)
    settings = limited.model_copy(update={"timeout_s": 100.0})
    found = VerifierService(None, verifier=settings.model_dump()).score(TASK, ["7", "8"])
    assert [verdict.reward for verdict in found] == [0.8 + 0.25, 0.25]
    assert [verdict.judge_tokens for verdict in found] == [110, 110]
    assert found[0].detail["judge"] == {"score": 5.0, "reward": 0.5}


def test_rewards_by_turn_are_added_by_turn() -> None:
    own = {"name": "tests.unit.rollout.test_verifiers_judge:turns", "weight": 2.0}
    settings = VerifierSettings(name="weighted", parameters={"parts": [own, {**own, "label": "b", "weight": 1.0}]})
    [found] = VerifierService(None, verifier=settings.model_dump()).score(TASK, ["3"])
    assert (found.turn_rewards, found.reward) == ((3.0, 9.0), 12.0)
    [mixed, _] = weighted(own, EXACT)
    assert mixed.failure is not None
    assert (
        "rewards by turn can't be added: tests.unit.rollout.test_verifiers_judge:turns 2, exact 0"
        in mixed.failure.cause
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"parts = \[\]: a list of tables is needed"),
        ([{"weight": 1}], r"parts\[0\].name = {'weight': 1}: Field required; valid: name, parameters, weight, label"),
        ([{"name": "exact", "wieght": 1}], r"parts\[0\].wieght = 1: .*; valid: name, parameters, weight, label"),
        ([{"name": "exact", "weight": "1"}], r"parts\[0\].weight = '1': Input should be a valid number"),
        ([{"name": "exact"}, {"name": "exact"}], "give those of equal name a 'label' each"),
        ([{"name": "exact"}, {"name": "exat"}], r"parts\[1\].name = 'exat' is unknown; did you mean 'exact'"),
        ([{"name": "exact", "parameters": {"extract": "x"}}], r"parts\[0\].parameters.extract = 'x': valid"),
    ],
)
def test_bad_parts(parts: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_verifier(VerifierSettings(name="weighted", parameters={"parts": parts}))


# --- rewards by turn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reward", "turn_rewards"),
    [
        ({"turn_rewards": [0.5, 1.0]}, 1.5, (0.5, 1.0)),
        ({"turn_rewards": (0.5, 1), "reward": 1.0}, 1.0, (0.5, 1.0)),
        (Verdict(reward=2.0, solved=True, turn_rewards=(1.0, 1.0)), 2.0, (1.0, 1.0)),
        (0.5, 0.5, ()),
    ],
)
def test_turn_rewards_of_a_verdict(given: Any, reward: float, turn_rewards: tuple[float, ...]) -> None:
    found = to_verdict(given)
    assert (found.reward, found.turn_rewards, found.failure) == (reward, turn_rewards, None)


@pytest.mark.parametrize("given", ["1, 2", [1.0, None], [float("nan")], 3])
def test_turn_rewards_that_are_none(given: Any) -> None:
    failure = to_verdict({"turn_rewards": given}).failure
    assert failure is not None
    assert "turn_rewards are" in failure.cause


def test_a_verdict_enters_its_rollout() -> None:
    two = Rollout(group=0, member=0, prompt_ids=(1,), response_ids=(1, 2, 3), turn_ends=(1, 3))
    found = apply_verdict(two, to_verdict({"turn_rewards": [0.5, 1.0], "compiled": True}), 9.0)
    assert (found.turn_rewards, found.turn_ends, found.reward) == ((0.5, 1.0), (1, 3), 1.5)
    assert found.verdict == {"compiled": True}
    wrong = apply_verdict(two, to_verdict({"turn_rewards": [0.5]}), 9.0)
    assert wrong.failure == Failure(
        boundary="reward", cause="the verifier gave rewards of 1 turns to a response of 2", infrastructure=False
    )
    one = apply_verdict(msgspec.structs.replace(two, turn_ends=()), to_verdict({"turn_rewards": [0.5]}), 9.0)
    assert (one.turn_ends, one.turn_rewards) == ((3,), (0.5,))
    # A rollout with rewards of its own: the verifier's comes at the end.
    own = apply_verdict(msgspec.structs.replace(two, turn_rewards=(0.1, 0.2)), to_verdict(1.0), 9.0)
    assert (own.turn_rewards, own.reward) == ((0.1, 1.2), 1.0)


def test_certificates_are_read_once_for_all_requests(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes twenty times as long as a request."""
    read: list[int] = []
    made = ssl.create_default_context

    def reading() -> ssl.SSLContext:
        read.append(1)
        return made()

    machine_certificates.cache_clear()
    monkeypatch.setattr(ssl, "create_default_context", reading)
    for _ in range(3):
        judge(endpoint)(TASK, "7")
    assert len(endpoint.asked) == 3
    assert len(read) == 1
