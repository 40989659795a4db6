"""A rank of a sharded model in a process of its own: loads, saves and resumes its rows; prints what that took.

Usage: ``python shard_process.py FOLDER OUTPUT RANK RANKS``; rank 0 of several prints the digests of all rows.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.loading import build, load_shards, save_shards
from headway.models.shards.row_map import decoder_tensors
from headway.models.shards.shard import Shard, shards_of
from headway.trainer.state_files import StateFiles, write_state


def memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


class Measured:
    """Peak resident memory beyond that of the start, and bytes read, of a block."""

    def __enter__(self) -> Measured:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        self.start_bytes, self.read_bytes = memory_bytes("VmRSS"), bytes_read()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = memory_bytes("VmHWM") - self.start_bytes
        self.read_bytes = bytes_read() - self.read_bytes


def divided(folder: Path, ranks: int) -> Decoder:
    """The model, on the meta device and divided by FSDP2 if there are several ranks; its memory comes with the rows."""
    config = DecoderConfig.from_pretrained(folder)
    if ranks == 1:
        return build(config)
    from torch.distributed.fsdp import fully_shard

    model = build(config, "float32", "meta")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def digests(shards: list[Shard]) -> dict[str, str]:
    """Of each undivided tensor, on rank 0."""
    parts = {shard.name: shard.tensor.numpy().tobytes() for shard in shards}
    gathered: list[Any] = [parts]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, parts)
    joined = {name: b"".join(rank_parts[name] for rank_parts in gathered) for name in parts}
    return {name: hashlib.sha256(content).hexdigest() for name, content in joined.items()}


def main(folder: Path, output: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{output}/rendezvous", rank=rank, world_size=ranks)
    model = divided(folder, ranks)
    decoder_tensors(model.config)  # what is imported at the first use takes no memory of the measured block
    with Measured() as loaded:
        if ranks > 1:
            model.to_empty(device="cpu")
        shards = shards_of(dict(model.named_parameters()))
        load_shards(folder, model.config, shards)
    with Measured() as saved:
        save_shards(output / "model", model.config, shards, rank, ranks)
        write_state(output, [*shards, Shard(name="step", shape=(), first=0, tensor=torch.tensor(4.0))], rank, ranks, 7)
    before = digests(shards)
    for shard in shards:
        shard.tensor.zero_()
    if ranks > 1:
        dist.barrier()
    step = Shard(name="step", shape=(), first=0, tensor=torch.zeros(()))
    with Measured() as resumed:
        StateFiles(output).fill([*shards, step])
    assert float(step.tensor) == 4
    assert digests(shards) == before
    figures = {name: vars(block) for name, block in (("load", loaded), ("save", saved), ("resume", resumed))}
    shard_bytes = sum(shard.tensor.nbytes for shard in shards)
    print(json.dumps({"shard_bytes": shard_bytes, "digests": before if rank == 0 else {}, **figures}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
