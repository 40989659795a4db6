"""Prints results as rows of a label and a text."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

Rows = dict[str, str]  # label -> text


def print_rows(rows: Mapping[str, str], title: str = "", console: Console | None = None, *, gap: int = 3) -> None:
    """Print ``rows`` under each other, labels bold, below a ``title`` where there is one. ``gap``: blanks between label
    and text."""
    console = console or Console(highlight=False)
    table = Table.grid(padding=(0, gap))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in rows.items():
        table.add_row(Text(label), Text(text))
    if title:
        console.print(Text(f"\n{title}", style="bold underline"))
    console.print(table)
