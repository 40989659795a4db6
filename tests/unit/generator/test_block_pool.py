"""The block pool leaks no block and shares none wrongly, whatever the schedule."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, PADDING, BlockPool, blocks_for

ROWS, CONTEXT = 6, 4 * BLOCK_TOKENS


class Schedule:
    """A pool beside the plain truth: what each row would read at each of its positions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.blocks = self.rng.randint(blocks_for(CONTEXT), ROWS * blocks_for(CONTEXT))
        self.pool = BlockPool(ROWS, CONTEXT, self.blocks)
        self.cells = np.full((self.blocks + 1, BLOCK_TOKENS), -1)  # what is written in them
        self.tokens: list[list[int]] = []  # of rows 0, 1, ...
        self.next_token = 0

    def require_sound(self) -> None:
        tables = self.pool.tables
        for row in range(ROWS):
            tokens = self.tokens[row] if row < len(self.tokens) else []
            listed = np.flatnonzero(tables[row] != PADDING)
            assert listed.tolist() == list(range(len(listed)))
            assert len(listed) >= blocks_for(len(tokens))
            assert len(listed) == 0 or row < len(self.tokens)
            read = [self.cells[tables[row, at // BLOCK_TOKENS], at % BLOCK_TOKENS] for at in range(len(tokens))]
            assert read == tokens
        counts = np.bincount(tables[tables != PADDING], minlength=self.blocks + 1)
        assert counts[1:].tolist() == self.pool.references[1:].tolist()
        free = self.pool._free
        assert sorted(free) == np.flatnonzero(counts[1:] == 0).__add__(1).tolist()
        assert self.pool.used + self.pool.free == self.blocks

    def write(self, row: int, first: int, tokens: list[int]) -> None:
        for at, token in enumerate(tokens, first):
            self.cells[self.pool.tables[row, at // BLOCK_TOKENS], at % BLOCK_TOKENS] = token

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        assert len({target for _, target in pairs}) == len(pairs)
        self.cells[[target for _, target in pairs]] = self.cells[[source for source, _ in pairs]]

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def admit(self) -> None:
        """A request alone, or a sibling of one whose prompt is computed in this step or was before."""
        if len(self.tokens) == ROWS:
            return
        row, rng = len(self.tokens), self.rng
        kind = rng.choice(["alone", "together", "later"]) if self.tokens else "alone"
        if kind == "alone":
            count = rng.randint(1, CONTEXT - 1)
            if blocks_for(count) > self.pool.free:
                return
            self.tokens.append(self.new_tokens(count))
            self.pool.allocate(row, count)
            self.write(row, 0, self.tokens[row])
            return
        source = rng.randrange(row)
        shared = rng.randint(1, len(self.tokens[source]))
        if kind == "together":
            shared = len(self.tokens[source])
            assert self.pool.share(source, row, shared) == []
        elif self.pool.free:
            self.copy(self.pool.share(source, row, shared, copy_last=True))
        else:
            return
        self.tokens.append(self.tokens[source][:shared])

    def step(self) -> None:
        """A token for every row, the youngest preempted until they fit."""
        self.tokens = [tokens for tokens in self.tokens if tokens]
        for row in reversed(range(len(self.tokens))):
            if len(self.tokens[row]) == CONTEXT:
                self.release(row)
        while self.pool.shortage(self.position()):
            self.release(len(self.tokens) - 1)
        self.copy(self.pool.extend(self.position()))
        for row, tokens in enumerate(self.tokens):
            token = self.new_tokens(1)
            self.write(row, len(tokens), token)
            tokens += token
        assert self.pool.shortage(self.position() - 1) == 0

    def position(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    def release(self, row: int) -> None:
        last = len(self.tokens) - 1
        self.pool.release(row)
        if row != last:
            self.pool.move(last, row)
            self.tokens[row] = self.tokens[last]
        self.tokens.pop()

    def update(self) -> None:
        """All KV is computed anew: each row's in blocks of its own, or a row's beginning in another one's blocks."""
        if self.rng.random() < 0.5 and ROWS * blocks_for(CONTEXT) == self.blocks:
            for row in range(len(self.tokens)):
                self.pool.own(row)
            assert self.pool.references.max() <= 1
        elif len(self.tokens) > 1:
            source, target = self.rng.sample(range(len(self.tokens)), 2)
            equal = 0
            while equal < min(map(len, (self.tokens[source], self.tokens[target]))) and (
                self.tokens[source][equal] == self.tokens[target][equal]
            ):
                equal += 1
            if equal and self.pool.free:
                self.copy(self.pool.share(source, target, equal, copy_last=True))
        for row, tokens in enumerate(self.tokens):
            self.write(row, 0, tokens)


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_no_block_is_leaked_or_shared_wrongly(first):
    """Admission, sharing, steps, preemption, updates: 1,000 random schedules."""
    for seed in range(first, first + 250):
        schedule = Schedule(seed)
        for _ in range(30):
            kind = schedule.rng.choice(["admit", "admit", "step", "step", "step", "release", "update"])
            if kind == "release" and schedule.tokens:
                schedule.release(schedule.rng.randrange(len(schedule.tokens)))
            elif kind != "release":
                getattr(schedule, kind)()
            schedule.require_sound()
        while schedule.tokens:
            schedule.release(0)
        schedule.require_sound()
        assert schedule.pool.used == 0


def test_siblings_copy_the_last_block_of_their_prompt_once_they_differ():
    pool = BlockPool(3, 64, 8)
    pool.allocate(0, 20)
    for row in (1, 2):
        assert pool.share(0, row, 20) == []
    assert pool.used == 2
    pairs = pool.extend(np.array([20, 20, 20]))
    assert [source for source, _ in pairs] == [int(pool.tables[2, 1])] * 2  # the last one keeps it
    assert pool.used == 4
    assert pool.extend(np.array([21, 21, 21])) == []
    assert len(set(pool.tables[:, 1].tolist())) == 3
    assert len(set(pool.tables[:, 0].tolist())) == 1
