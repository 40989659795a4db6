"""What a page that is one file has inside."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def kept(path: Path, part: str = "answers") -> Any:
    """The answers of a server that lie in a page: ``answers``, or ``rollouts`` with their tokens."""
    found = re.search(rf'id="kept-{part}">([^<]*)<', path.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def answers_of(path: Path) -> dict[str, Any]:
    """The answers about the only run of a page."""
    (found,) = kept(path)["of"].values()
    return found


def words(path: Path) -> str:
    """All texts of the view *Report* of a page, one after another."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            for name, item in value.items():
                found.append(name)
                collect(item)
        elif isinstance(value, list):
            for item in value:
                collect(item)

    collect(answers_of(path)["report"])
    return "\n".join(found)
