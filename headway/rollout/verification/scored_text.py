"""Conversion of a response's tokens to the text that verifiers score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from headway.config.schema import Experiment
from headway.records.clients import TextCodec
from headway.records.rollout import Rollout
from headway.rollout.verification.extraction import without_reasoning
from headway.tokens.format_probe import output_format
from headway.tokens.output_parsing import OutputFormat
from headway.tokens.tokenizer import Tokenizer

_END_OF_PROMPT = 16  # tokens: more than a mark of reasoning and the blanks behind it


class ScoredText:
    """Decodes tokens to the scored text, without the stop string that ended them and without the reasoning marked by
    the chat template: the answer follows its end mark. ``written``: the template's format; None keeps reasoning."""

    def __init__(self, codec: TextCodec, stop: Sequence[str] = (), written: OutputFormat | None = None) -> None:
        self._codec, self._stop = codec, tuple(filter(None, stop))
        self._written = written if written is not None and written.reasoning else None

    @classmethod
    def of(cls, experiment: Experiment, codec: TextCodec) -> ScoredText:
        """Make the decoder of a run: with ``rollout.stop``, and the template's marks unless ``verifier.reasoning``."""
        excludes_reasoning = experiment.model.template == "chat" and not experiment.verifier.reasoning
        has_marks = excludes_reasoning and isinstance(codec, Tokenizer)
        return cls(codec, experiment.rollout.stop, output_format(cast("Tokenizer", codec)) if has_marks else None)

    def rollout(self, rollout: Rollout) -> str:
        """Return the text of ``rollout`` that a verifier scores."""
        ids = rollout.judged_ids
        preceding_ids = rollout.response_ids[: len(rollout.response_ids) - len(ids)] or rollout.prompt_ids
        return self(preceding_ids, ids)

    def __call__(self, preceding_ids: Sequence[int], ids: Sequence[int]) -> str:
        """Return the scored text of ``ids``, sampled after ``preceding_ids``."""
        text, text_before_last = self._decode(ids), self._decode(ids[:-1]) if self._stop else ""
        positions = (text.find(stop, max(0, len(text_before_last) - len(stop) + 1)) for stop in self._stop)
        if stop_positions := [position for position in positions if position >= 0]:
            text = text[: min(stop_positions)]
        if self._written is None:
            return text
        opening, closing = self._written.thought
        is_opened = self._decode(preceding_ids[-_END_OF_PROMPT:]).rstrip().endswith(opening)
        answer = without_reasoning(text, opening, closing, opened=is_opened)
        return answer.removeprefix(self._written.content_mark)

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids``; special tokens that are marks of the format are kept."""
        codec, layout = cast("Any", self._codec), self._written
        marks = () if layout is None else (*layout.thought, layout.content_mark)
        kept_ids = {i for token, i in (layout.special if layout else ()) if any(token in mark for mark in marks)}
        if not kept_ids:
            return self._codec.decode(ids)
        return codec.decode([i for i in ids if i in kept_ids or i not in codec.special_ids], keep_special=True)
