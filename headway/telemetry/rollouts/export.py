"""`headway export`: writes a run's rollouts with their token columns for other programs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headway.records.errors import ConfigurationError, StorageFailed
from headway.telemetry.rollouts.joined import JOINED, Decode, JoinedRollouts

SHARD_BYTES = 500 << 20  # of a data set's files
OUTPUTS = {"jsonl": "export.jsonl", "parquet": "export.parquet", "hf": "export"}  # in the run's folder
_CARD = """---
configs:
- config_name: default
  data_files: data/*.parquet
---
{rollouts} rollouts of the Headway run {run}, in the order of their arrival, with the columns of `docs/rollouts.md`.
"""


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an export."""

    path: str
    rollouts: int
    size_bytes: int
    problems: list[str]  # parts of the record that can't be read


def export(
    run_dir: str | Path,
    to: str,
    output: str | Path | None = None,
    *,
    decode: Decode | None = None,
    ending: str = "",
    on_progress: Callable[[float, float], None] = lambda done, total: None,
) -> ExportReport:
    """Write the rollouts of a run (those with this ``ending``; "": all) as JSON lines, one Parquet file, or a folder
    that `datasets.load_dataset` takes. An earlier output is replaced when the new one is complete. ``on_progress(done,
    total)`` counts rollouts. ``decode``: the tokenizer's method; None: rows have no text. Raises ConfigurationError,
    StorageFailed."""
    if to not in OUTPUTS:
        raise ConfigurationError(f"--to {to}: valid: {', '.join(OUTPUTS)}")
    joined = JoinedRollouts(run_dir, decode)
    if not joined.record.exists():
        raise ConfigurationError(f"{run_dir} holds no record of rollouts: there is no {joined.record.folder}/finished")
    path = Path(output or Path(run_dir) / OUTPUTS[to])
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        rollout_count = _WRITERS[to](partial_path, _with_ending(joined, ending, on_progress))
        if to == "hf":
            (partial_path / "README.md").write_text(_CARD.format(rollouts=rollout_count, run=Path(run_dir).name))
        _replace(partial_path, path)
    except OSError as error:
        raise StorageFailed(f"{path} can't be written: {error.strerror or error}") from None
    finally:
        _remove(partial_path)
    size_bytes = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    problems = sorted(joined.record.problems.values())
    return ExportReport(path=str(path), rollouts=rollout_count, size_bytes=size_bytes, problems=problems)


def _with_ending(
    joined: JoinedRollouts, ending: str, on_progress: Callable[[float, float], None]
) -> Iterator[pa.RecordBatch]:
    done_count, total_count = 0, joined.record.count()
    for batch in joined.batches():
        on_progress(done_count, total_count)
        done_count += batch.num_rows
        chosen_batch = batch.filter(pc.field("ending") == ending) if ending else batch
        if chosen_batch.num_rows:
            yield chosen_batch


def _write_jsonl(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    row_count, encoder = 0, msgspec.json.Encoder()
    with open(path, "wb") as file:
        for batch in batches:
            for row in batch.to_pylist():
                for json_field in ("verdict", "failure", "pruned"):
                    row[json_field] = None if row[json_field] is None else msgspec.Raw(row[json_field].encode())
                file.write(encoder.encode(row) + b"\n")
            row_count += batch.num_rows
    return row_count


def _write_parquet(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    row_count = 0
    with pq.ParquetWriter(path, JOINED, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
            row_count += batch.num_rows
    return row_count


def _write_dataset(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    data_folder, shard_count, row_count = path / "data", 0, 0
    data_folder.mkdir(parents=True)
    leading: list[pa.RecordBatch] = []
    while (first_batch := next(batches, None)) is not None or not shard_count:
        leading = [] if first_batch is None else [first_batch]
        row_count += _write_parquet(data_folder / f"{shard_count}", _limited(leading, batches, SHARD_BYTES))
        shard_count += 1
    for shard_index in range(shard_count):
        os.rename(data_folder / f"{shard_index}", data_folder / f"train-{shard_index:05d}-of-{shard_count:05d}.parquet")
    return row_count


def _limited(first: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch], max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield ``first``, and batches of ``rest`` until both together have about ``max_bytes``."""
    size_bytes = 0
    for batch in first:
        size_bytes += batch.nbytes
        yield batch
    while size_bytes < max_bytes and (batch := next(rest, None)) is not None:
        size_bytes += batch.nbytes
        yield batch


def _replace(partial: Path, path: Path) -> None:
    if path.is_dir() and not partial.is_dir():
        raise ConfigurationError(f"{path} is a folder: name a file that may be written")
    if path.is_dir():
        if not (path / "data").is_dir() and any(path.iterdir()):
            raise ConfigurationError(f"{path} contains something other than an export: name another folder")
        shutil.rmtree(path)
    os.replace(partial, path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


_WRITERS: dict[str, Callable[[Path, Iterator[pa.RecordBatch]], int]] = {
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "hf": _write_dataset,
}
