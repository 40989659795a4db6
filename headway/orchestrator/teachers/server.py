"""A teacher behind an address: a server of vLLM or SGLang, or `headway serve`, asked and answered by ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.teacher_scores import score_fault
from headway.config.external_models import TeacherServer
from headway.generator.engines.vllm.wire import score_of
from headway.records.errors import ConfigurationError
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from headway.rollout.chat_model import ModelEndpoint, ModelFailed, RequestCosts, Retry, api_key
from headway.rollout.single_thread_executor import SingleThreadExecutor

Entry = tuple[float, Sequence[tuple[int, float]]]  # log-probability of a token, and the likeliest ids with theirs


class ServedTeacher:
    """Scores given ids by a server, in a bounded number of threads.

    Lifecycle: `start` (which model it is, and which server's format it answers in) -> `score` ... -> `close`.
    """

    def __init__(self, name: str, settings: TeacherServer) -> None:
        """Raises ConfigurationError if the API key's environment variable isn't set."""
        self.called, self._settings = f"teacher {name}", settings
        self._key = api_key(settings.api_key_env, f"teachers.{name}.address.api_key_env")
        self._permits = asyncio.Semaphore(settings.concurrency)
        self._dialect: _Dialect = _headway
        self._model = settings.model
        self.read_tokens = 0  # of all requests of this process, failed ones too

    @property
    def cost(self) -> float:
        """The cost of ``read_tokens``, in the currency of the price."""
        return self.read_tokens * self._settings.price_prompt / 1e6

    async def start(self) -> str:
        """Ask which model is served; returns its name. Raises ConfigurationError for a server that doesn't answer, has
        another model than ``model`` names, or several if it names none."""
        try:
            entries = await self._call("/v1/models", None, _models)
        except ModelFailed as error:
            raise ConfigurationError(f"{self.called}: {error}") from None
        names = [str(entry.get("id")) for entry in entries]
        if self._model not in names and (self._model or len(names) != 1):
            raise ConfigurationError(f"{self.called}: model = {self._model!r}; served: {', '.join(names) or 'none'}")
        entry = entries[names.index(self._model) if self._model else 0]
        self._model, owner = str(entry["id"]), str(entry.get("owned_by"))
        if owner not in _DIALECTS:
            valid = ", ".join(_DIALECTS)
            raise ConfigurationError(f"{self.called}: a server of {owner!r}, whose format isn't known; valid: {valid}")
        self._dialect = _DIALECTS[owner]
        return f"{owner}:{self._model}:{entry.get('root', '')}"

    async def score(self, ids: TokenIds, scored: NDArray[np.bool_], top: int) -> tuple[PromptLogprobs, int]:
        """The scores of ``ids`` with the ``top`` likeliest tokens in each one's place, valid where ``scored``, and the
        tokens that were read, retries included. Raises ModelFailed."""
        limit, spent = self._settings.max_cost, RequestCosts()
        if limit is not None and self.cost >= limit:
            raise ModelFailed(f"{self.called}: its cost of {self.cost:.4g} has reached address.max_cost = {limit:g}")
        path, body, read = self._dialect(self._model, ids.array.tolist(), top)

        def checked(answer: object) -> PromptLogprobs:
            try:
                scores = _scores(read(cast("Any", answer)), ids, top)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise Retry(f"{self.called}'s answer can't be read: {type(error).__name__}: {error}") from None
            if reason := score_fault(scores, ids.array, scored, top):
                raise Retry(f"{self.called} answered {reason}")
            return scores

        try:
            return await self._call(path, body, checked, spent), spent.attempts * len(ids)
        finally:
            self.read_tokens += spent.attempts * len(ids)

    async def _call(
        self, path: str, body: dict[str, Any] | None, read: Callable[[object], Any], spent: RequestCosts | None = None
    ) -> Any:
        settings = self._settings
        endpoint = ModelEndpoint(
            url=settings.url.rstrip("/").removesuffix("/v1") + path,
            key=self._key,
            called=self.called,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            retry_s=settings.retry_s,
        )
        async with self._permits:
            executor = SingleThreadExecutor(self.called)  # whose thread doesn't hold up the end of the process
            try:
                return await executor.run(endpoint.call, body, read, spent or RequestCosts())
            finally:
                executor.end()

    async def close(self) -> None:
        """Nothing is open."""


def _models(answer: object) -> list[dict[str, Any]]:
    entries = cast("Any", answer).get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise Retry("it doesn't list its models")
    return cast("list[dict[str, Any]]", entries)


def _scores(entries: Sequence[Entry | None], ids: TokenIds, top: int) -> PromptLogprobs:
    """Scores of ``ids`` from an entry for each; None: it has none. Raises ValueError for a wrong number of entries."""
    scores = PromptLogprobs.unscored(0, len(ids), top)
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} tokens where {len(ids)} were asked for")
    for position, entry in enumerate(entries):
        if entry is not None:
            scores.fill(position, *entry)
    return scores


Read = Callable[[Any], Sequence[Entry | None]]
_Dialect = Callable[[str, list[int], int], tuple[str, dict[str, Any], Read]]  # path, body and the answer's reader


def _require_ids(answered: Sequence[Any], ids: Sequence[int]) -> None:
    """Raise ValueError where the server answered for other tokens, or in another order."""
    for position, (token, expected) in enumerate(zip(answered, ids, strict=True)):
        if token != expected:
            raise ValueError(f"token {position} is {token} where {expected} was asked for")


def _headway(model: str, ids: list[int], top: int) -> tuple[str, dict[str, Any], Read]:
    def read(answer: Any) -> Sequence[Entry | None]:
        scored = answer["choices"][0]["logprobs"]
        _require_ids(scored["token_ids"], ids)
        nothing = [[]] * len(ids)
        likeliest = zip(scored["top_ids"] or nothing, scored["top_id_logprobs"] or nothing, strict=True)
        entries = zip(scored["token_logprobs"], likeliest, strict=True)
        return [
            None if logprob is None else (logprob, list(zip(row_ids, row_logprobs, strict=True)))
            for logprob, (row_ids, row_logprobs) in entries
        ]

    body = {"model": model, "prompt": ids, "echo": True, "logprobs": top, "max_tokens": 0}
    return "/v1/completions", body, read


def _vllm(model: str, ids: list[int], top: int) -> tuple[str, dict[str, Any], Read]:
    def read(answer: Any) -> Sequence[Entry | None]:
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != len(ids):
            raise ValueError(f"{len(rows)} tokens where {len(ids)} were asked for")
        return [None if row is None else score_of(row, token, top) for row, token in zip(rows, ids, strict=True)]

    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
    return "/v1/completions", body, read


def _sglang(model: str, ids: list[int], top: int) -> tuple[str, dict[str, Any], Read]:
    def read(answer: Any) -> Sequence[Entry | None]:
        meta = answer["meta_info"]
        rows, top_rows = meta["input_token_logprobs"], meta.get("input_top_logprobs") or [None] * len(ids)
        _require_ids([row[1] for row in rows], ids)
        return [
            None if row[0] is None else (row[0], [(likely[1], likely[0]) for likely in top_row or ()])
            for row, top_row in zip(rows, top_rows, strict=True)
        ]

    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return "/generate", body | {"top_logprobs_num": top}, read


_DIALECTS: dict[str, _Dialect] = {"headway": _headway, "vllm": _vllm, "sglang": _sglang}
