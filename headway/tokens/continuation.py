"""Prompts of chat requests that continue earlier answers: known tokens are reused, and only the rest is encoded.

The template renders the whole conversation as text. As far as that text equals an earlier prompt, the prompt's tokens
are reused; where the answer sampled after it follows, the sampled tokens are. Only the text after them is encoded, by
itself, so that no token crosses the border: sampled tokens are fed again as they were sampled, however the tokenizer
would split their text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.records.conversations import RequestRefused, ToolFormat
from headway.records.errors import ConfigurationError
from headway.records.tokens import TokenIds
from headway.tokens.format_probe import output_format
from headway.tokens.messages import Message, common_prefix, require_encodable, same_answer, template_form
from headway.tokens.output_parsing import begins_inside_reasoning, parse_output, response_text
from headway.tokens.piece_cache import PieceEncoder
from headway.tokens.tokenizer import Tokenizer

_MOST_ENDS = 16  # positions tried as the end of an answer: each has a text that ends turns, in the answer or after it
_SENTINEL = "\U0010f8a3"  # private use: no text has it by accident


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswer:
    """A sampled answer, with all that prompts which continue it depend on."""

    ids: TokenIds  # as sampled, the token that ended it included
    message: Message  # the message that the client got
    calls: bool = True  # its request allowed tool calls
    opened: bool = False  # it began inside reasoning
    stop: tuple[str, ...] = ()  # strings that ended it


class Chat:
    """The tokenizer and chat template of a model folder, for requests that continue earlier ones."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolFormat = "auto") -> None:
        self.tokenizer = tokenizer
        self.written = output_format(tokenizer, tools)
        self._pieces = PieceEncoder(tokenizer)
        self._endings = [text for i in tokenizer.stop_ids if (text := tokenizer.token(i))]
        self._cached_turn_suffix: str | None = None  # cache of `_turn_suffix`

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the text of a prompt. Raises RequestRefused where the template refuses the messages."""
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
        """Render the text that an answer is sampled after. ``continues``: the last message is the beginning of the
        answer, whose text ends the prompt. Raises RequestRefused as `render`, and where the template leaves that text
        out."""
        if not continues:
            return self.render(messages, tools, variables)
        last = messages[-1]
        marked = replace(last, content=last.content + _SENTINEL, written=last.written and last.written + _SENTINEL)
        text = self.render([*messages[:-1], marked], tools, variables, add_generation_prompt=False)
        prefix, separator, _ = text.rpartition(_SENTINEL)
        if not separator or not prefix.endswith(last.content.lstrip()):  # a template may trim leading white space
            fault = "the chat template doesn't end with a final message of the assistant, so that it can't be continued"
            raise RequestRefused(f"messages: {fault}", param="messages")
        return prefix

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
        """Parse the answer sampled after the text ``prompt``. ``calls``, ``tools``, ``call_prefix``: as in
        `parse_output`."""
        opened = begins_inside_reasoning(prompt, self.written)
        text = response_text(self.tokenizer, ids, self.written, stop)
        message = parse_output(text, self.written, calls=calls, opened=opened, tools=tools, call_prefix=call_prefix)
        return SampledAnswer(ids=TokenIds(ids), message=message, calls=calls, opened=opened, stop=stop)

    def answer_end(
        self,
        answer: SampledAnswer,
        text: str,
        start: int,
        *,
        exactly: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int | None:
        """Find the end of ``answer`` in the prompt ``text``, where it begins at character ``start``; None when another
        text stands there (reasoning was dropped, say, or a call was reworded).

        The answer stands there when the text from ``start`` to an end of turn is the sampled text, or parses as the
        same message: a template may space arguments in its own way. The position is after the token that ended the
        answer; an answer that was cut short, or ended by a stop string, is closed as the template closes turns, if it
        does. ``exactly``: no template wrote the text, so only the sampled text itself matches. ``tools``: of the
        request.
        """
        sampled_ids, stop_text = list(answer.ids), ""
        if sampled_ids and sampled_ids[-1] in self.tokenizer.stop_ids:
            stop_text = self.tokenizer.token(sampled_ids.pop()) or ""
        body_text = self.tokenizer.decode(sampled_ids, keep_special=True)
        literal_end = start + len(body_text) + len(stop_text) if text.startswith(body_text + stop_text, start) else None
        if exactly or (literal_end is not None and (stop_text or not self._turn_suffix())):
            return literal_end
        for end in self._possible_ends(text, start):
            message = parse_output(text[start:end], self.written, calls=answer.calls, opened=answer.opened, tools=tools)
            if same_answer(answer.message, message):
                if literal_end is not None:  # the stop string may be what follows in any case
                    return literal_end
                return end + len(stop_text) if stop_text and text.startswith(stop_text, end) else end
        return None

    def _possible_ends(self, text: str, start: int) -> list[int]:
        """Return positions in ``text`` where the turn that begins at ``start`` may end, at most ``_MOST_ENDS``."""
        positions: set[int] = set()
        for ending in filter(None, (*self._endings, self._turn_suffix())):
            position = text.find(ending, start)
            for _ in range(_MOST_ENDS):
                if position < 0:
                    break
                positions.add(position)
                position = text.find(ending, position + 1)
        return sorted(positions)[:_MOST_ENDS]

    def _turn_suffix(self) -> str:
        """Return the text that the template always writes after an assistant's turn; "" when it can't be determined."""
        if self._cached_turn_suffix is None:
            ends = (end for end in self.tokenizer.templates.turn_ends() if not end.calls)
            # a template may close the conversation too, so only the text common to both is the turn's
            self._cached_turn_suffix = next((common_prefix(end.final, end.followed) for end in ends), "")
        return self._cached_turn_suffix

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Encode a whole prompt; ``max_tokens``: as in `Tokenizer.encode`."""
        return self._pieces.encode(text, max_tokens)

    def encode_after(self, prior_id: int | None, text: str, max_tokens: int | None = None) -> list[int]:
        """Encode ``text`` as it continues the token ``prior_id``: `Tokenizer.encode_after`."""
        return self.tokenizer.encode_after(prior_id, text, max_tokens)
