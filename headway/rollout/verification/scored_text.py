"""The text of a response that verifiers are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from headway.config.schema import Experiment
from headway.records.clients import TextCodec
from headway.records.rollout import Rollout
from headway.rollout.verification.extraction import without_reasoning
from headway.tokens.output_parsing import THINK, THOUGHT, output_format

_END_OF_PROMPT = 16  # tokens: more than a mark of reasoning and the blanks behind it


class ScoredText:
    """Text of tokens without the stop string that ended them, and without what the chat template marks as reasoning:
    only what follows its end mark is an answer. ``marks``: of reasoning, None where it isn't marked or is wanted."""

    def __init__(self, codec: TextCodec, stop: Sequence[str] = (), marks: tuple[str, str] | None = None) -> None:
        self._codec, self._stop, self._marks = codec, tuple(filter(None, stop)), marks

    @classmethod
    def of(cls, experiment: Experiment, codec: TextCodec) -> ScoredText:
        """For a run: ``rollout.stop``, and the template's marks unless ``verifier.reasoning``."""
        asked = experiment.model.template == "chat" and not experiment.verifier.reasoning
        return cls(codec, experiment.rollout.stop, reasoning_marks(codec) if asked else None)

    def rollout(self, rollout: Rollout) -> str:
        """The text that a verifier of ``rollout`` is given."""
        ids = rollout.judged_ids
        before = rollout.response_ids[: len(rollout.response_ids) - len(ids)] or rollout.prompt_ids
        return self(before, ids)

    def __call__(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text of ``ids``, sampled behind ``before``."""
        text, but_last = self._decode(ids), self._decode(ids[:-1]) if self._stop else ""
        found = (text.find(stop, max(0, len(but_last) - len(stop) + 1)) for stop in self._stop)
        if ends := [at for at in found if at >= 0]:
            text = text[: min(ends)]
        if self._marks is None:
            return text
        opened = self._decode(before[-_END_OF_PROMPT:]).rstrip().endswith(self._marks[0])
        return without_reasoning(text, *self._marks, opened=opened)

    def _decode(self, ids: Sequence[int]) -> str:
        """Their text; marks are kept that are special tokens."""
        codec = cast("Any", self._codec)
        if self._marks is None or not (
            kept := {i for mark in self._marks if (i := codec.token_id(mark)) in codec.special_ids}
        ):
            return self._codec.decode(ids)
        return codec.decode([i for i in ids if i in kept or i not in codec.special_ids], keep_special=True)


def reasoning_marks(codec: TextCodec) -> tuple[str, str] | None:
    """The marks that a tokenizer's chat template puts around reasoning; None where it has none."""
    template: str | None = getattr(codec, "chat_template", None)
    return (THINK, THOUGHT) if template is not None and output_format(template).reasoning else None
