"""Prints the results of commands."""

from __future__ import annotations

from typing import Any

import typer


def print_json(value: Any) -> None:
    """Print a record as one JSON object."""
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())
