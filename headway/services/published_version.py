"""Rebuilds a version that a run has published, from a checkpoint and the deltas that are kept with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from headway.config.schema import Experiment
from headway.models.loading import DTYPES
from headway.models.run_model import open_model, save_policy
from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.runtime.scratch import ScratchFolder, flush, flush_folder
from headway.trainer.checkpoints import DELTAS, find_checkpoints, verify, version_of
from headway.trainer.service import MODEL_FOLDER
from headway.weights.checksums import hash_blocks, root_of
from headway.weights.delta_archive import kept_chain
from headway.weights.deltas import apply_deltas, require_version
from headway.weights.layout import Layout, TensorRows


def rebuild(run: str | Path, experiment: Experiment, version: int, output: str | Path) -> int:
    """Write the model folder ``output``: a version that the run in the folder ``run`` has published, bit for bit, in
    the published dtype. Returns the version of the checkpoint that it was rebuilt from. ``experiment``: the run's.

    Raises ConfigurationError if ``output`` exists or the run isn't one of a whole model, CheckpointCorrupt, and
    WeightsCorrupt if no deltas lead there or a bit of them, or of the checkpoint, is wrong."""
    target = Path(output)
    if target.exists():
        raise ConfigurationError(f"{output} exists: the version is written into a new folder")
    if experiment.model.adapter is not None:
        raise ConfigurationError(f"{run} trained an adapter: no deltas are kept of it")
    folders = {0: Path(experiment.model.path)} | {version_of(path): path for path in find_checkpoints(run)}
    base, contents = kept_chain(Path(run) / DELTAS, version, folders.keys())
    folder = folders[base]
    if base:
        verify(folder)
        folder /= MODEL_FOLDER
    model = open_model(experiment.model, "float32", "cpu", folder)
    rows = {name: TensorRows.all_of(weight.detach()) for name, weight in model.named_parameters()}
    layout = Layout.of(rows, DTYPES[experiment.generator.dtype])
    payload = torch.zeros(layout.payload_size, dtype=torch.uint8)
    layout.write(payload, [entry.offset for entry in layout.entries], rows)
    _require_base(base, layout, payload.numpy(), contents[0].delta.base_checksum if contents else "")
    for _ in apply_deltas(payload.numpy(), contents):
        pass
    if contents:
        delta = contents[-1].delta
        published = PublishedWeights(version=version, path=delta.path, checksum=delta.checksum, size_bytes=len(payload))
        require_version(published, layout.manifest, contents[-1].table, payload.numpy())
    model.to(DTYPES[experiment.generator.dtype])
    tensors = layout.views(payload)
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f".{target.name}-", directory=target.parent) as scratch:
        save_policy(model, None, scratch, folder)
        flush_folder(scratch)
        scratch.rename(target)
        flush(target.parent)
    return base


def _require_base(base: int, layout: Layout, payload: np.ndarray, checksum: str) -> None:
    """Raise WeightsCorrupt unless a checkpoint, cast to the published dtype, is the version that deltas lead from."""
    table, _ = hash_blocks(payload, layout.blocks)
    if checksum and root_of(base, layout.manifest, table) != checksum:
        raise WeightsCorrupt(f"the checkpoint of version {base} isn't the one that was published: other steps' deltas")
