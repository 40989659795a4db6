"""The curriculum's rules: what it may draw, when the band moves, and that its state is a fold over what happened."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.curriculum import CurriculumConfig
from headway.control.curriculum.beta import cumulative, group_size, interval, known_limits, mixed_probability
from headway.control.curriculum.curriculum import BAND_STEP, BAND_WINDOW_GROUPS, Band, Curriculum
from headway.control.curriculum.fenwick import WeightTree
from headway.records.curriculum import TaskEvidence
from headway.tasks.cursor import permutation

shapes = st.floats(0.05, 60.0)


# -- Beta ----------------------------------------------------------------------------------------------------


@given(shapes, shapes, st.integers(1, 24))
def test_mixed_probability_is_the_integral_over_rates(alpha, beta, size):
    draws = np.random.default_rng(0).beta(alpha, beta, 20_000)
    mixed = 1 - draws**size - (1 - draws) ** size
    got = mixed_probability(alpha, beta, size)
    assert 0 <= got <= 1
    assert got == pytest.approx(mixed.mean(), abs=5 * mixed.std() / math.sqrt(len(mixed)) + 1e-3)
    assert mixed_probability(alpha, beta, size + 1) >= got - 1e-12


def test_mixed_probability_of_a_uniform_rate_in_closed_form():
    for size in range(1, 20):
        assert mixed_probability(1.0, 1.0, size) == pytest.approx(1 - 2 / (size + 1))


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.0, 1.0))
def test_cumulative_is_the_binomial_tail(alpha, beta, x):
    n = alpha + beta - 1
    tail = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(alpha, n + 1))
    assert cumulative(alpha, beta, x) == pytest.approx(tail, abs=1e-9)


@given(shapes, shapes, st.floats(0.1, 0.99))
def test_an_interval_holds_its_mass(alpha, beta, mass):
    low, high = interval(alpha, beta, mass)
    assert 0 <= low <= high <= 1
    # a rate that is all but surely 0 or 1 has quantiles closer to them than a float can tell, or nearly so
    if low > 1e-12 and high < 1 - 1e-12:
        assert cumulative(alpha, beta, high) - cumulative(alpha, beta, low) == pytest.approx(mass, abs=1e-4)


@given(shapes, shapes, st.integers(2, 8), st.integers(0, 24), st.floats(0.001, 0.2))
def test_a_group_grows_exactly_while_a_member_is_worth_it(alpha, beta, smallest, more, gain):
    size = group_size(alpha, beta, smallest, smallest + more, gain)
    assert smallest <= size <= smallest + more
    gains = [mixed_probability(alpha, beta, n + 1) - mixed_probability(alpha, beta, n) for n in range(1, 40)]
    assert all(gains[n - 1] >= gain for n in range(smallest, size))
    assert size == smallest + more or gains[size - 1] < gain


def test_group_sizes_follow_what_is_known():
    def size(alpha: float, beta: float) -> int:
        return group_size(alpha, beta, 4, 16, 0.02)

    assert size(50, 50) < size(2, 2) < size(1, 9)  # near 1/2 and known; less known; rare
    assert size(100, 0.1) == size(0.1, 100) == 4  # its sign is clear


@given(st.floats(0.01, 0.95), st.integers(2, 32))
def test_known_limits_are_where_the_signal_is_met(signal, size):
    low, high = known_limits(signal, size)
    assert low <= 0.5 <= high
    if low < 0.5:
        assert 1 - low**size - high**size == pytest.approx(signal, abs=1e-6)


# -- weights -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_a_weight_tree_finds_what_laying_them_end_to_end_gives(weights, data):
    tree = WeightTree(np.array(weights, dtype=np.int64))
    for _ in range(data.draw(st.integers(0, 6))):
        index, weight = data.draw(st.integers(0, len(weights) - 1)), data.draw(st.integers(0, 9))
        tree.set(index, weight)
        weights[index] = weight
    assert tree.total == sum(weights)
    laid = [index for index, weight in enumerate(weights) for _ in range(weight)]
    assert [tree.find(at) for at in range(tree.total)] == laid
    with pytest.raises(ValueError, match="not within"):
        tree.find(tree.total)


# -- a world of tasks ----------------------------------------------------------------------------------------


class World:
    """Tasks with fixed solve rates, groups that finish in any order some draws later."""

    def __init__(self, rates: list[float], chosen: CurriculumConfig, seed: int, size: int = 8, delay: int = 6) -> None:
        self.rates, self.seed, self.size = rates, seed, size
        self.chosen = chosen
        self.rng = random.Random(seed)
        self.delay = delay
        self.curriculum = self.fresh()
        self.walked = self.index = 0
        self.drawn: list[tuple[int, int, str]] = []  # index, task, reason
        self.open: deque[tuple[int, int, str]] = deque()
        self.learnt: list[tuple[int, TaskEvidence, str]] = []

    def fresh(self) -> Curriculum:
        return Curriculum([len(self.rates)], self.chosen, group_size=self.size, rest=(2, 5), seed=self.seed)

    def walk(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.rates))
        return int(permutation(len(self.rates), self.seed, epoch)[offset])

    def choose(self, curriculum: Curriculum):
        return curriculum.sources[0].choose(self.index, self.walk(self.walked))

    def draw(self):
        choice = self.choose(self.curriculum)
        assert choice == self.choose(self.curriculum)  # to look changes nothing
        self.curriculum.sources[0].drawn(self.index, choice.task)
        self.walked += choice.walks
        entry = (self.index, choice.task, choice.draw.reason)
        self.drawn.append(entry)
        self.open.append(entry)
        self.index += 1
        if len(self.open) > self.delay:
            self.finish()
        return choice

    def finish(self) -> None:
        self.open.rotate(self.rng.randrange(len(self.open)))
        index, task, reason = self.open.popleft()
        if self.rng.random() < 0.1:
            return  # it failed, or was overdue: no evidence
        solved = sum(self.rng.random() < self.rates[task] for _ in range(self.size))
        flat = solved in (0, self.size)
        version = index // 10
        evidence = TaskEvidence(group=index, solved=solved, valid=self.size, zero_variance=flat, version=version)
        self.learnt.append((task, evidence, reason))
        self.curriculum.learn(0, task, evidence, reason)

    def refolded(self) -> Curriculum:
        again = self.fresh()
        for index, task, _ in self.drawn:
            again.sources[0].drawn(index, task)
        for task, evidence, reason in self.learnt:
            again.learn(0, task, evidence, reason)
        return again


rates = st.lists(st.sampled_from([0.0, 0.02, 0.1, 0.4, 0.6, 0.95, 1.0]), min_size=1, max_size=30)
chosen_settings = st.builds(
    lambda cursor, replay, after, signal, sizes: CurriculumConfig(
        mode="adaptive", cursor_share=cursor, replay_share=replay, replay_after_groups=after, min_signal=signal,
        min_group_size=sizes[0], max_group_size=sizes[1],
    ),
    st.sampled_from([0.05, 0.1, 0.3, 1.0]), st.just(0.0), st.sampled_from([1, 7, 40]),
    st.sampled_from([0.25, 0.5, 0.8]), st.sampled_from([(None, None), (4, 16)]),
) | st.builds(
    lambda cursor, replay, after: CurriculumConfig(
        mode="adaptive", cursor_share=cursor, replay_share=replay, replay_after_groups=after
    ),
    st.sampled_from([0.05, 0.1, 0.3]), st.sampled_from([0.05, 0.2, 0.7]), st.sampled_from([1, 7, 40]),
)  # fmt: skip


@given(rates, chosen_settings, st.integers(0, 100), st.integers(1, 400), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_state_is_a_fold_over_draws_and_finished_groups(rates, chosen, seed, draws, delay):
    world = World(rates, chosen, seed, delay=delay)
    for _ in range(draws):
        world.draw()
    again = world.refolded()
    assert again.band.limit == world.curriculum.band.limit
    assert again.regions() == world.curriculum.regions()
    # ... and it goes on alike, evidence and all
    live, world.curriculum = world.curriculum, again
    position = (world.walked, world.index, world.rng.getstate(), deque(world.open))
    continued = [world.draw() for _ in range(60)]
    world.curriculum = live
    world.walked, world.index, state, world.open = position
    world.rng.setstate(state)
    assert [world.draw() for _ in range(60)] == continued


@pytest.mark.slow
@given(rates, chosen_settings, st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_no_task_starves(rates, chosen, seed):
    world = World(rates, chosen, seed)
    bound = math.ceil(2 * len(rates) / chosen.cursor_share) + 1
    last = [0] * len(rates)
    for turn in range(1, 2 * bound + 1):
        last[world.draw().task] = turn
        assert turn - min(last) <= bound


@given(rates, chosen_settings, st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_every_draw_is_what_it_says(rates, chosen, seed):
    world = World(rates, chosen, seed)
    for turn in range(300):
        before = world.curriculum.sources[0]
        expected_walk = world.walk(world.walked)
        drawn_at = before.drawn_at.copy()
        choice = world.draw()
        draw = choice.draw
        assert 0 < draw.probability <= 1
        low, high = chosen.min_group_size or 8, chosen.max_group_size or 8
        assert low <= draw.size <= high
        assert draw.signal == mixed_probability(draw.alpha, draw.beta, 8)
        if draw.reason == "band":
            assert draw.signal >= draw.min_signal
            rest = 5 if before.undrawn or draw.probability < 1 else 2
            assert drawn_at[choice.task] < 0 or turn - drawn_at[choice.task] >= rest  # it has rested
        elif draw.reason == "replay":
            assert draw.signal < draw.min_signal
        else:
            assert choice.task == expected_walk
    share = sum(reason == "cursor" for _, _, reason in world.drawn) / 300
    assert share == pytest.approx(chosen.cursor_share, abs=1 / 300 + 1e-9)


def test_the_band_gives_far_fewer_flat_groups_than_the_walk():
    rates = [1.0] * 55 + [0.0] * 20 + [0.4] * 25
    shares = {}
    for name, chosen in (
        ("walk", CurriculumConfig(mode="adaptive", cursor_share=1.0, replay_share=0.0)),
        ("adaptive", CurriculumConfig(mode="adaptive")),
    ):
        world = World(rates, chosen, seed=1)
        for _ in range(1500):
            world.draw()
        shares[name] = np.mean([evidence.zero_variance for _, evidence, _ in world.learnt[-1000:]])
    assert shares["walk"] > 0.7
    assert shares["adaptive"] < 0.35


def test_the_unsolved_come_again_later_and_later():
    chosen = CurriculumConfig(mode="adaptive", cursor_share=0.01, replay_share=0.5, replay_after_groups=10)
    world = World([0.0] + [0.5] * 20, chosen, seed=0, delay=0)
    uniform = world.rng.random
    world.rng.random = lambda: 0.1 + 0.9 * uniform()  # type: ignore[method-assign]  (none fails)
    for _ in range(900):
        world.draw()
    replays = [index for index, task, reason in world.drawn if reason == "replay" and task == 0]
    gaps = np.diff(replays)
    assert len(replays) >= 3
    assert (np.diff(gaps) > 0).all()
    first = next(index for index, task, _ in world.drawn if task == 0)
    assert replays[0] - first >= 10


def test_a_task_that_gets_solved_leaves_the_unsolved():
    world = World([0.0] + [1.0] * 9, CurriculumConfig(mode="adaptive", replay_after_groups=1), seed=0, delay=0)
    source = world.curriculum.sources[0]
    for group, solved in enumerate((0, 0, 4)):
        source.drawn(group, 0)
        world.curriculum.learn(
            0, 0, TaskEvidence(group=group, solved=solved, valid=8, zero_variance=solved == 0, version=group), "cursor"
        )
        assert (source.due[0] >= 0) == (solved == 0)
    assert source.region(0) == "band"


def test_rewards_that_differ_count_where_solving_does_not():
    curriculum = Curriculum([2], CurriculumConfig(mode="adaptive"), group_size=8, rest=(1, 1), seed=0)
    for task, flat in ((0, False), (1, True)):
        curriculum.learn(0, task, TaskEvidence(group=task, solved=0, valid=8, zero_variance=flat, version=0), "cursor")
    assert [curriculum.sources[0].region(task) for task in (0, 1)] == ["band", "unsolved"]


def test_the_prior_follows_what_the_walk_met():
    def prior(rates: list[float]) -> tuple[float, float]:
        world = World(rates, CurriculumConfig(mode="adaptive", half_life_steps=1000), seed=0)
        for _ in range(len(rates)):
            world.draw()
        while world.open:
            world.finish()
        source = world.curriculum.sources[0]
        return source.prior.alpha, source.prior.beta

    alpha, beta = prior([0.7] * 400)
    assert alpha / (alpha + beta) == pytest.approx(0.7, abs=0.03)
    assert alpha + beta == pytest.approx(4)  # they are much alike: as much as is believed
    split_alpha, split_beta = prior([1.0] * 200 + [0.0] * 200)
    assert split_alpha / (split_alpha + split_beta) == pytest.approx(0.5, abs=0.08)
    assert split_alpha + split_beta < 0.5  # either or: one group tells
    assert mixed_probability(split_alpha, split_beta, 8) < 0.4


def test_evidence_is_forgotten_by_half_in_a_half_life():
    chosen = CurriculumConfig(mode="adaptive", half_life_steps=10)
    curriculum = Curriculum([1], chosen, group_size=8, rest=(1, 1), seed=0)
    source = curriculum.sources[0]
    curriculum.learn(0, 0, TaskEvidence(group=0, solved=0, valid=8, zero_variance=True, version=0), "band")
    curriculum.learn(0, 0, TaskEvidence(group=1, solved=8, valid=8, zero_variance=True, version=10), "band")
    assert (source.solved[0], source.failed[0]) == pytest.approx((8, 4))
    curriculum.learn(
        0, 0, TaskEvidence(group=2, solved=0, valid=8, zero_variance=True, version=0), "band"
    )  # a late one
    assert (source.solved[0], source.failed[0]) == pytest.approx((8, 8))


# -- the band ------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=1500), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=50, deadline=None)
def test_the_band_moves_in_bounded_steps_within_its_range_and_only_on_signal(flat, bias):
    chosen = CurriculumConfig(mode="adaptive")
    band = Band(chosen)
    rng = random.Random(0)
    since, limit = 0, band.limit
    for value in flat:
        since += 1
        move = band.learn(flat=value if rng.random() > bias else bias > 0.5)
        assert chosen.min_signal_range[0] <= band.limit <= chosen.min_signal_range[1]
        if move is None:
            assert band.limit == limit
        else:
            assert since >= BAND_WINDOW_GROUPS
            assert abs(move.new_limit - move.old_limit) <= BAND_STEP + 1e-12
            (low, high), share = chosen.zero_variance_range, move.zero_variance_share
            assert share > high if move.new_limit > move.old_limit else share < low
            assert move.reason
            since = 0
        limit = band.limit


def test_the_band_rests_between_its_limits_and_stops_at_its_range():
    chosen = CurriculumConfig(mode="adaptive")
    resting, narrowing = Band(chosen), Band(chosen)
    for group in range(20 * BAND_WINDOW_GROUPS):
        assert resting.learn(flat=group % 4 == 0) is None
        narrowing.learn(flat=True)
    assert narrowing.limit == chosen.min_signal_range[1]
    assert len(narrowing.changes) == round((narrowing.limit - chosen.min_signal) / BAND_STEP)


def test_only_groups_of_the_band_move_it():
    curriculum = Curriculum([1], CurriculumConfig(mode="adaptive"), group_size=8, rest=(1, 1), seed=0)
    for group in range(3 * BAND_WINDOW_GROUPS):
        evidence = TaskEvidence(group=group, solved=8, valid=8, zero_variance=True, version=0)
        assert curriculum.learn(0, 0, evidence, "cursor") is None
        assert curriculum.learn(0, 0, evidence, "replay") is None
    assert curriculum.band.limit == 0.5


@pytest.mark.parametrize(
    ("given_keys", "said"),
    [
        ({"min_signal": 0.9}, "valid: 0.25 to 0.8"),
        ({"cursor_share": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_be(given_keys, said):
    with pytest.raises(ValueError, match=said):
        CurriculumConfig(**given_keys)
