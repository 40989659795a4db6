"""The trainer's state in files of ranks: any number of ranks resumes what another wrote; faults are named, nothing is
half loaded."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shards import rank_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.models.shards.shard import Shard
from headway.records.errors import CheckpointCorrupt, StorageFailed
from headway.trainer.checkpoints import CheckpointState, begin_folder, commit_folder, read_state, scratch_of, verify
from headway.trainer.state_files import ShardSaver, StateFiles, write_state

SHAPES = {"embedding": (13, 4), "norm": (5,), "experts": (3, 4, 2), "one": (1, 6)}


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    return {
        f"{kind}/{name}": torch.randn(shape, generator=generator) for kind in kinds for name, shape in shapes.items()
    }


def shards_with_steps(tensors: dict[str, Tensor], rank: int, ranks: int, fill: float | None = None) -> list[Shard]:
    """A rank's rows, and each parameter's step counter, which all ranks have."""
    names = sorted({name.partition("/")[2] for name in tensors})
    steps = [torch.tensor(float(number) if fill is None else fill) for number in range(len(names))]
    counters = [
        Shard(name=f"step/{name}", shape=(), first=0, tensor=step) for name, step in zip(names, steps, strict=True)
    ]
    return rank_shards(tensors, rank, ranks, fill) + counters


def write_all(folder: Path, shards_by_rank: list[list[Shard]], save: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    for rank, shards in enumerate(shards_by_rank):
        write_state(folder, shards, rank, len(shards_by_rank), save)


def digest(shards_by_rank: list[list[Shard]]) -> dict[str, str]:
    """Of each undivided tensor."""
    content: dict[str, bytes] = {}
    for shards in shards_by_rank:
        for shard in shards:
            content[shard.name] = (
                content.get(shard.name, b"") if shard.shape else b""
            ) + shard.tensor.numpy().tobytes()
    return {name: hashlib.sha256(text).hexdigest() for name, text in content.items()}


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    ranks=st.lists(st.integers(1, 6), max_size=3).map(lambda counts: [4, 2, 1, 4, *counts]),
)
def test_any_number_of_ranks_resumes(rows: list[int], ranks: list[int]) -> None:
    tensors = random_state({f"p{number}": (count, 3) for number, count in enumerate(rows)} | SHAPES)
    shards_by_rank = [shards_with_steps(tensors, rank, ranks[0]) for rank in range(ranks[0])]
    expected = digest(shards_by_rank)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where a flush is free
        for save, count in enumerate(ranks[1:]):
            write_all(Path(folder) / str(save), shards_by_rank, save)
            shards_by_rank = [shards_with_steps(tensors, rank, count, fill=9.0) for rank in range(count)]
            for shards in shards_by_rank:
                StateFiles(Path(folder) / str(save)).fill(shards)
            assert digest(shards_by_rank) == expected


def test_safetensors_reads_a_file_and_its_names(tmp_path: Path) -> None:
    tensors = random_state(SHAPES)
    write_all(tmp_path, [shards_with_steps(tensors, rank, 2) for rank in range(2)])
    stored = load_file(tmp_path / "state-2-of-2.safetensors")
    assert torch.equal(stored["exp_avg/embedding@7"], tensors["exp_avg/embedding"][7:])
    assert torch.equal(stored["weight/experts@8"], tensors["weight/experts"][2:])
    assert stored["weight/one@1"].shape == (0, 6)
    assert StateFiles(tmp_path).shapes["weight/experts"] == (3, 4, 2)


def test_the_state_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    tensors = random_state(SHAPES)
    steps = {f"step/{name}": torch.tensor(3.0) for name in SHAPES}
    save_file(tensors | steps, tmp_path / "optimizer.safetensors")
    for rank in range(3):
        shards = shards_with_steps(tensors, rank, 3, fill=9.0)
        StateFiles(tmp_path).fill(shards)
        expected = rank_shards(tensors, rank, 3)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, expected, strict=False))
        assert all(float(shard.tensor) == 3 for shard in shards if not shard.shape)


def missing(folder: Path) -> None:
    (folder / "state-2-of-3.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / "state-2-of-3.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def no_safetensors(folder: Path) -> None:
    (folder / "state-2-of-3.safetensors").write_bytes(b"nonsense" * 9)


def another_save(folder: Path) -> None:
    write_state(folder, shards_with_steps(random_state(SHAPES), 1, 3), 1, 3, save=2)


def another_count(folder: Path) -> None:
    write_state(folder, shards_with_steps(random_state(SHAPES), 1, 4), 1, 4, save=1)


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def other_shape(folder: Path) -> None:
    write_all(folder, [shards_with_steps(random_state(SHAPES | {"norm": (6,)}), rank, 3) for rank in range(3)])


def other_names(folder: Path) -> None:
    write_all(folder, [shards_with_steps(random_state(SHAPES | {"bias": (6,)}), rank, 3) for rank in range(3)])


def fewer_names(folder: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "norm"}
    write_all(folder, [shards_with_steps(random_state(shapes), rank, 3) for rank in range(3)])


def same_rows_twice(folder: Path) -> None:
    write_state(folder, shards_with_steps(random_state(SHAPES), 0, 3), 1, 3, save=1)


FAULTS: dict[Callable[[Path], None], str] = {
    missing: "state-2-of-3.safetensors: is missing; valid: the 3 files of one save",
    cut: "state-2-of-3.safetensors: ",
    no_safetensors: "state-2-of-3.safetensors: ",
    another_save: "state-2-of-3.safetensors: of save 2, the files before it of save 1",
    another_count: "state-2-of-4.safetensors: is of a save by another number of ranks than 3",
    nothing: "optimizer.safetensors: ",
    other_shape: r"state of another model: .*/norm has shape \[6\], the model's has \[5\]",
    other_names: "state of another model: .*/bias isn't in both",
    fewer_names: "state of another model: .*/norm isn't in both",
    same_rows_twice: "row 5 of weight/embedding is in no file",
}


@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__)
def test_a_fault_is_named_and_nothing_is_loaded(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "c"
    write_all(folder, [shards_with_steps(random_state(SHAPES), rank, 3) for rank in range(3)])
    damage(folder)
    shards = shards_with_steps(random_state(SHAPES), 0, 1, fill=9.0)
    with pytest.raises(CheckpointCorrupt, match=FAULTS[damage]):
        StateFiles(folder).fill(shards)
    assert all((shard.tensor == 9.0).all() for shard in shards)


def save_beside(target: Path, savers: list[ShardSaver], shards: list[list[Shard]], save: int) -> dict[str, str]:
    """A save of two ranks, from its begin until the folder is committed."""
    folder = begin_folder(target)
    (folder / "model").mkdir()
    for rank, saver in enumerate(savers):

        def write_weights(copies: list[Shard], rank: int = rank) -> None:
            save_file({shard.name: shard.tensor for shard in copies}, folder / "model" / f"{rank}.safetensors")

        weights = [shard for shard in shards[rank] if shard.name.startswith("weight/")]
        saver.begin(folder, weights, shards[rank], save, write_weights)
        for shard in shards[rank]:
            shard.tensor.fill_(-1)  # the next step
    checksums = {name: checksum for saver in savers for name, checksum in saver.complete().items()}
    assert len(checksums) == len(savers)
    for saver in savers:
        checksums |= saver.weights_checksums("model")
    commit_folder(target, CheckpointState(version=save), checksums)
    return checksums


def test_a_save_beside_the_next_step_has_the_state_from_before_it(tmp_path: Path) -> None:
    target, savers = tmp_path / "checkpoints" / "step_00000003", [ShardSaver(rank, 2) for rank in range(2)]
    shards = [shards_with_steps(random_state(SHAPES), rank, 2) for rank in range(2)]
    expected = digest(shards)
    checksums = save_beside(target, savers, shards, 3)
    assert verify(target).files == checksums
    assert sorted(checksums) == [
        "model/0.safetensors", "model/1.safetensors", "state-1-of-2.safetensors", "state-2-of-2.safetensors",
    ]  # fmt: skip
    loaded = [shards_with_steps(random_state(SHAPES), 0, 1, fill=9.0)]
    StateFiles(target).fill(loaded[0])
    assert digest(loaded) == expected
    weights = load_file(target / "model" / "1.safetensors")
    assert torch.equal(weights["weight/embedding"], random_state(SHAPES)["weight/embedding"][7:])
    for saver in savers:
        saver.close()


def test_ranks_verify_a_share_of_the_files_each(tmp_path: Path) -> None:
    target, savers = tmp_path / "checkpoints" / "step_00000003", [ShardSaver(rank, 2) for rank in range(2)]
    save_beside(target, savers, [shards_with_steps(random_state(SHAPES), rank, 2) for rank in range(2)], 3)
    file = target / "state-2-of-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    messages = []
    for rank in range(3):
        try:
            verify(target, rank, 3)
        except CheckpointCorrupt as error:
            messages.append(str(error))
    assert len(messages) == 1
    assert "state-2-of-2.safetensors: checksum" in messages[0]


def test_begin_does_not_wait_for_the_disk_and_the_next_begin_does(tmp_path: Path) -> None:
    saver, permit, written = ShardSaver(), threading.Event(), list[int]()
    shards = shards_with_steps(random_state(SHAPES), 0, 1)

    def slow(_: list[Shard]) -> None:
        assert permit.wait(60)
        written.append(1)

    saver.begin(tmp_path, [], shards, 1, slow)
    assert not written
    permit.set()
    saver.begin(tmp_path, [], shards, 2, lambda _: written.append(2))
    assert saver.complete().keys() == {"state-1-of-1.safetensors"}
    assert written == [1, 2]
    saver.close()


def test_a_full_disk_is_reported_when_the_save_is_completed_and_the_older_one_stays(tmp_path: Path) -> None:
    target, saver = tmp_path / "checkpoints" / "step_00000003", ShardSaver()
    shards = shards_with_steps(random_state(SHAPES), 0, 1)
    save_beside(target, [saver], [shards], 3)

    def full(_: list[Shard]) -> None:
        raise OSError(28, "No space left on device")

    saver.begin(begin_folder(target), [], shards, 4, full)
    with pytest.raises(StorageFailed, match=r"step_00000003.tmp can't be written: .*No space left.*free some space"):
        saver.complete()
    assert read_state(target).version == 3
    saver.begin(scratch_of(target), [], shards, 5, lambda _: None)
    saver.complete()  # the next one is written
    saver.close()


def test_a_file_that_a_rank_wrote_elsewhere_is_missed_at_the_commit(tmp_path: Path) -> None:
    folder = begin_folder(tmp_path / "c")
    (folder / "state-1-of-2.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"state-2-of-2.*valid: a folder that all ranks share"):
        commit_folder(tmp_path / "c", CheckpointState(version=1), {"state-2-of-2.safetensors": "x"})
    assert not (tmp_path / "c").exists()
