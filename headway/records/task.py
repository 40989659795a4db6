"""A problem to solve."""

from __future__ import annotations

from typing import Any

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A problem: a prompt and what is needed to verify an answer."""

    task_id: str  # content hash, 16 hex digits: equal content, equal id
    prompt: str  # the text shown to the policy, before any chat template; of a conversation: its users' messages
    messages: tuple[dict[str, Any], ...] = ()  # a conversation to answer, {role, content} each, instead of a text
    answer: str = ""  # the reference the verifier compares with ("" where it needs none)
    metadata: dict[str, Any] = {}  # further fields for the verifier (JSON types only)
    source: str = ""  # the label of the task source it came from
    verifier: str = ""  # scores it: "" [verifier], NAME of [verifiers.NAME], or a verifier's settings as JSON
    pixels: str = ""  # of a group's task: content hash of the pixel arrays that its pictures became
    unshown: str = ""  # of a group's task: why its pictures can't be shown

    @property
    def content(self) -> str | tuple[dict[str, Any], ...]:
        """The prompt that the policy answers: the conversation where there is one, else the text."""
        return self.messages or self.prompt

    @property
    def pictures(self) -> tuple[tuple[str, str], ...]:
        """The pictures in its messages, in their order: address, a path or data: URL, and content hash."""
        contents: list[list[Any]] = [turn["content"] for turn in self.messages if isinstance(turn.get("content"), list)]
        parts = [part for parts in contents for part in parts if part["type"] == "image_url"]
        return tuple((part["image_url"]["url"], part.get("content_hash", "")) for part in parts)
