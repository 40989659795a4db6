"""External models that an environment asks and that aren't trained: `environment.models`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from headway.config.external_models import ExternalModelConfig
from headway.records.errors import ConfigurationError
from headway.rollout.chat_model import ChatModel, RequestCosts, api_key, completions_url
from headway.rollout.single_thread_executor import SingleThreadExecutor

KEY = "environment.models"
_RETRIES = 2  # of a request that is refused, times out, or has no answer
_RETRY_S = 1.0  # before the first of them; doubled each time


class ExternalModels:
    """The external models of a worker, by name."""

    def __init__(self, settings: Mapping[str, ExternalModelConfig]) -> None:
        """Raises ConfigurationError where an API key's environment variable isn't set."""
        self._models = {name: _model(name, model) for name, model in settings.items()}
        self._permits = {name: asyncio.Semaphore(model.concurrency) for name, model in settings.items()}

    async def ask(self, name: str, messages: Sequence[Mapping[str, Any]], **body: Any) -> str:
        """Return the answer's text. Raises ModelFailed where there is none, LookupError for an unknown model."""
        if name not in self._models:
            raise LookupError(f"there is no [{KEY}.{name}]; valid: {', '.join(self._models) or 'none'}")
        async with self._permits[name]:
            executor = SingleThreadExecutor(f"ask-{name}")
            try:
                return await executor.run(self._models[name].ask, messages, str, RequestCosts(), **body)
            finally:
                executor.end()


def require_models(settings: Mapping[str, ExternalModelConfig], required: Sequence[str], timeout_s: float) -> None:
    """Raise ConfigurationError where a ``required`` model isn't configured or has no key, or where a model may take
    longer than its environment has (``timeout_s``)."""
    for name in required:
        if name not in settings:
            raise ConfigurationError(
                f"{KEY}: this environment uses the model {name!r}; valid: {', '.join(settings) or 'none'}"
            )
    for name, model in settings.items():
        longest_s = _model(name, model).longest_s
        if longest_s >= timeout_s:
            raise ConfigurationError(
                f"{KEY}.{name}: a question may take {longest_s:g} s with all its retries, and an environment's reply "
                f"{timeout_s:g} s (environment.timeout_s)"
            )


def _model(name: str, settings: ExternalModelConfig) -> ChatModel:
    return ChatModel(
        url=completions_url(settings.address),
        model=settings.model,
        key=api_key(settings.api_key_env, f"{KEY}.{name}.api_key_env"),
        called=f"the model {name}",
        timeout_s=settings.timeout_s,
        retries=_RETRIES,
        retry_s=_RETRY_S,
        body=settings.body,
    )
