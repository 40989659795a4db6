"""`[environment.models.NAME]`: models that aren't trained, for environments to call."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

from headway.config.section import Positive, Seconds, Section, require_http


class ExternalModelConfig(Section):
    """A model behind an OpenAI-compatible endpoint."""

    address: Annotated[str, AfterValidator(require_http)]  # the endpoint's base: https://api.openai.com/v1
    model: str  # the model's name at the endpoint
    api_key_env: str = ""  # the environment variable that holds the API key
    body: dict[str, Any] = {}  # further keys of every request: temperature, max_tokens, ...
    concurrency: Positive = 32  # requests at once from each worker
    timeout_s: Seconds = 60.0  # time limit of one request
