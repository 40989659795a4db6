"""Ranks that divide a model publish it together: the root of one rank, no half version when one is killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing_ranks import announced, killed_in, published_after_steps, published_offloaded
from rank_processes import RankProcesses, processes, run_id_in

from headway.weights.shared_memory import Subscriber
from headway.weights.slot_file import UNWRITTEN, version_in
from headway.weights.slots import SHARED_MEMORY, reap
from tests.unit.trainer.test_sharding import experiment_of

torch.set_num_threads(1)
pytestmark = pytest.mark.real
MOMENTS = ["0", "rows", "1", "2", "3"]  # a call of the ranks' group, or halfway of the rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("publishing")


def with_dtypes(experiment: dict[str, Any], trainer: str, generator: str) -> dict[str, Any]:
    changed = {"trainer": experiment["trainer"] | {"dtype": trainer}}
    return experiment | changed | {"generator": experiment["generator"] | {"dtype": generator}}


@pytest.mark.parametrize(("case", "dtypes"), [
    ("plain", ("float32", "bfloat16")),
    ("plain", ("bfloat16", "bfloat16")),
    pytest.param("mixture", ("bfloat16", "float32"), marks=pytest.mark.slow),
    pytest.param("transformers", ("float32", "float32"), marks=pytest.mark.slow),
    pytest.param("in host memory", ("float32", "bfloat16"), marks=pytest.mark.slow),
])  # fmt: skip
def test_every_layout_publishes_the_version_of_one_rank(folder: Path, case: str, dtypes: tuple[str, str]) -> None:
    experiments = {shards: with_dtypes(experiment_of(folder, case, shards), *dtypes) for shards in (1, 2, 4)}
    (expected, _), *_ = processes(1).call(published_after_steps, folder, experiments[1])
    for size, shards in ((2, 2), (4, 4), (4, 2)):
        first_rank, *others = processes(size).call(published_after_steps, folder, experiments[shards])
        assert others == [[None, None]] * (size - 1)
        assert first_rank[0].checksum == expected.checksum, (size, shards)
        assert first_rank[0].parts == ()
        assert first_rank[1].checksum != expected.checksum


def test_offloaded_shards_are_published_as_they_were(folder: Path) -> None:
    ranks = processes(2).call(published_offloaded, folder, experiment_of(folder, "plain", 2))
    (first, second), moved_bytes = ranks[0]
    assert first == second is not None
    assert moved_bytes > 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", [
    moment if moment in ("rows", "3") else pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS
])  # fmt: skip
def test_a_rank_killed_while_publishing_leaves_no_half_version(folder: Path, rank: int, moment: str) -> None:
    experiment, run_id = experiment_of(folder, "plain", 2), run_id_in(folder, 2)
    ranks, started_s = RankProcesses(2), time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {rank}: died") as failure:
        ranks.call(killed_in, folder, experiment, rank, moment)
    assert f"rank {1 - rank}: Traceback" in str(failure.value), "the other one notices"
    assert time.monotonic() - started_s < 40.0
    files = sorted(SHARED_MEMORY.glob(f"headway-{run_id}-*.weights"))
    assert {version_in(file.read_bytes()) for file in files} <= {1, UNWRITTEN}
    for file in files:
        if version_in(content := file.read_bytes()) == 1:
            Subscriber().fetch(announced(str(file), content))  # the older version is complete
    reap(run_id)
    successor, _ = processes(2).call(published_after_steps, folder, experiment)
    expected, _ = processes(1).call(published_after_steps, folder, experiment_of(folder, "plain"))[0]
    assert successor[0].checksum == expected.checksum
