"""The decoding step as a function of tensors that stay where they are, so that a GPU replays it as one graph.

Rows: first those that decode, then the tokens of short prompts, then padding, which writes to a block of its own.
Shapes: n decoding rows, r rows, w blocks of a row's table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.torch.block_pool import PADDING
from headway.generator.engines.torch.model_runner import ModelRunner, Prefill
from headway.generator.engines.torch.operators import sample
from headway.generator.engines.torch.slot_table import SlotTable

# Makes the replay of a function that reads and writes tensors at fixed addresses only.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
PROMPT_ROWS = 512  # tokens of prompts that a step computes as rows; with more, they are computed before it
_PROMPT_SIZES = (0, 64, PROMPT_ROWS)
_ID, _SOURCE, _POSITION, _SEED, _INDEX, _TEMPERATURE, _FIELDS = range(7)  # of a row, int64; its block table follows


class CudaGraphs:
    """Captures functions as CUDA graphs, which share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # what is made at a first call, such as compiled kernels, isn't captured
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others fetch weights
            function()
        return graph.replay


class Launch(NamedTuple):
    """A step that may still be computed."""

    tokens: Tensor  # [2, n] on the host: ids and log-probabilities, once it is done
    done: torch.cuda.Event | None

    def read(self) -> np.ndarray:
        """Wait for the step, and return its tokens [2, n]."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.numpy()


class DecodeStep:
    """Launches decoding steps without waiting for them: what a row decodes next may be a token that is still being
    sampled. A step takes one transfer to the device and one from it."""

    def __init__(self, runner: ModelRunner, slots: int, capture: Capture) -> None:
        self._runner, self._slots, self._capture = runner, slots, capture
        self._replays: dict[tuple[int, int], tuple[Tensor, Callable[[], None]]] = {}
        device, self._tables = runner.device, runner.cache.pool.tables
        columns, is_cuda = _FIELDS + -(-self._tables.shape[1] // 2), device.type == "cuda"
        self._shape = slots + PROMPT_ROWS, columns
        self._tokens = torch.zeros(2, slots, device=device)  # of the last step
        # Two of each: a step is prepared while the last one's are read.
        self._inputs = [torch.zeros(self._shape, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._outputs = [torch.zeros(2, slots, pin_memory=is_cuda) for _ in range(2)]
        self._launches = 0

    def forget(self) -> None:
        """Drop the captured steps, because weights or KV are at other addresses; they are captured again on demand."""
        self._replays.clear()

    def launch(
        self, table: SlotTable, position_n: np.ndarray, active_n: np.ndarray, prefills: Sequence[Prefill]
    ) -> Launch:
        """Begin a step of the table's first n rows, in which those that aren't active compute nothing. ``position``: of
        the tokens to decode. ``prefills``: prompts whose KV is computed in it, of at most `PROMPT_ROWS` tokens."""
        n, prompt_rows = len(position_n), sum(prefill.tokens for prefill in prefills)
        fixed = self._runner.fixed_shapes
        size = self._slots if fixed else min(self._slots, 1 << (n - 1).bit_length())
        key = size, next(rows for rows in _PROMPT_SIZES if rows >= prompt_rows)
        self._launches += 1
        host, output = (pair[self._launches % 2] for pair in (self._inputs, self._outputs))
        host = host[: sum(key)]
        rows = host.numpy()
        rows[:] = PADDING
        rows[:, _SOURCE] = -1
        decoding, tables = rows[:n], rows.view(np.int32)[:, 2 * _FIELDS : 2 * _FIELDS + self._tables.shape[1]]
        decoding[:, _ID], decoding[:, _SOURCE], decoding[:, _POSITION] = table.pending[:n], table.source[:n], position_n
        decoding[:, _SEED], decoding[:, _INDEX] = table.seed[:n].view(np.int64), position_n + 1 - table.prompt[:n]
        temperature_n = np.where(table.greedy[:n], np.float32(0), table.temperature[:n])
        decoding.view(np.float32)[:, 2 * _TEMPERATURE] = temperature_n
        tables[:n] = self._tables[:n]
        decoding[~active_n] = PADDING
        first = size
        for prefill in prefills:
            prompt = slice(first, first := first + prefill.tokens)
            rows[prompt, _ID] = np.asarray(prefill.ids[prefill.start :])
            rows[prompt, _POSITION] = np.arange(prefill.start, len(prefill.ids))
            tables[prompt] = self._tables[prefill.row]
        inputs, replay = self._replay(key)
        inputs.copy_(host, non_blocking=True)
        replay()
        tokens, done = output[:, :n], None
        tokens.copy_(self._tokens[:, :n], non_blocking=True)
        if self._tokens.is_cuda:
            done = torch.cuda.Event()
            done.record()
        return Launch(tokens, done)

    def _replay(self, key: tuple[int, int]) -> tuple[Tensor, Callable[[], None]]:
        if key not in self._replays:
            inputs = torch.zeros((sum(key), self._shape[1]), dtype=torch.int64, device=self._tokens.device)
            last_tokens = self._tokens.clone()  # the warm-up overwrites them
            self._replays[key] = inputs, self._capture(lambda: self.compute(inputs, key[0]))
            self._tokens.copy_(last_tokens)
        return self._replays[key]

    def compute(self, inputs: Tensor, n: int) -> None:
        """Compute the step of the rows ``inputs``, of which the first n sample: a pure function of tensors."""
        source_r = inputs[:, _SOURCE]
        sampled_ids = self._tokens[0].index_select(0, source_r.clamp(min=0)).long()
        ids_r = torch.where(source_r >= 0, sampled_ids, inputs[:, _ID])
        table_rw = inputs.view(torch.int32)[:, 2 * _FIELDS : 2 * _FIELDS + self._tables.shape[1]]
        logits = self._runner.logits(ids_r, inputs[:, _POSITION].contiguous(), table_rw, n)
        temperature_n = inputs.view(torch.float32)[:n, 2 * _TEMPERATURE]
        self._tokens[:, :n] = sample(logits, inputs[:n, _SEED], inputs[:n, _INDEX], temperature_n)
