"""A language model that judges responses, behind any endpoint that speaks OpenAI's chat completions.

Only the standard library: one POST per judgement, from a bounded number of threads. A redirect is not followed, so that
the key goes nowhere else.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.extraction import last_match

DEFAULT_PROMPT = """\
Judge a response to a task.

Task:
{prompt}

Reference answer (may be empty):
{answer}

Response:
{response}

Explain briefly, then end with a line "Score: N", N a number from {lowest} (worst) to {highest} (best)."""
DEFAULT_PATTERN = r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
LONGEST_WAIT_S = 10.0  # before a retry, whatever the server asks for
_LONGEST_QUOTE = 160  # characters of an answer in an error
_PLACE = re.compile(r"\{(prompt|answer|response|lowest|highest)\}")
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # HTTP: overloaded, or a moment too early


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass
class _Spent:
    """What judging one response took so far."""

    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Retry(Exception):
    """Another try may do: ``wait_s`` is what the server asked for."""

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


class _Hopeless(Exception):
    """Another try would end the same way."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Scores by asking a model; the score, within ``lowest`` and ``highest``, becomes a reward from 0 to 1.

    An answer without a score, one out of range, a refusal, a timeout, an overloaded or broken server: each is tried
    again ``retries`` times, with waits that double from ``retry_s``, half of each at random so that those who failed
    together don't come back together. What is left then is a failure of infrastructure, never a reward.
    """

    url: str  # .../chat/completions
    model: str
    key: str = field(default="", repr=False)
    prompt: str = DEFAULT_PROMPT
    system: str = ""
    pattern: re.Pattern[str]  # its first group, or all of its last match, is the score
    lowest: float = 0.0
    highest: float = 10.0
    solved_at: float = 1.0  # reward from which the task counts as solved
    concurrency: int = 8  # requests at once
    timeout_s: float = 30.0  # of one request
    retries: int = 2
    retry_s: float = 1.0
    price_prompt: float = 0.0  # of a million tokens
    price_completion: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further keys of the request
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random

    @property
    def longest_s(self) -> float:
        """The longest it takes over one response: all requests time out, all waits are the longest."""
        return (self.retries + 1) * self.timeout_s + self.retries * LONGEST_WAIT_S

    def __call__(self, task: Task, response: str) -> Verdict:
        spent, cause = _Spent(), ""
        for attempt in range(self.retries + 1):
            try:
                return self._verdict(self._score(task, response, spent), spent)
            except _Retry as error:
                cause = str(error)
                if attempt < self.retries:
                    backoff_s = self.retry_s * 2**attempt * (0.5 + 0.5 * self.draw())
                    self.sleep(min(max(backoff_s, error.wait_s), LONGEST_WAIT_S))
            except _Hopeless as error:
                cause = str(error)
                break
        failure = Failure(
            boundary="reward", cause=f"{cause}; requests to the judge: {spent.attempts}", infrastructure=True
        )
        return self._verdict(None, spent, failure)

    def score_all(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """One Verdict per response, in order, up to ``concurrency`` asked for at once."""
        if len(responses) == 1:
            return [self(task, responses[0])]
        with ThreadPoolExecutor(min(self.concurrency, max(1, len(responses))), "judge") as threads:
            return list(threads.map(lambda response: self(task, response), responses))

    def _verdict(self, score: float | None, spent: _Spent, failure: Failure | None = None) -> Verdict:
        reward = 0.0 if score is None else (score - self.lowest) / (self.highest - self.lowest)
        cost = spent.prompt_tokens * self.price_prompt + spent.completion_tokens * self.price_completion
        return Verdict(
            reward=reward,
            solved=score is not None and reward >= self.solved_at,
            detail={} if score is None else {"score": score},
            judge_tokens=spent.prompt_tokens + spent.completion_tokens,
            judge_cost=cost / 1e6,
            failure=failure,
        )

    def _score(self, task: Task, response: str, spent: _Spent) -> float:
        """One request. Raises _Retry or _Hopeless."""
        spent.attempts += 1
        answer = self._post(self._request(task, response))
        text = _text_of(answer, spent)
        found = last_match(self.pattern, text)
        if found is None:
            raise _Retry(f"the judge's answer holds no score: {_quoted(text)}")
        written = found.group(1) if self.pattern.groups else found.group()
        try:
            score = float(written)
        except (TypeError, ValueError):
            raise _Retry(f"the judge's score is {written!r}, not a number") from None
        if not self.lowest <= score <= self.highest:
            raise _Retry(f"the judge's score is {written}: valid are {self.lowest:g} to {self.highest:g}")
        return score

    def _request(self, task: Task, response: str) -> dict[str, Any]:
        values = {"prompt": task.prompt, "answer": task.answer, "response": response,
                  "lowest": f"{self.lowest:g}", "highest": f"{self.highest:g}"}  # fmt: skip
        # All places at once: a response that says {answer} is not told it.
        prompt = _PLACE.sub(lambda place: values[place.group(1)], self.prompt)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*messages, {"role": "user", "content": prompt}], **self.body}

    def _post(self, body: dict[str, Any]) -> object:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s) as reply:
                data: bytes = reply.read()
        except urllib.error.HTTPError as error:
            raise _refused(error) from None
        except (OSError, http.client.HTTPException) as error:  # no connection, a timeout, a reply cut off
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise _Retry(f"the judge at {self.url} can't be reached: {type(error).__name__}: {reason}") from None
        try:
            return json.loads(data)
        except ValueError:
            raise _Retry(f"the judge's reply is no JSON: {_quoted(data.decode(errors='replace'))}") from None


def _refused(error: urllib.error.HTTPError) -> Exception:
    with error:
        said = _quoted(error.read(4 * _LONGEST_QUOTE).decode(errors="replace"))
    cause = f"the judge answered HTTP {error.code}: {said}"
    if error.code not in _RETRIED:
        return _Hopeless(cause)
    try:
        wait_s = max(0.0, float(error.headers.get("Retry-After", "0")))
    except ValueError:  # a date
        wait_s = 0.0
    return _Retry(cause, wait_s)


def _text_of(answer: object, spent: _Spent) -> str:
    """The text of a chat completion; its tokens are added to ``spent`` whatever it says. Raises _Retry."""
    fields = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    usage = fields.get("usage")
    if isinstance(usage, dict):
        counts = cast("dict[str, Any]", usage)
        spent.prompt_tokens += _count(counts.get("prompt_tokens"))
        spent.completion_tokens += _count(counts.get("completion_tokens"))
    try:
        text = fields["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise _Retry(f"the judge's reply is no chat completion: {_quoted(json.dumps(answer))}")
    return text


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _quoted(text: str) -> str:
    plain = " ".join(text.split())
    return repr(plain if len(plain) <= _LONGEST_QUOTE else plain[: _LONGEST_QUOTE - 3] + "...")
