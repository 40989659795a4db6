"""Evaluation and statistics of episodes: fixed seeds, first episodes, intervals, videos."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embodied_runs import Walk, walk_experiment

from headway.control.summaries import mean_interval
from headway.embodied import evaluation
from headway.embodied.episodes import statistics_of
from headway.embodied.evaluation import Evaluator
from headway.embodied.records import Array, EpisodeEnd
from headway.records.errors import ConfigurationError
from headway.runtime.stalls.watchdog import Watchdog


class Towards:
    """A policy that walks towards 0."""

    def act_in_evaluation(self, observations_b: Array, noise_b: Array) -> Array:
        return np.clip(-observations_b[:, :1], -5, 5)


def evaluated(tmp_path: Path, rank: int, workers: int, **sections: Any) -> list[EpisodeEnd]:
    experiment = walk_experiment(tmp_path, evaluation={"episodes": 10}, **sections)
    return Evaluator(experiment, rank, workers).run(Towards(), "", Watchdog(60.0))[0]


def test_episodes_are_the_same_however_many_workers_share_them(tmp_path: Path):
    whole = evaluated(tmp_path, 0, 1)
    assert [episode.lane for episode in whole] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]  # blocks of 4; 10 episodes
    shares = [evaluated(tmp_path, rank, 2) for rank in (0, 1)]
    assert [*shares[0][:4], *shares[1], *shares[0][4:]] == whole
    assert len({episode.reward for episode in whole}) == 10
    other_seed = evaluated(tmp_path, 0, 1, run={"seed": 4})
    assert other_seed != whole


def test_a_second_evaluation_begins_from_the_same_seeds(tmp_path: Path):
    evaluator = Evaluator(walk_experiment(tmp_path, evaluation={"episodes": 4}), 0, 1)
    assert evaluator.run(Towards(), "", Watchdog(60.0)) == evaluator.run(Towards(), "", Watchdog(60.0))


def test_every_step_is_announced_to_the_watchdog(tmp_path: Path):
    begun: list[int] = []

    class Counting(Watchdog):
        def restart(self) -> None:
            begun.append(1)

    evaluator = Evaluator(walk_experiment(tmp_path, evaluation={"episodes": 4}), 0, 1)
    episodes = evaluator.run(Towards(), "", Counting(60.0))[0]
    assert len(begun) > max(episode.steps for episode in episodes)


def test_actions_are_clipped_and_only_first_episodes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[float] = []
    step = Walk.step

    def watched(walk: Walk, actions_b: Array) -> Any:
        seen.append(float(np.abs(actions_b).max()))
        return step(walk, actions_b)

    monkeypatch.setattr(Walk, "step", watched)
    episodes = evaluated(tmp_path, 0, 1)
    assert max(seen) <= 1
    assert all(episode.steps <= 9 for episode in episodes)
    assert evaluated(tmp_path, 0, 1, simulator={"steps_per_fragment": 96}) == episodes


def test_episodes_that_never_end_are_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "MAX_STEPS", 3)
    monkeypatch.setattr(Towards, "act_in_evaluation", lambda policy, lanes_b, noise_b: np.zeros((len(lanes_b), 1)))
    endless = evaluated(tmp_path, 0, 1, simulator={"arguments": {"length": 10_000}})
    assert len(endless) < 10


def test_video_is_a_small_gif_and_its_lack_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pictures = pytest.importorskip("PIL.Image")
    experiment = walk_experiment(tmp_path, evaluation={"episodes": 4})
    monkeypatch.setattr(evaluation, "_MAX_FRAMES", 4)
    monkeypatch.setattr(evaluation, "_MAX_PIXELS", 16)
    assert Evaluator(experiment, 0, 1).run(Towards(), str(tmp_path / "videos/x.gif"), Watchdog(60.0))[1] == ""
    with pictures.open(tmp_path / "videos/x.gif") as video:
        assert (video.format, video.size, video.n_frames) == ("GIF", (16, 16), 4)

    def blind(walk: Walk) -> Array:
        raise ConfigurationError("no display")

    def absent(walk: Walk) -> Array:
        raise NotImplementedError("in black")

    for render, problem in (
        (blind, "no display"),
        (absent, "no picture: NotImplementedError: in black"),
        (lambda walk: np.zeros((8, 8, 3)), "no picture: TypeError: Cannot handle this data type"),
    ):
        monkeypatch.setattr(Walk, "render", render)
        reason = Evaluator(experiment, 0, 1).run(Towards(), str(tmp_path / "y.gif"), Watchdog(60.0))[1]
        assert reason.startswith(problem)
    assert not (tmp_path / "y.gif").exists()


def test_interval_holds_the_mean_and_narrows():
    values = list(np.random.default_rng(0).normal(5, 2, 400))
    low, high = mean_interval(values)
    assert low < np.mean(values) < high
    assert high - low == pytest.approx(4 * 2 / math.sqrt(400), rel=0.15)
    few_low, few_high = mean_interval(values[:25])
    assert few_high - few_low > 2 * (high - low)
    assert mean_interval([]) == ()


def test_statistics_know_no_success_without_one():
    assert math.isnan(statistics_of([]).return_mean)
    ends = [EpisodeEnd(lane=0, reward=float(number), steps=2) for number in range(100)]
    statistics = statistics_of(ends, transitions=300)
    assert (statistics.return_mean, statistics.length_mean, statistics.transitions) == (49.5, 2.0, 300)
    assert math.isnan(statistics.success_rate)
    assert statistics.success_interval == ()
    solved = statistics_of([*ends, *[EpisodeEnd(lane=0, reward=1.0, steps=1, success=True)] * 50])
    assert solved.success_rate == 1.0
    assert solved.success_interval == pytest.approx((1.0, 1.0))
