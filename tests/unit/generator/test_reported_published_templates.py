"""Chat templates as they are published with TRL: each gives its own calls back."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_reported_tool_formats import CALLS, ONE, called, kind_of, marked, posted, written

_MARKS = re.compile(r"<[|｜][^\s'\"<>{}]{1,40}>|<[^\s'\"<>{}|｜]{1,40}[|｜]>|\[/?[A-Z_]{3,}\]|<\|\"\|>")


@cache
def published() -> dict[str, str]:
    """TRL's templates that write calls."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "chat_templates"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
    return {name: text for name, text in texts.items() if "tool_calls" in text}


def wrong_of(template: str, calls: list[tuple[str, Any]]) -> str:
    """How a published template's own calls aren't given back; "": they are."""
    text = written(template, calls)
    known = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    marks = tuple(sorted({mark for mark in _MARKS.findall(template)} - known, key=len, reverse=True))
    status, answer, _ = posted(kind_of(template, marks), marked(text, (*marks, *known)))
    if status == 200 and called(answer) == calls:
        return ""
    return f"{text[:120]!r}: {str(answer)[:160]}"


PUBLISHED: dict[str, tuple[list[tuple[str, Any]], int]] = {  # calls, templates and twins of which they can't come back
    "one call": ([ONE], 2),
    "newlines and quotes": (CALLS["newlines and quotes"], 8),  # one family writes texts between quotes as they are
    "newlines": ([("run", {"code": "if x < 1:\n    y = 2\n"})], 2),
    "no arguments": (CALLS["no arguments"], 2),
    "values of each type": (
        [("get_weather", {"tags": ["a", "b, c"], "place": {"x": 1}, "wind": 1.5, "detail": True})],
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "most"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_templates_give_their_own_calls_back(calls: list[tuple[str, Any]], most: int) -> None:
    if not published():
        pytest.skip("trl isn't installed")
    wrong, tried = dict[str, str](), 0
    for name, template in published().items():
        try:
            written(template, [ONE])
        except Exception:
            continue
        tried += 1
        if why := wrong_of(template, calls):
            wrong[name] = why
    assert tried >= 20
    assert len(wrong) <= most, "\n".join(f"{name}: {why}" for name, why in wrong.items())
