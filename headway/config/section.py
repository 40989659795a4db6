"""Base class and value types of the experiment file's sections."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, lt=1)]

ANY_NODE = "*"  # first character of a device's node name while no node is assigned


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def of(cls, section: Section, **values: Any) -> Self:
        """Make an instance from the keys of ``section``, which this class extends, and from ``values`` for its further
        fields, which no file can set; the others have their defaults."""
        return cls(**section.model_dump(), **values)


def require_named(value: str, known: Collection[str]) -> str:
    """Return ``value``, one of the ``known`` names or a user's module:function. Raises ValueError for any other."""
    if value not in known and ":" not in value:
        raise ValueError(f"valid: {', '.join(known)} or module:function")
    return value


def require_http(value: str) -> str:
    """Return ``value``, an HTTP or HTTPS address. Raises ValueError for any other text, and for one with a user or
    password, which would be stored with the run."""
    if not value.startswith(("http://", "https://")):
        raise ValueError("valid: http://... or https://...")
    if "@" in urlsplit(value).netloc:
        raise ValueError("it has a user or password; valid: the address alone, with api_key_env for a secret")
    return value


def host_port(example: str, *, optional: bool = False) -> BeforeValidator:
    """Make the validator of a text HOST:PORT; ``optional``: "" is valid too."""

    def validated(value: Any) -> Any:
        host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if not (host and port.isdecimal() and int(port) < 1 << 16) and not (optional and value == ""):
            raise ValueError(f"valid: HOST:PORT, say {example}")
        return value

    return BeforeValidator(validated)


def _switch_value(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_value)]  # true and false are on and off


def distinct_names(kind: str) -> AfterValidator:
    """Make the validator of a list of names that names no ``kind`` twice."""

    def validated(value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"a {kind} is named twice")
        return value

    return AfterValidator(validated)


def counted_devices(component: str) -> AfterValidator:
    """Make the validator of a list of devices: it expands ``N*cuda`` or ``N*cpu`` to N devices on any of the cluster's
    nodes, named ``*COMPONENT/cuda:0`` and so on until the nodes are known."""

    def expanded(names: tuple[str, ...]) -> tuple[str, ...]:
        devices: list[str] = []
        for name in names:
            match = re.fullmatch(r"([1-9]\d{0,3})\*(cuda|cpu)", name)
            first_index = len(devices)
            devices += (
                [name]
                if match is None
                else [f"{ANY_NODE}{component}/{match[2]}:{first_index + index}" for index in range(int(match[1]))]
            )
        return tuple(devices)

    return AfterValidator(expanded)


ReplicaDevices = Annotated[tuple[str, ...], counted_devices("generator")]
RankDevices = Annotated[tuple[str, ...], counted_devices("trainer")]
