"""Conversations under published templates: each text of theirs is found in order, or the row is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.records.conversations import RequestRefused
from headway.records.errors import ConfigurationError
from headway.tokens.continuation import Chat
from headway.tokens.conversation import encode_conversation
from headway.tokens.messages import normal_messages
from headway.tokens.tokenizer import Tokenizer

_FOUND = importlib.util.find_spec("trl")
FOLDER = Path((_FOUND.submodule_search_locations or [""])[0]) / "chat_templates" if _FOUND else Path("none")
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
_TOKEN = re.compile(r"<[|｜][^<>\s'\"{}]{1,40}>|<\w+\|>|<(?:start|end)_of_\w+>|</?s>|\[/?[A-Z_]{3,}\]")


def write_folder(folder: Path, source: str) -> Path:
    """A model folder with the template; a token a byte, and its marks as special tokens."""
    special = ["<bos>", "<eos>", "<pad>", *dict.fromkeys(_TOKEN.findall(source))]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(source)
    return folder


class Writer:
    """Draws conversations in which every text is a sentinel of its own, in the order of writing."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.tools: list[str] = []
        self.said: list[list[str]] = []  # of each message
        self._count = 0

    def text(self, kept: list[str]) -> str:
        self._count += 1
        kept.append(f"zq{self._count:03d}qz")
        return kept[-1]

    def conversation(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        draw, messages = self.random.random, list[dict[str, Any]]()
        tools = [self.tool(number) for number in range(self.random.randint(1, 2))] if draw() < 0.5 else None
        if draw() < 0.4:
            messages.append(self.message(self.random.choice(["system", "developer"])))
        for _ in range(self.random.randint(1, 2)):
            messages.append(self.message("user"))
            if tools and draw() < 0.7:
                calls = [self.call(tools, number) for number in range(self.random.randint(1, 2))]
                entry = self.message("assistant", content=draw() < 0.3, reasoning=draw() < 0.4)
                entry["tool_calls"] = []
                for name, call in calls:
                    arguments = {key: self.text(self.said[-1]) for key in ("first", "second")}
                    given = json.dumps(arguments) if draw() < 0.3 else arguments
                    entry["tool_calls"].append(call | {"function": {"name": name, "arguments": given}})
                messages.append(entry)
                for _, call in calls:
                    messages.append(self.message("tool") | {"tool_call_id": call["id"]})
            messages.append(self.message("assistant", reasoning=draw() < 0.3))
        return messages, tools

    def message(self, role: str, *, content: bool = True, reasoning: bool = False) -> dict[str, Any]:
        kept: list[str] = []
        self.said.append(kept)
        entry: dict[str, Any] = {"role": role}
        if reasoning:
            thought = self.text(kept)
            if self.random.random() < 0.5:
                entry["reasoning_content"] = thought
            else:
                entry["content"] = f"<think>\n{thought}\n</think>\n\n{self.text(kept)}"
                return entry
        return entry | {"content": self.text(kept) if content else ""}

    def call(self, tools: list[dict[str, Any]], number: int) -> tuple[str, dict[str, Any]]:
        name = self.random.choice(tools)["function"]["name"]
        return name, {"id": f"call{number:05d}", "type": "function"}

    def tool(self, number: int) -> dict[str, Any]:
        properties = {name: {"type": "string", "description": self.text(self.tools)} for name in ("first", "second")}
        parameters = {"type": "object", "properties": properties, "required": ["first"]}
        function = {"name": f"tool{number}", "description": self.text(self.tools), "parameters": parameters}
        return {"type": "function", "function": function}


def require_found(text: str, writer: Writer, dropped: frozenset[str]) -> None:
    assert all(one in text for one in writer.tools)
    at = 0
    for texts in writer.said:
        places = [text.find(one, at) for one in texts]
        if dropped:  # reasoning, which the report names
            places = [place for place in places if place >= 0]
        assert all(place >= at for place in places), (texts, text)
        at = max([at, *places])


@pytest.mark.slow
@pytest.mark.skipif(not NAMES, reason="needs the package trl: its folder of templates")
@pytest.mark.parametrize("name", NAMES)
def test_every_text_is_found_in_order_or_the_row_is_refused(name: str, tmp_path: Path) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = Tokenizer.load(write_folder(tmp_path, source), chat=True)
    found = refused = 0
    for seed in range(int(os.environ.get("HEADWAY_CONVERSATIONS", "12"))):
        for train_on in ("assistant", "last_assistant", "all"):
            writer = Writer(f"{name} {seed}")
            messages, tools = writer.conversation()
            try:
                made = encode_conversation(tokenizer, messages, tools, train_on)  # type: ignore[arg-type]
            except ConfigurationError as error:
                refused += 1
                print(train_on, str(error)[:200])
                continue
            found += 1
            assert made is not None
            require_found(tokenizer.decode(made.ids, keep_special=True), writer, made.dropped)
    print(f"{name}: {found} found, {refused} refused; stops {tokenizer.added_stops}")


@pytest.mark.slow
@pytest.mark.skipif(not NAMES, reason="needs the package trl: its folder of templates")
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_requests_are_rendered_alike(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, (FOLDER / f"{name}.jinja").read_text()), chat=True)
    chat, compared = Chat(tokenizer), 0
    for seed in range(12):
        messages, tools = Writer(f"{name} {seed}").conversation()
        texts: list[str] = []
        for render in (
            lambda: tokenizer.render_messages(messages[:-1], tools=tools),  # noqa: B023
            lambda: chat.render(normal_messages(messages[:-1]), tools),  # noqa: B023
        ):
            try:
                texts.append(render())
            except (ConfigurationError, RequestRefused) as error:
                texts.append(str(error))
        assert texts[0] == texts[1]
        compared += "the chat template fails" not in texts[0]
    assert compared
