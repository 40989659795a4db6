"""Streaming of an answer while it is sampled, in pieces that later tokens can't change."""

from __future__ import annotations

from collections.abc import Sequence

from headway.tokens.output_parsing import OutputFormat, mark_token_ids, overlap, settled_parts
from headway.tokens.tokenizer import IncrementalDecoder, Tokenizer


class AnswerStream:
    """Streams pieces of reasoning and content that add up to those of the whole answer.

    Pieces are final: text that may yet become part of a character, a stop string, a tool call or a mark of reasoning
    waits until that is decided. Tool calls come with the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        written: OutputFormat | None,
        *,
        calls: bool = False,
        opened: bool = False,
        stop: Sequence[str] = (),
    ) -> None:
        """``written``: the format of answers; None: plain text, all content. ``calls``, ``opened``: as in
        `parse_output`."""
        self._written = written
        self._calls = calls
        self._opened = opened
        self._stop = tuple(filter(None, stop))
        self._decoder = IncrementalDecoder(tokenizer, keep_special=True)
        self._skipped_ids = tokenizer.special_ids.union(tokenizer.stop_ids)
        if written is not None:
            self._skipped_ids -= mark_token_ids(tokenizer, written)
        self._pushed = 0
        self._sent = ["", ""]  # reasoning and content so far

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return the new pieces of (reasoning, content) that no token after ``ids``, all so far, can change."""
        for token in ids[self._pushed :]:
            if token not in self._skipped_ids:
                self._decoder.push(token)
        self._pushed = max(self._pushed, len(ids))
        text = self._before_stop(self._decoder.settled)
        if self._written is None:
            return self._new_pieces("", text)
        return self._new_pieces(*settled_parts(text, self._written, calls=self._calls, opened=self._opened))

    def finish(self, reasoning: str, content: str) -> tuple[str, str]:
        """Return the last pieces of (reasoning, content), from those of the whole answer."""
        return self._new_pieces(reasoning, content)

    def _new_pieces(self, *texts: str) -> tuple[str, str]:
        pieces: list[str] = []
        for index, text in enumerate(texts):
            final = text if text.startswith(self._sent[index]) else self._sent[index]  # shorter: nothing new is certain
            pieces.append(final.removeprefix(self._sent[index]))
            self._sent[index] = final
        return pieces[0], pieces[1]

    def _before_stop(self, text: str) -> str:
        """Cut ``text`` before the first stop string, or before a suffix that may become one."""
        ends = (start if (start := text.find(stop)) >= 0 else len(text) - overlap(text, stop) for stop in self._stop)
        return text[: min(ends, default=len(text))]
