"""Loads a run's tokenizer, for commands and services that show its rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.records.errors import HeadwayError
from headway.report.watch.rollouts.text_index import TokenTable
from headway.runtime.run_directory import RunDirectory
from headway.tokens.tokenizer import Tokenizer


def run_tokenizer(run: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a run from its model's folder, else from a checkpoint; None: no tokenizer can be read."""
    directory = RunDirectory(run)
    folders = [directory.best, *directory.checkpoints.glob("step_*/model")]
    with contextlib.suppress(HeadwayError):
        folders.insert(0, Path(directory.read_experiment().model.path))
    for folder in folders:
        with contextlib.suppress(HeadwayError):
            return Tokenizer.load(folder)
    return None


def run_decoder(run: str | Path) -> Callable[[Sequence[int]], str] | None:
    """Return the decoder of a run's tokenizer; None: no tokenizer can be read."""
    tokenizer = run_tokenizer(run)
    return None if tokenizer is None else tokenizer.decode


def token_table(run: str | Path) -> TokenTable | None:
    """Return the texts of a run's tokens; None: no tokenizer can be read."""
    tokenizer = run_tokenizer(run)
    return None if tokenizer is None else TokenTable(tokenizer.vocabulary_bytes(), tokenizer.special_ids)
