"""docs/cli.md and docs/api.md are what the commands and docstrings say today, and leave nothing out."""

from __future__ import annotations

import re

import pytest

from docs import write_api, write_cli
from docs.blocks import ROOT
from headway import api

CLI, API = write_cli.reference(), write_api.reference()


@pytest.mark.parametrize(("name", "text"), [("cli", CLI), ("api", API)])
def test_page_is_up_to_date(name: str, text: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    assert page.read_text(encoding="utf-8") == text, f"run: python -m docs.write_{name} > docs/{name}.md"


def test_every_command_and_option_is_explained() -> None:
    titles = re.findall(r"^## `(.+)`$", CLI, re.MULTILINE)
    assert titles == [" ".join(path) for path, _ in write_cli.commands()]
    assert {"headway train", "headway kernels sft-data"} <= set(titles)
    rows = re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", CLI, re.MULTILINE)
    assert len(rows) == sum(len(command.params) for _, command in write_cli.commands())
    assert [names for names, text in rows if len(text) < 3] == []


def test_every_public_name_is_on_the_page() -> None:
    titles = re.findall(r"^### `(\w+)`$", API, re.MULTILINE)
    assert set(dir(api)) <= set(titles)
    assert len(set(titles)) == len(titles)


def test_records_methods_and_functions_have_their_parts() -> None:
    assert "| `answer` | `str` | the reference the verifier compares with" in API
    assert "- `add_message(content: str, role: str='user', *, to: str | None=None) -> None`: Add a message" in API
    assert "- `speaker -> str`: The role" in API
    assert "load_experiment(path: str | Path, overrides: Sequence[str]=(), *, resume: bool=False, " in API
    assert '"3&lt;eos>"' in API
