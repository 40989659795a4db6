"""Catalogues of devices, machines, prices and published runs: the package's, overridden by a user's own.

Each entry has a source and a date. A figure that isn't known is left out, and `known` refuses it where it is needed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from headway.config.load import read_toml
from headway.control.cost import Count, ServerCosts, TokenPrices, Tokens, Usd
from headway.control.rates.specs import DeviceFigures, Figure
from headway.records.errors import ConfigurationError

PACKAGED = ("devices.toml", "prices.toml", "runs.toml")
OLD_DAYS = 365  # a price older than that is worth a warning


class MachineFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices in one machine, and its network."""

    device: str
    devices: Count
    network_bytes_per_s: Figure | None = None  # of all its network cards, one direction


class RentedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of a device by the hour."""

    usd_per_device_hour: Usd


class PublishedStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of a run's table. ``printed``: its other columns, dollars and tokens, by name."""

    seconds: Figure
    response_tokens: Tokens
    sequence_tokens: Tokens
    printed: dict[str, Usd] = {}


class RunTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run's devices and steps, from a publication or a user's file."""

    description: str
    batch: Count  # samples of a step
    generator_devices: Annotated[int, msgspec.Meta(ge=0)]
    trainer_devices: Annotated[int, msgspec.Meta(ge=0)]
    price: str  # owned.NAME or rented.NAME
    service: str = ""  # of services, to compare with; "": none
    published_usd_per_mtok: Usd | None = None
    mean: PublishedStep | None = None
    steps: Annotated[tuple[PublishedStep, ...], msgspec.Meta(min_length=1)]


_TYPES: dict[str, Any] = {
    "devices": DeviceFigures,
    "machines": MachineFigures,
    "owned": ServerCosts,
    "rented": RentedDevice,
    "services": TokenPrices,
    "runs": RunTable,
}
Entry = TypeVar("Entry")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The source of an entry's figures, and their date."""

    source: Annotated[str, msgspec.Meta(min_length=1)]
    date: date


class Catalogue:
    """Entries by section and name, checked when they are asked for.

    Example: ``Catalogue.read(["mine.toml"]).entry("owned", "H200", ServerCosts)``. A user's entry replaces single keys
    of the package's of that name, and needs a source and a date of its own.
    """

    def __init__(self, entries: dict[str, dict[str, dict[str, Any]]]) -> None:
        self._entries = entries

    @classmethod
    def read(cls, paths: Sequence[str | Path] = ()) -> Catalogue:
        """Read the package's catalogue; later files of ``paths`` override earlier ones and it. Raises
        ConfigurationError."""
        entries: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in _TYPES}
        for name in PACKAGED:
            catalogue_text = (files("headway.planner.catalogue") / name).read_text(encoding="utf-8")
            _merge_entries(entries, tomllib.loads(catalogue_text), name)
        for path in paths:
            _merge_entries(entries, read_toml(path), str(path))
        catalogue = cls(entries)
        for section, name in ((section, name) for section, named_entries in entries.items() for name in named_entries):
            catalogue.entry(section, name, _TYPES[section])
        return catalogue

    def names(self, section: str) -> list[str]:
        return list(self._entries[section])

    def source(self, section: str, name: str) -> Source:
        return _convert(self._raw(section, name), Source, f"{section}.{name}", strict=True)

    def entry(self, section: str, name: str, kind: type[Entry]) -> Entry:
        """The entry ``name`` of a section as a ``kind``. Raises ConfigurationError for an unknown or a wrong one."""
        raw_entry = self._raw(section, name)
        self.source(section, name)
        figures = {key: value for key, value in raw_entry.items() if key not in ("source", "date")}
        return _convert(figures, kind, f"{section}.{name}")

    def known(self, section: str, name: str, key: str, part: str = "") -> float:
        """Return a needed figure: ``key`` of an entry, or its ``part`` (a dtype). Raises ConfigurationError where it
        isn't known."""
        figure = getattr(self.entry(section, name, _TYPES[section]), key)
        figure = figure.get(part) if part else figure
        if figure is None:
            key_path = f"{section}.{name}.{key}" + (f".{part}" if part else "")
            raise ConfigurationError(
                f"{key_path} is not known ({self.source(section, name).source}): give it in a --catalogue"
            )
        return figure

    def old_prices(self, today: date) -> list[str]:
        """Descriptions of prices that are more than a year older than ``today``."""
        return [
            f"{section}.{name}: a price of {source.date}, {(today - source.date).days:,} days old"
            for section in ("owned", "rented", "services")
            for name in self._entries[section]
            if (today - (source := self.source(section, name)).date).days > OLD_DAYS
        ]

    def _raw(self, section: str, name: str) -> dict[str, Any]:
        if name not in self._entries[section]:
            raise ConfigurationError(f"{section}.{name}: unknown; known: {', '.join(self._entries[section])}")
        return self._entries[section][name]


def _merge_entries(entries: dict[str, dict[str, dict[str, Any]]], sections: dict[str, Any], origin: str) -> None:
    for section, named_entries in sections.items():
        if section not in _TYPES:
            raise ConfigurationError(f"catalogue {origin}: unknown section {section!r}; valid: {', '.join(_TYPES)}")
        for name, entry in named_entries.items():
            if not isinstance(entry, dict) or not {"source", "date"} <= entry.keys():
                raise ConfigurationError(
                    f"catalogue {origin}: {section}.{name} needs a source and a date: no number without"
                )
            entries[section][name] = {**entries[section].get(name, {}), **entry}


def _convert(raw: dict[str, Any], kind: type[Entry], name: str, *, strict: bool = False) -> Entry:
    try:
        return msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`")
        bad_value = raw.get(key.removeprefix("."))
        value_text = f" = {bad_value!r}" if bad_value is not None else ""
        raise ConfigurationError(f"{name}{key}{value_text}: {message[0].lower()}{message[1:]}") from None
