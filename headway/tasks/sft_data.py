"""Reads the training data of `headway sft`: tokenises, filters and counts demonstrations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.config.schema import Experiment
from headway.config.sources import SftSource
from headway.records.errors import ConfigurationError
from headway.tasks.demonstrations import Conversation, Pair, read_demonstrations
from headway.tokens.conversation import Demonstration, encode_conversation, encode_pair
from headway.tokens.tokenizer import Tokenizer

_RARE = ("empty_turns", "stops_added", "template_drops")


@dataclass(frozen=True, kw_only=True)
class SftTokens:
    """All sequences, concatenated. Legend: ``_n`` one value per token, ``_s`` one per sequence."""

    token_ids_n: npt.NDArray[np.int32]
    learned_n: npt.NDArray[np.bool_]  # its prediction carries loss
    lengths_s: npt.NDArray[np.int64]
    # kept, dropped_too_long, dropped_empty, too_long_share, longest, mean, learned_share; where there are some
    # empty_turns, stops_added and template_drops, a text
    counts: dict[str, Any]


def read_sft_tokens(experiment: Experiment) -> SftTokens:
    """Read ``sft.data`` and tokenise it for the model. Sequences longer than ``sft.max_tokens`` and those with nothing
    to learn are dropped and counted (``longest`` and ``too_long_share`` count all).

    Raises ConfigurationError, naming the row, for one that can't be used, and when none is left.
    """
    settings = experiment.sft
    assert settings.data is not None
    try:
        tokenizer = Tokenizer.of(experiment)
    except ConfigurationError as error:
        raise ConfigurationError(f"model.path, from which sft starts: {error}") from None
    return read_tokens(settings.data, "sft.data", experiment, tokenizer, settings.max_tokens)


def read_tokens(
    source: SftSource,
    key: str,
    experiment: Experiment,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    drops_long: bool = True,
) -> SftTokens:
    """Read and tokenise the rows of ``source``, the value of ``key``, as `read_sft_tokens` does. ``drops_long`` False:
    one longer than ``max_tokens`` is an error."""
    kept_ids: list[npt.NDArray[np.int32]] = []  # arrays: lists of Python integers would take ten times the memory
    kept_learned: list[npt.NDArray[np.bool_]] = []
    too_long = empty = empty_turns = longest_tokens = 0
    drop_counts = Counter[str]()
    for location, row in read_demonstrations(source):
        try:
            demonstration = _encode(row, tokenizer, experiment)
        except ConfigurationError as error:
            raise ConfigurationError(f"{location}: {error}") from None
        if demonstration is None:
            empty += 1
            continue
        longest_tokens = max(longest_tokens, len(demonstration.ids))
        empty_turns += demonstration.empty_turns
        drop_counts.update(demonstration.dropped)
        if len(demonstration.ids) > max_tokens:
            if not drops_long:
                raise ConfigurationError(
                    f"{location}: {len(demonstration.ids):,} tokens, more than the context of {max_tokens:,} "
                    "(rollout.max_prompt_tokens + max_response_tokens): raise it, or leave the row out"
                )
            too_long += 1
            continue
        kept_ids.append(np.asarray(demonstration.ids, np.int32))
        kept_learned.append(np.asarray(demonstration.learned, np.bool_))
    row_count = len(kept_ids) + too_long + empty
    if not kept_ids:
        problem_text = "no rows; pairs or conversations are needed" if not row_count else (
            f"no row is left ({too_long} longer than {max_tokens} tokens, {empty} with an empty "
            "prompt or answer)"
        )  # fmt: skip
        raise ConfigurationError(f"{key} = {source.display_name!r}: {problem_text}")
    lengths_s = np.fromiter(map(len, kept_ids), np.int64, len(kept_ids))
    learned_n = np.concatenate(kept_learned)
    row_figures: dict[str, Any] = {
        "kept": len(kept_ids),
        "dropped_too_long": too_long,
        "dropped_empty": empty,
        "too_long_share": too_long / row_count,
        "longest": longest_tokens,
        "mean": float(lengths_s.mean()),
        "learned_share": float(learned_n.mean()),
        "empty_turns": empty_turns,
        "stops_added": ", ".join(tokenizer.added_stops),
        "template_drops": ", ".join(f"{part} ({count} rows)" for part, count in sorted(drop_counts.items())),
    }
    row_figures = {key: figure for key, figure in row_figures.items() if figure or key not in _RARE}
    return SftTokens(token_ids_n=np.concatenate(kept_ids), learned_n=learned_n, lengths_s=lengths_s, counts=row_figures)


def _encode(row: Pair | Conversation, tokenizer: Tokenizer, experiment: Experiment) -> Demonstration | None:
    template, train_on = experiment.model.template, experiment.sft.train_on
    if isinstance(row, Pair):
        return encode_pair(tokenizer, row.prompt, row.solution, template, train_on)
    if template != "chat":
        raise ConfigurationError(
            f"a conversation, which the chat template renders, and model.template = {template!r} would prompt the "
            "trained model without it: set model.template = 'chat'"
        )
    return encode_conversation(tokenizer, row.messages, row.tools, train_on)
