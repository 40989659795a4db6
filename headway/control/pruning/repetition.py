"""Detects repetitive responses: exact loops, and windows with a large share of repeated n-grams."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence


def loop_period(ids: Sequence[int], *, longest_period: int, repeats: int, loop_tokens: int) -> int | None:
    """Return the shortest period (tokens) with which the end of ``ids`` repeats exactly; None when it doesn't.

    A period p counts when the last max(p x repeats, loop_tokens) tokens are periodic in it: at least ``repeats`` times
    the same p tokens (>= 2), over at least ``loop_tokens``. Of the periods up to ``longest_period`` only those are
    tried at which the last token occurred before, which usually ends the search at once.

    Example: 7 1 2 1 2 1 2 with repeats = 3 and loop_tokens = 6: period 2. With loop_tokens = 7: none.
    """
    length = len(ids)
    if length < max(2, loop_tokens):
        return None
    recent_ids = list(ids[max(0, length - 1 - longest_period) : length - 1])
    last_id = ids[-1]
    if last_id not in recent_ids:
        return None
    for period in range(1, len(recent_ids) + 1):
        if recent_ids[-period] != last_id:
            continue
        tail = max(period * repeats, loop_tokens)
        if period < tail <= length and ids[length - tail + period :] == ids[length - tail : length - period]:
            return period
    return None


class NgramWindow:
    """The share of repeated n-grams in the last ``window_tokens`` tokens: 1 - distinct / all runs of ``ngram`` tokens.

    Call ``extend`` with all tokens so far, any number of times: each new token costs O(1), memory is one window. The
    share is 0.0 until the window is full, so a short response raises no alarm.

    Example, window 6, ngram 2, tokens 1 2 1 2 1 2: runs 12 21 12 21 12, two kinds of five: share 0.6.
    """

    def __init__(self, window_tokens: int, ngram: int) -> None:
        if not 0 < ngram < window_tokens:
            raise ValueError(f"runs of {ngram} tokens in a window of {window_tokens}")
        self._ngram = ngram
        self._most = window_tokens - ngram + 1  # runs in a full window
        self._runs: deque[tuple[int, ...]] = deque()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._seen = 0  # tokens taken in

    def extend(self, ids: Sequence[int]) -> None:
        """Add the tokens that ``ids`` has gained since the last call (it only ever grows)."""
        first_index = max(self._seen, self._ngram - 1, len(ids) - self._most)
        if first_index > max(self._seen, self._ngram - 1):  # all earlier tokens have left the window
            self._runs.clear()
            self._counts.clear()
        fresh_ids = tuple(ids[first_index - self._ngram + 1 :])
        for begin in range(len(ids) - first_index):
            run = fresh_ids[begin : begin + self._ngram]
            self._runs.append(run)
            self._counts[run] += 1
            if len(self._runs) > self._most:
                dropped_run = self._runs.popleft()
                self._counts[dropped_run] -= 1
                if not self._counts[dropped_run]:
                    del self._counts[dropped_run]
        self._seen = max(self._seen, len(ids))

    @property
    def repeated_share(self) -> float:
        """The share of repeated runs, 0 to 1 - 1 / runs; 0.0 while the window isn't full."""
        if len(self._runs) < self._most:
            return 0.0
        return 1.0 - len(self._counts) / self._most
