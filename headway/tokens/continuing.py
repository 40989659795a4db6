"""Prompts of chat requests that continue answers with known tokens: those are reused, only the rest is encoded.

The template renders the whole conversation as text. As far as that text equals an earlier prompt, the prompt's tokens
stand for it; where the answer sampled there follows, the sampled tokens stand for that. Only the text behind is
encoded, by itself, so that no token crosses the border: sampled tokens are fed again as they were sampled, however the
tokenizer would split their text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.records.conversations import RequestRefused, ToolFormat
from headway.records.errors import ConfigurationError
from headway.records.tokens import TokenIds
from headway.tokens.format_probe import output_format
from headway.tokens.messages import Message, require_encodable, same_answer, shared_beginning, template_form
from headway.tokens.output_parsing import begins_inside_reasoning, parse_output, response_text
from headway.tokens.pieces import PieceEncoder
from headway.tokens.tokenizer import Tokenizer

_MOST_ENDS = 16  # places tried for the end of an answer; each is a text that would end it, inside the answer or behind
_SENTINEL = "\U0010f8a3"  # private use: no text has it by accident


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswer:
    """A sampled answer: the parts of it that prompts continuing it depend on."""

    ids: TokenIds  # as sampled, the token that ended it included
    message: Message  # the message that the client got
    calls: bool = True  # its request allowed tool calls
    opened: bool = False  # it began inside reasoning
    stop: tuple[str, ...] = ()  # strings that ended it


class Chat:
    """A model folder's tokenizer and chat template, for requests that continue each other."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolFormat = "auto") -> None:
        self.tokenizer = tokenizer
        self.written = output_format(tokenizer, tools)
        self._pieces = PieceEncoder(tokenizer)
        self._endings = [text for i in tokenizer.stop_ids if (text := tokenizer.token(i))]
        self._closing: str | None = None  # cache of `_closer`

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a prompt. Raises RequestRefused where the template refuses the messages."""
        try:
            text = self.tokenizer.render_messages(
                template_form(messages, reasoning_field=self.tokenizer.templates.reads_reasoning(tools)),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
        except ConfigurationError as error:
            raise RequestRefused(str(error), param="messages") from None
        return require_encodable(text, "messages")

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> str:
        """The text that an answer is sampled after. ``continues``: the last message is the answer's beginning, whose
        text ends the prompt. Raises RequestRefused as `render`, and where the template leaves that text out."""
        if not continues:
            return self.render(messages, tools, variables)
        last = messages[-1]
        begun = replace(last, content=last.content + _SENTINEL, written=last.written and last.written + _SENTINEL)
        text = self.render([*messages[:-1], begun], tools, variables, add_generation_prompt=False)
        before, found, _ = text.rpartition(_SENTINEL)
        if not found or not before.endswith(last.content.lstrip()):  # what stands before it, a template may trim
            what = "the chat template doesn't end with a final message of the assistant, so that it can't be continued"
            raise RequestRefused(f"messages: {what}", param="messages")
        return before

    def answer(
        self,
        ids: Sequence[int],
        prompt: str,
        *,
        calls: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: tuple[str, ...] = (),
        call_prefix: str = "call_",
    ) -> SampledAnswer:
        """The answer sampled after the text ``prompt``, as a message. ``calls``, ``tools``, ``call_prefix``: as in
        `parse_output`."""
        opened = begins_inside_reasoning(prompt, self.written)
        text = response_text(self.tokenizer, ids, self.written, stop)
        message = parse_output(text, self.written, calls=calls, opened=opened, tools=tools, call_prefix=call_prefix)
        return SampledAnswer(ids=TokenIds(ids), message=message, calls=calls, opened=opened, stop=stop)

    def behind(
        self,
        answer: SampledAnswer,
        text: str,
        at: int,
        *,
        exactly: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int | None:
        """Position in the prompt ``text`` behind ``answer``, which begins at character ``at``; None when something else
        stands there (reasoning was dropped, say, or a call was reworded).

        The answer stands there when the text from ``at`` to an end of turn is the sampled text, or parses as the same
        message: a template may space arguments in its own way. The token that ended the answer isn't repeated; an
        answer that was cut short, or ended by a stop string, is closed as the template closes turns, if it does.
        ``exactly``: no template wrote the text, so only the sampled text itself will do. ``tools``: of the request.
        """
        sampled, ending = list(answer.ids), ""
        if sampled and sampled[-1] in self.tokenizer.stop_ids:
            ending = self.tokenizer.token(sampled.pop()) or ""
        body = self.tokenizer.decode(sampled, keep_special=True)
        literal = at + len(body) + len(ending) if text.startswith(body + ending, at) else None
        if exactly or (literal is not None and (ending or not self._closer())):
            return literal
        for end in self._ends(text, at):
            said = parse_output(text[at:end], self.written, calls=answer.calls, opened=answer.opened, tools=tools)
            if same_answer(answer.message, said):
                if literal is not None:  # the stop string may be what follows in any case
                    return literal
                return end + len(ending) if ending and text.startswith(ending, end) else end
        return None

    def _ends(self, text: str, at: int) -> list[int]:
        """Positions in ``text`` where the turn that begins at ``at`` may end, at most ``_MOST_ENDS``."""
        places: set[int] = set()
        for ending in filter(None, (*self._endings, self._closer())):
            found = text.find(ending, at)
            for _ in range(_MOST_ENDS):
                if found < 0:
                    break
                places.add(found)
                found = text.find(ending, found + 1)
        return sorted(places)[:_MOST_ENDS]

    def _closer(self) -> str:
        """The text that the template always puts behind an assistant's turn; "" when it can't be determined."""
        if self._closing is None:
            ends = (end for end in self.tokenizer.templates.turn_ends() if not end.calls)
            # a template may close the conversation too: what both have
            self._closing = next((shared_beginning(end.own, end.followed) for end in ends), "")
        return self._closing

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a whole prompt; ``most``: as `Tokenizer.encode` has it."""
        return self._pieces.encode(text, most)

    def encode_behind(self, before: int | None, text: str, most: int | None = None) -> list[int]:
        """Token ids of ``text`` that follows the token ``before``: `Tokenizer.encode_behind`."""
        return self.tokenizer.encode_behind(before, text, most)
