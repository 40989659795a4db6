"""Sizes of the loops of `benchmarks/tinker.py`, for its clients, too."""

from __future__ import annotations

import math

SL_ROWS, SL_TOKENS = 8, 60
RL_SAMPLES, RL_TOKENS, GROUP = 16, 32, 8
MEDIAN_TOKENS, SPREAD = 48, math.log(8) / 2.326  # log-normal lengths: their 99th percentile is 8 medians
LONGEST = 400
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29]
