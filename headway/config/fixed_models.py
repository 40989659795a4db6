"""`[environment.models.NAME]`: models that aren't trained, for environments to call."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from headway.config.section import NonNegative, Positive, Seconds, Section, require_http


class FixedModelConfig(Section):
    """A model behind an OpenAI-compatible endpoint."""

    address: Annotated[str, AfterValidator(require_http)]  # the endpoint's base: https://api.openai.com/v1
    model: str  # its name at the endpoint
    api_key_env: str = ""  # the environment variable that holds the API key
    temperature: Annotated[float, Field(ge=0)] | None = None  # unset: the server's own
    max_tokens: Positive | None = None  # of an answer
    body: dict[str, Any] = {}  # further keys of every request
    concurrency: Positive = 32  # requests at once from each worker
    timeout_s: Seconds = 60.0  # of one request
    retries: NonNegative = 2  # of a request that is refused, times out, or has no answer
    retry_s: Seconds = 1.0  # delay before the first retry; doubled each time
