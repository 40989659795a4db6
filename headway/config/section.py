"""Base class and value types of the experiment file's sections."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, lt=1)]

ANY_NODE = "*"  # begins the node's name of a device that has no node yet


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def of(cls, section: Section, **values: Any) -> Self:
        """The keys of ``section``, of which this class is an extension, and its own values, which no file sets: their
        defaults, or ``values``."""
        return cls(**section.model_dump(), **values)


def require_named(value: str, known: Collection[str]) -> str:
    """Return ``value``, one of the names ``known`` or the user's own module:function. Raises ValueError."""
    if value not in known and ":" not in value:
        raise ValueError(f"valid: {', '.join(known)} or module:function")
    return value


def require_http(value: str) -> str:
    """Return ``value``, an address that HTTP requests can go to. Raises ValueError."""
    if not value.startswith(("http://", "https://")):
        raise ValueError("valid: http://... or https://...")
    return value


def host_port(example: str, *, optional: bool = False) -> BeforeValidator:
    """Make the validator of a text HOST:PORT; ``optional``: "" is valid too."""

    def validated(value: Any) -> Any:
        host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if not (host and port.isdecimal() and int(port) < 1 << 16) and not (optional and value == ""):
            raise ValueError(f"valid: HOST:PORT, say {example}")
        return value

    return BeforeValidator(validated)


def _switched(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switched)]  # true and false are on and off


def named_once(what: str) -> AfterValidator:
    """Make the validator of a list of names that names no ``what`` twice."""

    def validated(value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"a {what} is named twice")
        return value

    return AfterValidator(validated)


def counted_devices(component: str) -> AfterValidator:
    """Make the validator of a list of devices: ``N*cuda`` or ``N*cpu`` stands for N devices of any of the cluster's
    nodes, named ``*COMPONENT/cuda:0`` and so on until the nodes are known."""

    def expanded(names: tuple[str, ...]) -> tuple[str, ...]:
        found: list[str] = []
        for name in names:
            match = re.fullmatch(r"([1-9]\d{0,3})\*(cuda|cpu)", name)
            given = len(found)
            found += (
                [name]
                if match is None
                else [f"{ANY_NODE}{component}/{match[2]}:{given + index}" for index in range(int(match[1]))]
            )
        return tuple(found)

    return AfterValidator(expanded)


ReplicaDevices = Annotated[tuple[str, ...], counted_devices("generator")]
RankDevices = Annotated[tuple[str, ...], counted_devices("trainer")]
