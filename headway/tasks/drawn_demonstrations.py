"""The demonstrations that a run trains beside its rollouts: read once, drawn for each step (``[demonstrations]``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from headway.config.schema import Experiment
from headway.records.errors import BufferCorrupt, ConfigurationError
from headway.records.rollout import LoggedDemonstrations
from headway.records.tokens import TokenIds, TokenMask
from headway.records.training import DrawnDemonstration
from headway.tasks.sft_data import SftTokens, read_tokens
from headway.tokens.tokenizer import Tokenizer


class Demonstrations:
    """The rows of ``demonstrations.data``, encoded. Rows are named by their number among those with something to learn.

    A step's rows depend on ``run.seed`` and the step alone: every row once, in a random order, then all again in
    another."""

    def __init__(self, rows: SftTokens, per_step: int, seed: int) -> None:
        self._rows, self._per_step, self._seed = rows, per_step, seed
        self._starts_s = np.cumsum(rows.lengths_s) - rows.lengths_s
        content = rows.token_ids_n.tobytes() + rows.learned_n.tobytes() + rows.lengths_s.tobytes()
        self.digest = hashlib.blake2b(content, digest_size=8).hexdigest()

    @classmethod
    def read(cls, experiment: Experiment, tokenizer: Tokenizer) -> Demonstrations | None:
        """Read and encode the rows; None without ``demonstrations.data``. Raises ConfigurationError, naming the row,
        for one that can't be used or is longer than the context of a rollout, and where none can be learned."""
        settings, limit = experiment.demonstrations, experiment.max_sequence_tokens
        if settings.data is None:
            return None
        rows = read_tokens(settings.data, "demonstrations.data", experiment, tokenizer, limit, drops_long=False)
        return cls(rows, settings.per_step, experiment.run.seed)

    def __len__(self) -> int:
        return len(self._rows.lengths_s)

    def draw(self, step: int) -> LoggedDemonstrations:
        """Draw the rows of ``step``, in the order of training."""
        count, first, rows = len(self), step * self._per_step, list[int]()
        while len(rows) < self._per_step:
            epoch, index = divmod(first + len(rows), count)
            order = np.random.default_rng([self._seed, epoch]).permutation(count)
            rows += order[index : index + self._per_step - len(rows)].tolist()
        return LoggedDemonstrations(rows=tuple(rows), digest=self.digest)

    def take(self, logged: LoggedDemonstrations) -> Sequence[DrawnDemonstration]:
        """The rows that a batch's log names. Raises BufferCorrupt if the data isn't what they were drawn from."""
        if logged.digest != self.digest:
            raise BufferCorrupt(
                f"demonstrations.data isn't what the run's batches were drawn from (its tokens are {self.digest}, the "
                f"batch log has {logged.digest}): restore it, or begin another run"
            )
        return [self._drawn(row) for row in logged.rows]

    def _drawn(self, row: int) -> DrawnDemonstration:
        span = slice(start := int(self._starts_s[row]), start + int(self._rows.lengths_s[row]))
        ids, learned = self._rows.token_ids_n[span], self._rows.learned_n[span]
        return DrawnDemonstration(row=row, ids=TokenIds.view(ids), learned=TokenMask.view(learned))


def demonstrations_of(
    demonstrations: Demonstrations | None, logged: LoggedDemonstrations | None
) -> Sequence[DrawnDemonstration]:
    """The demonstrations of a logged batch. Raises BufferCorrupt as `Demonstrations.take`, and ConfigurationError if
    the run has none any more."""
    if logged is None:
        return ()
    if demonstrations is None:
        raise ConfigurationError("demonstrations.data = '': the run's batch log has demonstrations; valid: its data")
    return demonstrations.take(logged)
