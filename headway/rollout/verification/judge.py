"""A language model that judges responses (rollout/chat_model.py), asked from a bounded number of threads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.chat_model import ChatModel, ModelFailed, Retry, Spent, quoted
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
DEFAULT_PATTERN = r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
_PLACE = re.compile(r"\{(prompt|answer|response|lowest|highest)\}")


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Scores by asking a model; the score, within ``lowest`` and ``highest``, becomes a reward from 0 to 1.

    An answer without a score, or one out of range, is tried again as what fails is (`ChatModel`). What is left then is
    a failure of infrastructure, never a reward.
    """

    chat: ChatModel
    prompt: str
    system: str  # "": none
    pattern: re.Pattern[str]  # its first group, or all of its last match, is the score
    lowest: float
    highest: float
    solved_at: float  # reward from which the task counts as solved
    concurrency: int  # requests at once
    price_prompt: float  # of a million tokens
    price_completion: float

    @property
    def longest_s(self) -> float:
        """The longest it takes over one response."""
        return self.chat.longest_s

    def __call__(self, task: Task, response: str) -> Verdict:
        spent = Spent()
        try:
            return self._verdict(self.chat.ask(self._messages(task, response), self._score, spent), spent)
        except ModelFailed as error:
            return self._verdict(None, spent, Failure(boundary="reward", cause=str(error), infrastructure=True))

    def score_all(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Verdicts, one per response, in order; up to ``concurrency`` are asked for at once."""
        if len(responses) == 1:
            return [self(task, responses[0])]
        with ThreadPoolExecutor(min(self.concurrency, max(1, len(responses))), "judge") as threads:
            return list(threads.map(lambda response: self(task, response), responses))

    def _verdict(self, score: float | None, spent: Spent, failure: Failure | None = None) -> Verdict:
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
        found = last_match(self.pattern, text)
        if found is None:
            raise Retry(f"the judge's answer holds no score: {quoted(text)}")
        written = found.group(1) if self.pattern.groups else found.group()
        try:
            score = float(written)
        except (TypeError, ValueError):
            raise Retry(f"the judge's score is {written!r}, not a number") from None
        if not self.lowest <= score <= self.highest:
            raise Retry(f"the judge's score is {written}: valid are {self.lowest:g} to {self.highest:g}")
        return score

    def _messages(self, task: Task, response: str) -> list[dict[str, str]]:
        values = {"prompt": task.prompt, "answer": task.answer, "response": response,
                  "lowest": f"{self.lowest:g}", "highest": f"{self.highest:g}"}  # fmt: skip
        # All places at once: a response that says {answer} is not told it.
        prompt = _PLACE.sub(lambda place: values[place.group(1)], self.prompt)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": prompt}]
