"""A client that talks to a recorder as agents do, an engine that answers with made-up tokens, and templates."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import real_tokenizers
from scratch_folders import scratch_folder

from headway.config.endpoint import EndpointConfig
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, rows_known
from headway.generator.recording.recorder import Recorder
from headway.records.conversations import HistoryReasoning, RecordedConversation
from headway.records.generation import GenerationResult, PartialResponse, VersionSpan
from headway.records.tokens import TokenRows
from headway.tokens.continuation import Chat
from headway.tokens.messages import Message, normal_messages
from headway.tokens.output_parsing import openai_message
from headway.tokens.tokenizer import Tokenizer

# Qwen 2.5: calls as JSON inside tags, several answers of tools in one turn of the user; nothing is ever rewritten.
QWEN25 = """\
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {{- '\\n' + message.content if message.content or not message.tool_calls else '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# Qwen 3: the same, and reasoning before the user's last words is dropped.
QWEN3 = (
    QWEN25.replace(
        "{%- for message in messages %}\n",
        "{%- set ns = namespace(last=-1) %}\n"
        "{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}\n{%- for message in messages %}\n",
        1,
    )
    .replace(
        "'\\n' + message.content if message.content or not message.tool_calls else ''",
        "'\\n' + ('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' "
        "if message.reasoning_content and loop.index0 > ns.last else '') + message.content",
    )
    .replace("'\\n<tool_call>\\n{", "('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{")
)

# Llama 3.1: a call is the whole turn.
LLAMA31 = """\
{{- bos_token }}{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + message.tool_calls[0].function.name }}
        {{- '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# DeepSeek R1: the prompt opens the reasoning, which later prompts don't have; content is searched for it.
R1 = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content.split('</think>')[-1] "
    "if message.role == 'assistant' else message.content) + '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

# Phi-3: the conversation is closed as well, with the only token here that a response ends with.
CLOSING = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% else %}{{- eos_token }}{% endif %}"
)

# name -> (tokenizer, template; None: the tokenizer's own)
KINDS: dict[str, tuple[str, str | None]] = {
    "chatml": ("qwen", None),
    "qwen2.5": ("qwen", QWEN25),
    "qwen3": ("qwen", QWEN3),
    "r1": ("qwen", R1),
    "closing": ("qwen", CLOSING),
    "llama3": ("llama3", None),
    "llama3.1": ("llama3", LLAMA31),
    "mistral": ("llama2", None),
    "metaspace": ("metaspace", None),
    "gemma": ("gemma", None),
}
APPEND_ONLY = ("chatml", "qwen2.5", "closing", "llama3", "llama3.1", "mistral", "metaspace", "gemma")
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
WORDS = ["the", " answer", "\n", "\n\n", " 12", "é", "你好", "def", " ", "So", ".", "is{", '"']


def chat_of(kind: str, folder: Path) -> Chat:
    name, template = KINDS[kind]
    real_tokenizers.write(name, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if name == "gemma":
        turns_end = Tokenizer.load(folder).token_id("<end_of_turn>")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turns_end, 1]}))
    return Chat(Tokenizer.load(folder))


@dataclass
class Engine:
    """Answers in tokens no encoder would choose. Every token has a log-probability of its own, so that it is known
    wherever it turns up."""

    tokenizer: Tokenizer
    random: random.Random
    context: dict[float, tuple[int, ...]] = field(default_factory=dict)  # of a token: everything before it, and itself
    version: int = 0
    plain: bool = False  # nothing but words, ended or cut

    def spelled(self, text: str) -> list[int]:
        """A tokenization of the text, mostly not the encoder's."""
        ids: list[int] = []
        while text:
            cut = self.random.randint(1, 4)
            piece, text = text[:cut], text[cut:]
            ids += self.tokenizer.encode(piece)
        return ids

    def result(self, call: RecordedCall, ids: list[int], finish_reason: str = "stop") -> GenerationResult:
        """Of a call, cut to what it may have."""
        if len(ids) > call.max_tokens:
            ids, finish_reason = ids[: call.max_tokens], "length"
        logprobs = [-1.0 - len(self.context) / 1024 - place / 1024 for place in range(len(ids))]
        spans: list[VersionSpan] = []
        for place, logprob in enumerate(logprobs):
            self.context[logprob] = (*call.prompt_ids, *ids[: place + 1])
            self.version += self.random.random() < 0.02
            if spans and spans[-1].version == self.version:
                spans[-1] = VersionSpan(version=self.version, tokens=spans[-1].tokens + 1)
            else:
                spans.append(VersionSpan(version=self.version, tokens=1))
        read = [*call.prompt_ids, *ids][rows_known(call.planned.parent) : -1]  # each token's row is the token itself
        rows = {"read": TokenRows.of([[token] for token in read], 4)} if call.number % 7 != 3 else {}
        if rows and call.number % 3:  # and those that were sampled have theirs, to the last of them
            among = [[]] * (len(read) + 1 - len(ids)) + [[token] for token in ids]
            rows["sampled"] = TokenRows.of(among, 4)
        response = PartialResponse(ids=tuple(ids), logprobs=tuple(logprobs), versions=tuple(spans), token_rows=rows)
        return GenerationResult(request_id=str(call.number), response=response, finish_reason=finish_reason)  # type: ignore[arg-type]

    def answer(self, call: RecordedCall, text: str | None = None) -> GenerationResult:
        """Text, reasoning, tool calls, well-formed or not, ended or cut."""
        said = self._text() if text is None else text
        ids = self.spelled(said) or self.tokenizer.encode("x")
        if text is None and not self.plain and self.random.random() < 0.2:
            ids.append(self.random.randrange(self.tokenizer.vocabulary_size))
        end = self.random.random()
        if end < 0.15 and text is None:
            return self.result(call, ids[: self.random.randint(1, len(ids))], "length")
        if end < 0.25 and call.request.stop and text is None and not self.plain:
            return self.result(call, ids + self.spelled(call.request.stop[0]))
        return self.result(call, [*ids, self.random.choice(self.tokenizer.stop_ids)])

    def _text(self) -> str:
        pick, words = self.random.random, lambda: "".join(self.random.choices(WORDS, k=self.random.randint(0, 6)))
        said = ""
        if self.plain:
            return words()
        if pick() < 0.4:
            said += f"<think>\n{words()}</think>" + self.random.choice(["", "\n\n", " "])
        said += words()
        for _ in range(self.random.choice([0, 0, 1, 2])):
            spaced = self.random.choice(['{"command": "ls -l é"}', '{ "command":"ls",  "n": 1.0 }', "{}", '{"a": [1, '])
            key = self.random.choice(["arguments", "parameters"])
            call = f'{{"name": "bash", "{key}": {spaced}}}'
            said += self.random.choice([f"\n<tool_call>\n{call}\n</tool_call>", f"<tool_call>{call}", call])
        return said


@dataclass
class Agent:
    """A client with a conversation that it hands in again and again, in its own manner of writing."""

    recorder: Recorder
    engine: Engine
    random: random.Random
    tools: bool
    alternate: bool  # only user and assistant, in turn
    manner: str = "whole"  # of handing answers back: whole, litellm, without reasoning
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    made: list[RecordedCall] = field(default_factory=list)
    asked: list[tuple[Message, ...]] = field(default_factory=list)  # by the number of the call

    def request(self, messages: list[dict[str, Any]]) -> CallRequest:
        return CallRequest(
            messages=normal_messages(messages),
            tools=TOOLS if self.tools else None,
            choices=self.random.choice([1, 1, 1, 2, 3]),
            max_tokens=self.random.choice([None, 30]),
            stop=self.random.choice([(), ("\nObservation:",)]),
            seed=self.random.choice([None, 42]),
            grammar="" if len(messages) % 3 else f"grammar {len(messages) % 2}",
        )

    def returned(self, message: Message) -> dict[str, Any]:
        """An answer as the client hands it back."""
        entry = {**openai_message(message, self.recorder.chat.written), "function_call": None, "refusal": None}
        for call in entry.get("tool_calls", []):
            call["function"]["arguments"] = respaced(call["function"]["arguments"])
        if self.manner == "litellm" and message.reasoning:
            entry |= {"content": message.content, "reasoning_content": f"\n{message.reasoning}\n"}
        if self.manner == "without reasoning":
            entry.pop("reasoning_content", None)
            entry["content"] = message.content
        if entry["content"] and self.random.random() < 0.3:
            entry["content"] = [{"type": "text", "text": entry["content"]}]
        return entry

    def replies(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        calls = [] if self.alternate else answer.get("tool_calls", [])
        found = [{"role": "tool", "tool_call_id": c["id"], "content": f"done {c['id']}"} for c in calls]
        return found or [{"role": "user", "content": self.random.choice(["go on", "no\n", "Hé"])}]

    def edited(self, talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A history that is not the one before."""
        kind = self.random.random()
        if kind < 0.4 and len(talk) > 2 and not self.alternate:  # the answer is dropped, an error takes its place
            return [*talk[:-2], {"role": "user", "content": "format error"}]
        if kind < 0.7 and len(talk) > 1:
            return talk[: self.random.randrange(1, len(talk), 2)]
        return [{"role": "user", "content": f"other {kind:.3f}"}, *talk[1:]]

    def step(self) -> None:
        """One or several calls side by side, and what the client makes of their answers."""
        talks = self.conversations or [[{"role": "user", "content": "1+2?\n"}]]
        chosen = [self.random.choice(talks[-4:]) for _ in range(self.random.choice([1, 1, 2]))]
        if self.random.random() < 0.25:
            chosen = [self.edited(talk) for talk in chosen]
        calls = [(talk, self.recorder.begin(self.request(talk))) for talk in chosen]
        self.made += [call for _, call in calls]
        self.asked += [call.request.messages for _, call in calls]
        self.random.shuffle(calls)
        for talk, call in calls:
            results = [self.engine.answer(call) for _ in range(call.request.choices)]
            if self.random.random() < 0.1:
                self.recorder.abandon(call, results)
                continue
            if self.random.random() < 0.1:
                results[0] = msgspec.structs.replace(results[0], finish_reason="error")
            committed(self.recorder, call, results)
            turn = self.random.choice(call.turns)
            if turn is not None:
                answer = self.returned(turn.message)
                self.conversations.append([*talk, answer, *self.replies(answer)])


def respaced(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments


def played(
    chat: Chat, seed: int, steps: int, *, manner: str = "whole", history_reasoning: HistoryReasoning = "as_sent",
    tools: bool = True, alternate: bool = False, plain: bool = False,
) -> tuple[Agent, RecordedConversation]:  # fmt: skip
    """A random conversation, and what was recorded of it."""
    chance = random.Random(seed)
    recorder = Recorder(chat, EndpointConfig(history_reasoning=history_reasoning), 100_000)
    engine = Engine(chat.tokenizer, chance, plain=plain)
    agent = Agent(recorder, engine, chance, tools=tools, alternate=alternate, manner=manner)
    for _ in range(steps):
        agent.step()
    return agent, recorder.close()


USER: Any = {"role": "user", "content": "1+2?"}


@cache
def chat(kind: str) -> Chat:
    return chat_of(kind, scratch_folder("recorder"))


def recorder(kind: str = "qwen2.5", context_tokens: int = 10_000, **settings: Any) -> Recorder:
    """With settings that need not be valid: a limit of 0, say."""
    return Recorder(chat(kind), EndpointConfig.model_construct(**settings), context_tokens)


def request(*messages: dict[str, Any], **options: Any) -> CallRequest:
    return CallRequest(messages=normal_messages(messages), **options)


def result(
    ids: list[int], finish_reason: Any = "stop", version: int = 0, first_token_s: float = 1.0
) -> GenerationResult:
    return GenerationResult(
        request_id="r",
        response=PartialResponse(
            ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            versions=(VersionSpan(version=version, tokens=len(ids)),) if ids else (),
        ),
        finish_reason=finish_reason,
        first_token_s=first_token_s,
    )


def spelled(text: str, kind: str = "qwen2.5", *, ended: bool = True) -> list[int]:
    """A token for every character, and the one that ends a response."""
    tokenizer = chat(kind).tokenizer
    return [i for character in text for i in tokenizer.encode(character)] + [tokenizer.eos_id] * ended


def said(record: Recorder, text: str, *messages: dict[str, Any], **options: Any) -> RecordedCall:
    """A call answered with ``text``, once for each choice."""
    call = record.begin(request(*messages, **options))
    committed(record, call, [result(spelled(text)) for _ in range(call.request.choices)])
    return call


def committed(record: Recorder, call: RecordedCall, results: list[GenerationResult]) -> None:
    """A call answered with ``results``, which its client got."""
    record.commit(call, results)
    record.note_received(call)
