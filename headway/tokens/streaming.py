"""An answer handed out while it is sampled: what is certain of it, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from headway.tokens.output_parsing import PYTHON_TAG, OutputFormat, certain, overlap
from headway.tokens.tokenizer import IncrementalDecoder, Tokenizer


class AnswerStream:
    """Pieces of reasoning and content that add up to those of the whole answer.

    Nothing handed out is ever taken back: text that may yet become part of a character, a stop string, a tool call or a
    mark of reasoning waits until that is decided. Tool calls come with the end.
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
        """``written``: how answers are written; None: plain text, all of it content. ``calls``, ``opened``: as of
        `parse_output`."""
        self._tokenizer = tokenizer
        self._written = written
        self._calls = calls
        self._opened = opened
        self._stop = tuple(filter(None, stop))
        self._decoder = IncrementalDecoder(tokenizer)
        self._pushed = 0
        tagged = written is not None and written.tools == "llama_json"
        self._tag = tokenizer.token_id(PYTHON_TAG) if tagged else None
        self._frozen = False  # behind that tag
        self._told = ["", ""]  # reasoning and content so far

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Pieces that ``ids``, all tokens so far, make certain: reasoning and content."""
        for token in ids[self._pushed :]:
            self._frozen |= token == self._tag
            if not self._frozen and token not in self._tokenizer.stop_ids:
                self._decoder.push(token)
        self._pushed = max(self._pushed, len(ids))
        text = self._before_stop(self._decoder.settled)
        if self._written is None:
            return self._tell("", text)
        return self._tell(*certain(text, self._written, calls=self._calls, opened=self._opened))

    def finish(self, reasoning: str, content: str) -> tuple[str, str]:
        """The last pieces, of an answer that is whole."""
        return self._tell(reasoning, content)

    def _tell(self, *whole: str) -> tuple[str, str]:
        pieces: list[str] = []
        for place, text in enumerate(whole):
            told = self._told[place]
            if not text.startswith(told):  # a shorter one: nothing new is certain
                pieces.append("")
                continue
            pieces.append(text[len(told) :])
            self._told[place] = text
        return pieces[0], pieces[1]

    def _before_stop(self, text: str) -> str:
        """Up to the first stop string, or to what may become one."""
        end = len(text)
        for stop in self._stop:
            found = text.find(stop)
            if found < 0:
                found = len(text) - overlap(text, stop)
            end = min(end, found)
        return text[:end]
