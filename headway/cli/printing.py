"""Prints the results of commands, as JSON or as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

USD_PER_DEVICE_HOUR = typer.Option(
    "",
    "--usd-per-device-hour",
    metavar="PRICE",
    help="Price of one device: dollars, or owned.NAME or rented.NAME of the catalogue; default: print no cost.",
)


def print_json(value: Any) -> None:
    """Print a record as one JSON object."""
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())


def print_rows(rows: Mapping[str, str], title: str = "", *, gap: int = 3) -> None:
    """Print ``rows``, each a label and a text, below an optional ``title``; ``gap``: blanks between the columns."""
    from headway.report import tables

    tables.print_rows(rows, title, gap=gap)


def print_result(outcome: Any, as_json: bool, show: Callable[[], object]) -> None:
    """Print a command's outcome: as one JSON object, or for people by ``show``."""
    if as_json:
        print_json(outcome)
    else:
        show()


def price_from(text: str) -> float | None:
    """Return the dollars per device-hour that ``--usd-per-device-hour`` gives; None when the option is absent."""
    if not text:
        return None
    from headway.planner.catalogue.read import Catalogue
    from headway.planner.costs import price_of

    return price_of(Catalogue.read(), text)
