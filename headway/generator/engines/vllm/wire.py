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
    """Response for given tokens: whole, with log-probabilities of the prompt."""

    choices: list[CompletionChoice]
    prompt_logprobs: list[dict[str, dict[str, Any]] | None]


def content(choice: CompletionChoice) -> list[Logprob]:
    return (choice.logprobs.content or []) if choice.logprobs is not None else []


def score_of(row: Mapping[str, Mapping[str, Any]], token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log-probability of a prompt's ``token``, and the ``top`` likeliest ids with theirs, of its entry in
    ``prompt_logprobs``. Raises ValueError for another token's entry."""
    if str(token) not in row:
        raise ValueError(f"no log-probability of {token}, which was asked for")
    # The token itself may be behind the likeliest.
    ranked = sorted((entry["rank"], int(name), float(entry["logprob"])) for name, entry in row.items()) if top else []
    return float(row[str(token)]["logprob"]), [(name, logprob) for rank, name, logprob in ranked if rank <= top]
