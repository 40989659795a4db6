"""Streaming of an answer while it is sampled, in pieces that later tokens can't change."""

from __future__ import annotations

from collections.abc import Sequence

from headway.tokens.output_parsing import OutputFormat, certain, kept_ids, overlap
from headway.tokens.tokenizer import IncrementalDecoder, Tokenizer


class AnswerStream:
    """Pieces of reasoning and content that add up to those of the whole answer.

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
        self._left_out = tokenizer.special_ids.union(tokenizer.stop_ids)
        if written is not None:
            self._left_out -= kept_ids(tokenizer, written)
        self._pushed = 0
        self._told = ["", ""]  # reasoning and content so far

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """New pieces of (reasoning, content) that ``ids``, all tokens so far, make certain."""
        for token in ids[self._pushed :]:
            if token not in self._left_out:
                self._decoder.push(token)
        self._pushed = max(self._pushed, len(ids))
        text = self._before_stop(self._decoder.settled)
        if self._written is None:
            return self._tell("", text)
        return self._tell(*certain(text, self._written, calls=self._calls, opened=self._opened))

    def finish(self, reasoning: str, content: str) -> tuple[str, str]:
        """The last pieces of (reasoning, content), given those of the whole answer."""
        return self._tell(reasoning, content)

    def _tell(self, *whole: str) -> tuple[str, str]:
        pieces: list[str] = []
        for place, text in enumerate(whole):
            known = text if text.startswith(self._told[place]) else self._told[place]  # shorter: nothing new is certain
            pieces.append(known.removeprefix(self._told[place]))
            self._told[place] = known
        return pieces[0], pieces[1]

    def _before_stop(self, text: str) -> str:
        """``text`` up to the first stop string, or to a suffix that may become one."""
        ends = (at if (at := text.find(stop)) >= 0 else len(text) - overlap(text, stop) for stop in self._stop)
        return text[: min(ends, default=len(text))]
