"""The trainer's state in files of ranks: any number of ranks resumes what another wrote; faults are named, nothing is
half loaded."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
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
from headway.records.errors import CheckpointCorrupt
from headway.trainer.checkpoints import CheckpointState, begin_folder, commit_folder, verify
from headway.trainer.state_files import StateFiles, state_file, write_state

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


def commit(target: Path, shards: list[list[Shard]], save: int) -> None:
    """A save of ranks that have these shards."""
    folder = begin_folder(target)
    checksums = [write_state(folder, rank_shards, rank, len(shards), save) for rank, rank_shards in enumerate(shards)]
    names = [state_file(rank, len(shards)) for rank in range(len(shards))]
    commit_folder(target, CheckpointState(version=save), dict(zip(names, checksums, strict=True)))


def test_ranks_verify_a_share_of_the_files_each(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step_00000003"
    commit(target, [shards_with_steps(random_state(SHAPES), rank, 2) for rank in range(2)], 3)
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


def test_a_file_that_a_rank_wrote_elsewhere_is_missed_at_the_commit(tmp_path: Path) -> None:
    folder = begin_folder(tmp_path / "c")
    (folder / "state-1-of-2.safetensors").touch()
    with pytest.raises(FileNotFoundError, match=r"state-2-of-2.*valid: a folder that all ranks share"):
        commit_folder(tmp_path / "c", CheckpointState(version=1), {"state-2-of-2.safetensors": "x"})
    assert not (tmp_path / "c").exists()
