"""Models that aren't trained: `[environment.models.NAME]`, for environments to call, the requests of judges, and
`[teachers.NAME]`, whose distributions the policy learns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from headway.config.section import NonNegative, Positive, ReplicaDevices, Seconds, Section, require_http

SELF = "self"  # in the place of a folder: the weights at the start of a step
MOST_SERVED = 20  # likeliest tokens that servers return by default
_FIELD = re.compile(r"\{(\w+)\}")


class RequestLimits(Section):
    """Limits, retries and price of requests to a model that judges or teaches."""

    concurrency: Positive = 8  # requests at once, from each process
    timeout_s: Seconds = 30.0  # of one request
    retries: NonNegative = 2
    retry_s: Annotated[float, Field(ge=0)] = 1.0  # wait before the first retry, doubled for the next
    price_prompt: Annotated[float, Field(ge=0)] = 0.0  # of a million tokens


class ExternalModelConfig(Section):
    """A model behind an OpenAI-compatible endpoint."""

    address: Annotated[str, AfterValidator(require_http)]  # the endpoint's base: https://api.openai.com/v1
    model: str  # the model's name at the endpoint
    api_key_env: str = ""  # the environment variable that holds the API key
    body: dict[str, Any] = {}  # further keys of every request: temperature, max_tokens, ...
    concurrency: Positive = 32  # requests at once from each worker
    timeout_s: Seconds = 60.0  # time limit of one request


class TeacherServer(RequestLimits):
    """A server that returns log-probabilities of given ids: vLLM's, SGLang's, or `headway serve`."""

    url: Annotated[str, AfterValidator(require_http)]  # without /v1
    model: str = ""  # its name there; "": the only one that is served
    api_key_env: str = ""  # the environment variable that holds the API key
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # of one request
    max_cost: Annotated[float, Field(gt=0)] | None = None  # at which this process asks no more


def _server_table(value: Any) -> Any:
    """Convert an address to the table that it is short for, and check it."""
    table = cast("Any", {"url": value} if isinstance(value, str) and value else value or {})
    if not table:
        return {}
    try:
        return TeacherServer.model_validate(table).model_dump(exclude_unset=True)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{path}: {fault['msg'].removeprefix('Value error, ')}" if path else fault["msg"]) from None


class TeacherConfig(Section):
    """A teacher, which a source's rule names by ``algorithm.teacher``: docs/objectives.md."""

    path: str  # the teacher's folder (with address: of its configuration and tokenizer); "self": the policy itself
    devices: ReplicaDevices = ()  # a replica that only scores for each; default: in the trainer, as its reference is
    address: Annotated[dict[str, Any], BeforeValidator(_server_table)] = {}  # http://HOST:PORT, or a table with its url
    # Tune: "sampled" where only a teacher's log-probabilities of sampled tokens are cheap; else it learns less a token
    divergence: Literal["forward", "reverse", "jensen_shannon", "sampled"] = "reverse"  # trainer/streams/divergence.py
    # Tune: 20 to 100 to compare less than the vocabulary: little is lost, and replicas and servers send less
    top_k: Positive | None = None  # likeliest tokens that are compared, the rest as one; default: all, in the trainer
    context: str = ""  # text that the teacher reads as the prompt, with {prompt}, {answer} or {COLUMN}; "": the prompt

    @property
    def server(self) -> TeacherServer | None:
        """The server at ``address``."""
        return TeacherServer.model_validate(self.address) if self.address else None

    @property
    def scores(self) -> bool:
        """Whether it scores rollouts as they finish; else it computes in the trainer."""
        return bool(self.devices or self.address)

    @property
    def at_once(self) -> int:
        """Rollouts that it scores at once, outside of the trainer: one a replica, or a server's requests."""
        return len(self.devices) or (self.server.concurrency if self.server else 0)

    @property
    def samples(self) -> bool:
        """Whether it is learned by the reverse KL of sampled tokens, in the policy's advantages."""
        return self.divergence == "sampled"

    @field_validator("devices")
    @classmethod
    def _require_devices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(name.startswith(("http://", "https://")) for name in value):
            raise ValueError("a server's address: set teachers.NAME.address")
        return value

    @model_validator(mode="after")
    def _require_possible(self) -> TeacherConfig:
        if self.devices and self.address:
            raise ValueError(
                f"devices = {list(self.devices)} with address: a teacher computes in one place; valid: one"
            )
        if self.path == SELF and self.scores:
            keys = f"devices = {list(self.devices)}" if self.devices else f"address = {self.address['url']!r}"
            raise ValueError(f"path = 'self' with {keys}: weights at the start of a step are in the trainer alone")
        if self.samples and self.top_k is not None:
            raise ValueError(f"top_k = {self.top_k} with divergence = 'sampled', which compares sampled tokens alone")
        if self.scores and not self.samples and self.top_k is None:
            raise ValueError(f"divergence = {self.divergence!r} outside of the trainer needs top_k; valid: 1 or more")
        if self.address and (self.top_k or 0) > MOST_SERVED:
            raise ValueError(f"top_k = {self.top_k} by address; valid: 1 to {MOST_SERVED}, which servers return")
        return self

    def context_of(self, prompt: str, answer: str, columns: Mapping[str, Any]) -> str:
        """The text that the teacher reads as the prompt of a task. Raises ValueError for a column that the task
        lacks."""
        fields = {**columns, "prompt": prompt, "answer": answer}

        def filled(match: re.Match[str]) -> str:
            if match[1] not in fields:
                raise ValueError(f"context has {{{match[1]}}}, which the task lacks; valid: {', '.join(fields)}")
            return str(fields[match[1]])

        return _FIELD.sub(filled, self.context)
