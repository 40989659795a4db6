"""The letters by which a token policy reads observations and acts: bins of numbers, with blanks between them.

A tokenizer then has a token for each, where letters side by side would become tokens of several.

Shapes: b lanes, i inputs of the prompt, d numbers of a chunk: its actions one after another, dimension by dimension.
"""

from __future__ import annotations

import re
import string

import numpy as np

from headway.config.simulation import PolicyConfig
from headway.embodied.records import Array, Box, Discrete
from headway.records.errors import ConfigurationError

LETTERS = string.ascii_letters + string.digits  # of bins, by their numbers
_INPUT = re.compile(r"(\d+)(?:\s*-\s*(\d+))?(?:\s+in\s+(\S+)\.\.(\S+))?")


class ObservationCode:
    """Writes the prompts of observations: `PolicyConfig.template` with a letter for each input.

    Example: ``inputs = ["36-0 in -0.3..0.3"]`` with 21 bins: an observation whose number 36 exceeds number 0 by 0.3 or
    more has the letter "u", one in which they are equal "k"."""

    def __init__(self, settings: PolicyConfig, observations: Box) -> None:
        """Raises ConfigurationError for pictures, an input that the observations don't have, and one without bounds."""
        if observations.is_picture:
            raise ConfigurationError(
                f"the simulator's observations are pictures, {observations}: token policies read numbers; valid: a Box "
                "of numbers (pictures: a policy without [model])"
            )
        self._template, self._last = settings.template, settings.observation_bins - 1
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (observations.low, observations.high))
        parsed = [_parsed(text, low, high) for text in settings.inputs or [str(i) for i in range(low.size)]]
        self._first_i, self._minus_i = (np.array([row[column] for row in parsed]) for column in (0, 1))
        self._low_i, self._high_i = (np.array([row[column] for row in parsed]) for column in (2, 3))

    def texts(self, observations_b: Array) -> list[str]:
        """The prompts [b] of observations [b, ...]. Numbers beyond their bounds have the letters of these."""
        numbers_b = observations_b.reshape(len(observations_b), -1).astype(np.float64)
        subtracted_bi = np.where(self._minus_i < 0, 0.0, numbers_b[:, self._minus_i])
        shares_bi = (numbers_b[:, self._first_i] - subtracted_bi - self._low_i) / (self._high_i - self._low_i)
        return [self._template.replace("{inputs}", _letters(shares_i, self._last)) for shares_i in shares_bi]


class ActionCode:
    """Converts the actions of a chunk to letters, and back: the middle of a dimension's bins is the middle of its
    bounds, the first and last are these."""

    def __init__(self, settings: PolicyConfig, actions: Box | Discrete) -> None:
        """Raises ConfigurationError for actions without bounds, and too many choices."""
        if isinstance(actions, Discrete):
            low, high, bins = np.zeros(1), np.array([actions.count - 1.0]), actions.count
        else:
            low, high, bins = (*(b.astype(np.float64) for b in (actions.low, actions.high)), settings.action_bins)
        if bins > len(LETTERS) or not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigurationError(
                f"the simulator's actions are {actions}; valid with [model]: a Box with bounds, or Discrete of at most "
                f"{len(LETTERS)}"
            )
        self._low_d, self._high_d = np.tile(low, settings.chunk), np.tile(high, settings.chunk)
        self._last = bins - 1
        self.dimensions, self.letters = low.size, self._low_d.size  # of an action, of a response
        self.chunk = Box(low=self._low_d.astype(np.float32), high=self._high_d.astype(np.float32))  # of all its numbers

    @property
    def grammar(self) -> str:
        """The grammar of responses."""
        letter = f"[{LETTERS[: self._last + 1]}]"
        return f"start: /{letter}( {letter}){{{self.letters - 1}}}/\n"

    def actions(self, response: str) -> Array:
        """The numbers [d] of a response, float32. Raises ValueError for a text that the grammar doesn't allow."""
        bins_d = np.array([LETTERS.index(letter) for letter in response.split()])
        if bins_d.size != self.letters or bins_d.max() > self._last:
            raise ValueError(f"{response!r} is no chunk of actions; valid: {self.letters} letters")
        return (self._low_d + bins_d * (self._high_d - self._low_d) / self._last).astype(np.float32)

    def text(self, actions_d: Array) -> str:
        """The response nearest to the numbers [d] of a chunk."""
        return _letters((actions_d - self._low_d) / (self._high_d - self._low_d), self._last)


def _letters(shares_i: Array, last: int) -> str:
    """The letters of positions between two bounds, 0 to 1. ``last``: number of the last bin."""
    return " ".join(LETTERS[number] for number in np.rint(shares_i * last).clip(0, last).astype(int).tolist())


def _parsed(text: str, low: Array, high: Array) -> tuple[int, int, float, float]:
    """An input: its number, the number that is subtracted (-1: none), and its bounds."""
    match = _INPUT.fullmatch(text)
    if match is None:
        raise ConfigurationError(f'policy.inputs: {text!r}; valid: "36", "36 in 0..1", or "36-0 in -0.3..0.3"')
    first, minus = int(match[1]), -1 if match[2] is None else int(match[2])
    if max(first, minus) >= low.size:
        raise ConfigurationError(f"policy.inputs: {text!r}; valid: numbers from 0 to {low.size - 1}")
    if match[3] is not None:
        bounds = float(match[3]), float(match[4])
    elif minus < 0:
        bounds = float(low[first]), float(high[first])
    else:
        bounds = float(low[first] - high[minus]), float(high[first] - low[minus])
    if not (np.isfinite(bounds).all() and bounds[0] < bounds[1]):
        raise ConfigurationError(
            f'policy.inputs: {text!r} is in {bounds[0]:g}..{bounds[1]:g}; valid: finite bounds, as "{text} in -1..1"'
        )
    return first, minus, *bounds
