"""The fields of a request's body, read by type; what is wrong is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.generator.recording.recorder import Request
from headway.records.conversations import ClientSampling, RequestRefused

_MOST_STOPS = 64
_LONGEST_STOP = 1024  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request of any of the APIs in one form."""

    request: Request
    client: ClientSampling
    stream: bool
    include_usage: bool = False  # in a stream of OpenAI's
    logprobs: bool = False
    body: Mapping[str, Any]  # as it came


class Fields:
    """A request's body."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def get(self, name: str) -> Any:
        return self.body.get(name)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high]; None where it isn't given."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _refused(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refused(name, value, f"an integer from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise _refused(name, value, "true or false")
        return bool(value)

    def stop(self, name: str = "stop") -> tuple[str, ...]:
        """Strings that end an answer: one, or a list."""
        value = self.body.get(name)
        given = [value] if isinstance(value, str) else value or []
        if not isinstance(given, list) or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in given):
            raise _refused(name, value, f"a text, or a list of texts, of 1 to {_LONGEST_STOP} characters")
        if len(given) > _MOST_STOPS:
            raise RequestRefused(f"{name}: {len(given)} texts, at most {_MOST_STOPS} are valid", param=name)
        return tuple(given)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.body.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise _refused(name, value, "an object")
        return value or {}

    def only(self, name: str, *valid: Any, why: str) -> None:
        """Refuse any value but these, and none."""
        value = self.body.get(name)
        if value is not None and not any(type(value) is type(known) and value == known for known in valid):
            raise RequestRefused(f"{name} = {_shown(value)}: {why}", param=name)

    def listed(self, name: str, most: int) -> None:
        """Refuse lists of more entries than ``most``."""
        value = self.body.get(name)
        if isinstance(value, list) and len(value) > most:
            raise RequestRefused(f"{name}: {len(value)} entries, at most {most} are valid", param=name)


def _refused(name: str, value: Any, valid: str) -> RequestRefused:
    return RequestRefused(f"{name} = {_shown(value)}: valid is {valid}", param=name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def client_sampling(fields: Fields, *, fixed: bool) -> ClientSampling:
    """How the client wants its answers sampled. What no engine here can do is refused, unless the experiment's
    parameters hold in any case (``fixed``)."""
    for name, neutral in (("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)):
        if fields.number(name, -2, 2) not in (None, neutral) and not fixed:
            raise RequestRefused(f"{name}: this server has no penalties; valid is {neutral:g}", param=name)
    if fields.mapping("logit_bias"):
        raise RequestRefused("logit_bias: this server has none; valid is an empty object", param="logit_bias")
    return ClientSampling(
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", -1, 1 << 31),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
    )
