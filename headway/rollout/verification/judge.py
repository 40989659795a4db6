"""A verifier that asks a language model for scores (rollout/chat_model.py), from a bounded number of threads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from headway.config.external_models import RequestLimits
from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.chat_model import ChatModel, ModelFailed, RequestCosts, Retry, api_key, completions_url, quoted
from headway.rollout.parameters import NonNegativeNumber
from headway.rollout.verification.extraction import last_match

DEFAULT_PROMPT = """\
Judge a response to a task.

Task:
{prompt}

Reference answer (may be empty):
{answer}

Response:
{response}

Explain briefly, then end with a line "Score: N", N a number from {lowest} (worst) to {highest} (best)."""
DEFAULT_PATTERN = re.compile(r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)")
_PLACE = re.compile(r"\{(prompt|answer|response|lowest|highest)\}")


class Judge(RequestLimits):
    """A language model's score, within ``lowest`` and ``highest``, as a reward from 0 to 1.

    An answer without a score, or with one out of range, is retried like a failed request (`ChatModel`). If no attempt
    succeeds, that is an infrastructure failure, never a reward. The fields are the verifier's parameters.
    """

    model_config = ConfigDict(strict=True)

    url: Annotated[str, Field(pattern="^https?://")]  # the endpoint's base, say https://api.openai.com/v1
    model: Annotated[str, Field(min_length=1)]
    api_key_env: str = ""  # the environment variable that holds its key
    prompt: str = DEFAULT_PROMPT  # may say {prompt}, {answer}, {response}, {lowest} and {highest}
    system: str = ""  # message before it; "": none
    pattern: re.Pattern[str] = DEFAULT_PATTERN  # its first group, or all of its last match, is the score
    lowest: float = 0.0
    highest: float = 10.0
    solved_at: NonNegativeNumber = 1.0  # reward from which the task counts as solved
    price_completion: NonNegativeNumber = 0.0  # of a million tokens
    body: dict[str, Any] = Field(default_factory=dict)  # of the request: {temperature = 0, max_tokens = 512}

    @field_validator("pattern", mode="before")
    @classmethod
    def _compiled(cls, value: Any) -> Any:
        try:
            return re.compile(value)
        except (re.error, TypeError) as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Judge:
        if "{response}" not in self.prompt:
            raise ValueError("the prompt doesn't contain {response}: the judge wouldn't see it")
        if not self.lowest < self.highest:
            raise ValueError(f"lowest = {self.lowest}, highest = {self.highest}: valid: lowest below highest")
        return self

    @cached_property
    def chat(self) -> ChatModel:
        """The model. Raises ConfigurationError where its key isn't set."""
        return ChatModel(
            url=completions_url(self.url),
            model=self.model,
            key=api_key(self.api_key_env, "verifier.parameters.api_key_env"),
            called="the judge",
            timeout_s=self.timeout_s,
            retries=self.retries,
            retry_s=self.retry_s,
            body=self.body,
        )

    @property
    def longest_s(self) -> float:
        """The longest time of one response."""
        return self.chat.longest_s

    def __call__(self, task: Task, response: str) -> Verdict:
        costs = RequestCosts()
        try:
            return self._verdict(self.chat.ask(self._messages(task, response), self._score, costs), costs)
        except ModelFailed as error:
            return self._verdict(None, costs, Failure(boundary="reward", cause=str(error), infrastructure=True))

    def score_all(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Return one verdict per response, in order; up to ``concurrency`` are requested at once."""
        if len(responses) == 1:
            return [self(task, responses[0])]
        with ThreadPoolExecutor(min(self.concurrency, max(1, len(responses))), "judge") as executor:
            return list(executor.map(lambda response: self(task, response), responses))

    def _verdict(self, score: float | None, spent: RequestCosts, failure: Failure | None = None) -> Verdict:
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

    def _score(self, text: str) -> float:
        """The score in a judge's answer. Raises Retry where there is none, or it is out of range."""
        match = last_match(self.pattern, text)
        if match is None:
            raise Retry(f"the judge's answer holds no score: {quoted(text)}")
        score_text = match.group(1) if self.pattern.groups else match.group()
        try:
            score = float(score_text)
        except (TypeError, ValueError):
            raise Retry(f"the judge's score is {score_text!r}, not a number") from None
        if not self.lowest <= score <= self.highest:
            raise Retry(f"the judge's score is {score_text}: valid: {self.lowest:g} to {self.highest:g}")
        return score

    def _messages(self, task: Task, response: str) -> list[dict[str, str]]:
        text_by_field = {"prompt": task.prompt, "answer": task.answer, "response": response,
                  "lowest": f"{self.lowest:g}", "highest": f"{self.highest:g}"}  # fmt: skip
        # All fields at once: an {answer} in the response isn't filled in.
        prompt = _PLACE.sub(lambda match: text_by_field[match.group(1)], self.prompt)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": prompt}]
