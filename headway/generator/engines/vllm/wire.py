"""Response format of `vllm serve` at ``/inference/v1/generate``: the fields that are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[Logprob] | None = None


class CompletionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[CompletionSpan] | None = None


class Error(msgspec.Struct):
    message: str = ""


class Chunk(msgspec.Struct):
    choices: list[CompletionChoice] = []
    error: Error | None = None


class CompletionChunk(msgspec.Struct):
    """Response to a probe: whole, with log-probabilities of the prompt."""

    choices: list[CompletionChoice]
    prompt_logprobs: list[dict[str, dict[str, Any]] | None]


def content(choice: CompletionChoice) -> list[Logprob]:
    return (choice.logprobs.content or []) if choice.logprobs is not None else []


def of_token(logprobs: Mapping[str, Mapping[str, Any]] | None, token: int) -> float:
    return float(logprobs[str(token)]["logprob"]) if logprobs else float("nan")
