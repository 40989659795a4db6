"""Check that a chat template renders all texts of a conversation: they are tagged, and the tags searched for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headway.records.errors import ConfigurationError
from headway.tokens.chat_template import REASONING, normalized_call, reasoning_of
from headway.tokens.messages import canonical_value
from headway.tokens.tokenizer import Tokenizer

_THOUGHT = re.compile(r"(\s*(?:<think>)?)(.*?)(</think>\s*)(.*)", re.DOTALL)  # closed, opened or not
_HEAD = re.compile(r"\s*(?:<[^<>\s]{1,40}>\s*)*")
_TAIL = re.compile(r"(?:\s*<[^<>\s]{1,40}>)*\s*\Z")
_OTHER_ROLE = {"user": "assistant"}  # role -> the role whose rendering is compared with it; default: user


class _Tags:
    """Texts with a tag at either end. Invariant: each tag occurs once."""

    def __init__(self) -> None:
        self.placed: list[tuple[str, str]] = []  # for each text: its name, and why it may be dropped ("": it mayn't)

    def text(self, text: Any, name: str, droppable: str = "") -> Any:
        """Return ``text`` with its tags; a blank one, and a value that is no text, as it is."""
        if not isinstance(text, str) or not text.strip():
            return text
        self.placed.append((name, droppable))
        # tags go inside the text's own markup: templates check its beginning and end for <tool_response>, say
        head_end = match.end() if (match := _HEAD.match(text)) and match.end() < len(text) else 0
        tail_start = match.start() if (match := _TAIL.search(text, max(head_end, len(text) - 200))) else len(text)
        number, tail_start = len(self.placed), tail_start if tail_start > head_end else len(text)
        return f"{text[:head_end]}xQ{number}bQx{text[head_end:tail_start]}xQ{number}eQx{text[tail_start:]}"

    def value(self, value: Any, name: str) -> Any:
        """Return a JSON value with all its texts tagged, names of fields too."""
        if isinstance(value, Mapping):
            return {self.text(key, name): self.value(child, name) for key, child in value.items()}
        return [self.value(child, name) for child in value] if isinstance(value, list) else self.text(value, name)

    def schema(self, value: Any, name: str) -> Any:
        """Return a tool or its schema with tags around the texts that its author chose: names, descriptions, values."""
        if isinstance(value, list):
            return [self.schema(child, name) for child in value]
        if not isinstance(value, Mapping):
            return value
        named = properties if isinstance(properties := value.get("properties"), Mapping) else {}
        tag_by_name = {key: self.text(key, f"{name} parameter {key!r}") for key in named}
        fields = {
            key: self.value(value[key], f"{name} {key}") for key in ("name", "description", "enum") if key in value
        }
        if named:
            fields["properties"] = {tag_by_name[key]: self.schema(child, name) for key, child in named.items()}
        if isinstance(required_names := value.get("required"), list):
            fields["required"] = [tag_by_name.get(key, key) for key in required_names]
        return {key: self.schema(child, name) for key, child in value.items() if key not in fields} | fields

    def message(self, message: Mapping[str, Any], name: str, learned: bool) -> dict[str, Any]:
        """Return a message with tagged texts. Raises ConfigurationError for a call without an object of arguments."""
        tagged = dict(message)
        droppable = "" if learned else "reasoning of turns that aren't learned"
        if (reasoning := reasoning_of(tagged)) and tagged["role"] == "assistant":
            for key in REASONING:
                tagged.pop(key, None)
            tagged[REASONING[0]] = self.text(reasoning, f"{name}.{REASONING[0]}", droppable)
        content = tagged.get("content")
        if isinstance(content, str) and tagged["role"] == "assistant" and (thought := _THOUGHT.fullmatch(content)):
            thought_text = self.text(thought[2], f"the reasoning in {name}.content", droppable)
            tagged["content"] = thought[1] + thought_text + thought[3] + self.text(thought[4], f"{name}.content")
        elif isinstance(content, list):
            tagged["content"] = [{**part, "text": self.text(part.get("text"), f"{name}.content")} for part in content]
        else:
            tagged["content"] = self.text(content, f"{name}.content")
        calls = [normalized_call(call) for call in tagged.get("tool_calls") or ()]
        for number, call in enumerate(calls):
            field = f"{name}.tool_calls[{number}]"
            function: Any = call.get("function") if isinstance(call, Mapping) else None
            arguments: Any = function.get("arguments") if isinstance(function, Mapping) else None
            is_complete = isinstance(arguments, Mapping) and isinstance(function.get("name"), str)
            if not is_complete or not _is_json(arguments):
                reason = "valid: a function with its name and its arguments, a JSON object"
                raise ConfigurationError(f"{field} = {str(call)[:80]}: {reason}")
            tagged_call = {"name": self.text(function["name"], field), "arguments": self.value(arguments, field)}
            calls[number] = {**call, "function": {**function, **tagged_call}}
        if calls:
            tagged["tool_calls"] = calls
        droppable = "the name of a tool's answer" if tagged["role"] == "tool" else ""
        return tagged | ({"name": self.text(tagged["name"], f"{name}.name", droppable)} if "name" in tagged else {})


def require_rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    learned: Collection[int],
    *,
    add_generation_prompt: bool = False,
) -> set[str]:
    """Raise ConfigurationError where the chat template drops a text of the conversation, puts it before an earlier
    message, or renders a role as another one. Reasoning may be dropped except in the messages that are ``learned``, and
    so may the ``name`` of a tool's answer: the function returns which of these are dropped."""
    templates, tags = tokenizer.templates, _Tags()
    source, rendered_keys = templates.source(tools), templates.rendered
    for number in learned:
        field = f"messages[{number}].{REASONING[0]}"
        if reasoning_of(messages[number]) and "</think>" not in source and not templates.reads_reasoning(tools):
            raise ConfigurationError(f"the chat template drops {field}: a model would learn the turn without it")

    def text_of(entries: Sequence[Mapping[str, Any]], tools: Any) -> str:
        return tokenizer.render_messages(entries, tools=tools, add_generation_prompt=add_generation_prompt)

    tools_key = canonical_value(tools or [])
    tag_counts, entries = list[int](), list[dict[str, Any]]()
    for number, message in enumerate(messages):
        entries.append(tags.message(message, f"messages[{number}]", number in learned))
        tag_counts.append(len(tags.placed))
    tagged_tools = tools if tools_key in rendered_keys else tags.schema(list(tools or ()), "the tools'") or None
    text, dropped = text_of(entries, tagged_tools), set[str]()
    search_start = reached = number = 0
    for index, (name, droppable) in enumerate(tags.placed):
        while number < len(tag_counts) and index >= tag_counts[number]:
            number, search_start = number + 1, reached
        anywhere = number == len(tag_counts) or messages[number]["role"] in ("system", "developer")
        tag_start, tag_end = (text.find(f"xQ{index + 1}{end}Qx", 0 if anywhere else search_start) for end in "be")
        if tag_start >= 0 and tag_end >= 0:
            reached = reached if anywhere else max(reached, tag_end)
        elif droppable:
            dropped.add(droppable)
        else:
            fault = "puts it elsewhere" if f"xQ{index + 1}bQx" in text else "drops it"
            raise ConfigurationError(f"{name}: the chat template {fault}, so the model wouldn't see the row's content")
    roles = tuple(message["role"] for message in messages)
    for role in () if roles in rendered_keys else {*roles}:
        other = _OTHER_ROLE.get(role, "user")
        changed_entries = [{**entry, "role": other} if entry["role"] == role else entry for entry in entries]
        try:
            is_same = text_of(changed_entries, tagged_tools) == text
        except ConfigurationError:  # the template refuses that, so it distinguishes roles
            continue
        if is_same:
            field = f"messages[{roles.index(role)}].role = {role!r}"
            raise ConfigurationError(f"{field}: the chat template renders it as it does {other!r}: the role is unknown")
    rendered_keys |= {tools_key, roles}
    return dropped


def _is_json(value: Any) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except ValueError:
        return False
