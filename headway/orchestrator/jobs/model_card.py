"""Writes model cards: ``README.md`` beside exported weights, in Hugging Face's format, with measured numbers alone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

from headway.records.errors import CheckpointCorrupt, ConfigurationError
from headway.records.ledger import EvaluationRecord
from headway.report.formats import duration
from headway.report.run_cost import cost_of_run
from headway.report.run_view import RunView, view_run
from headway.report.several.axes import AXES, axis_positions
from headway.report.tables import Rows, mapping_rows
from headway.runtime.run_directory import write_atomically
from headway.trainer.checkpoints import CARD_FILE, CARD_MARK, has_own_card, read_state

_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license: *(\S+)\s*\n(?:.*\n)*?---\n")
_Z = 1.96  # standard errors of a 95 % interval


def write_run_card(folder: str | Path, run_dir: str | Path, price: float | None = None, adapter: str = "") -> bool:
    """Write the card of the weights in ``folder``, which the run at ``run_dir`` trained. ``price``: dollars of a
    device's hour; ``adapter``: the folder of the adapter that was merged into them, if one was.

    Returns False, with nothing written, where a card of the user's own is there. Raises ConfigurationError when the run
    can't be read, HeadwayError when the card can't be written.
    """
    view = view_run(run_dir)
    version = _version_of(Path(adapter or folder))
    experiment, scored = view.configuration, [record for record in view.evaluations if record.samples]
    of_version = [e for e in scored if version is not None and e.first_version <= version <= e.last_version]
    baseline = [evaluation for evaluation in scored if evaluation.phase == "before" and evaluation not in of_version]
    body_texts = [
        f"Trained by reinforcement learning in the run `{_code(view.path)}`. Every number here was measured in it.",
        "## Evaluation",
        _evaluation_table([*baseline, *of_version]) if of_version else "These weights weren't evaluated in the run.",
        "## Training",
        _rows_table(_training_rows(view, version, price)),
    ]
    tags = ["reinforcement-learning", str(_nested(experiment, "algorithm", "loss") or "")]
    return _write(Path(folder), str(_nested(experiment, "model", "path") or ""), tags, body_texts)


def write_sft_card(folder: str | Path, base: str, data: str, result: Mapping[str, Any]) -> bool:
    """Write the card of a model that `headway sft` trained; ``result``: its figures. False: as `write_run_card`."""
    result_keys = ("step", "epochs", "loss_mean", "held_out_loss", "solve_rate", "standard_error", "failed")
    shown_keys = (*result_keys, "kept", "time_s", "ended")
    rows = {"data": f"`{_code(data)}`", **mapping_rows({key: result[key] for key in shown_keys if key in result})}
    body_texts = ["Trained on demonstrations. Every number here was measured in that training.", _rows_table(rows)]
    return _write(Path(folder), base, ["sft"], body_texts)


def write_merge_card(folder: str | Path, base: str, adapter: str | Path) -> bool:
    """Write the card of a model into which ``adapter`` was merged. It has the run's numbers where the adapter lies in a
    run's folder. False: as `write_run_card`."""
    for parent in Path(adapter).resolve().parents[:3]:
        if (parent / "ledger.jsonl").is_file():
            with contextlib.suppress(ConfigurationError):  # a damaged ledger, which isn't this model's
                return write_run_card(folder, parent, adapter=str(adapter))
    merge_text = f"`{_code(base)}` with the adapter `{_code(adapter)}` merged into it. Nothing was measured of it here."
    return _write(Path(folder), base, [], [merge_text])


def _write(folder: Path, base: str, tags: list[str], body: list[str]) -> bool:
    if (folder / CARD_FILE).exists() and not has_own_card(folder):
        return False
    adapter = (folder / "adapter_config.json").is_file()
    relation, release = "An adapter of" if adapter else "From", distribution_version("headway")
    license_name = _license_of(Path(base))
    name = folder.resolve().name
    header_lines = [
        "---",
        f"base_model: {json.dumps(base, ensure_ascii=False)}",
        f"license: {license_name}",
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"- {json.dumps(tag)}" for tag in ("headway", *filter(None, tags))),
        "---",
    ]
    body_parts = [
        CARD_MARK,
        f"# {_code(name)}",
        f"{relation} the model `{_code(base)}`, by Headway {release}.",
    ]
    if license_name == "unknown":
        body_parts.append("Its license isn't known here: the base model's folder names none.")
    card_text = "\n\n".join(["\n".join(header_lines), *body_parts, *body]) + "\n"
    write_atomically(folder / CARD_FILE, card_text.encode("utf-8", "replace"))
    return True


def _license_of(base: Path) -> str:
    try:
        match = _LICENSE.match((base / CARD_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return "unknown"
    return match[1] if match else "unknown"


def _version_of(folder: Path) -> int | None:
    """The trainer's version of the weights in ``folder``, from the state of its checkpoint."""
    for path in (folder, folder.resolve().parent):
        try:
            return read_state(path).version
        except CheckpointCorrupt:
            continue
    return None


def _evaluation_table(records: list[EvaluationRecord]) -> str:
    lines = [
        "| split | when | weights | tasks | attempts judged | failed | solve rate | 95 % interval |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in records:
        low, high = (record.solve_rate + sign * _Z * record.standard_error for sign in (-1, 1))
        versions_text = f"version {record.first_version}" + ("" if record.held else f" to {record.last_version}")
        lines.append(
            f"| {record.split} | {record.phase} training | {versions_text} | {record.tasks:,} | {record.samples:,} | "
            f"{record.failed:,} | {record.solve_rate:.3f} | {max(0.0, low):.3f} to {min(1.0, high):.3f} |"
        )
    return "\n".join(lines)


def _training_rows(view: RunView, version: int | None, price: float | None) -> Rows:
    last_step = view.summary.steps
    rows: Rows = {"weights": f"version {version} of {last_step}" if version is not None else "version unknown"}
    for axis, position_by_version in axis_positions(view, price).items():
        if version in position_by_version:
            format_spec = {"dollars": ",.2f", "hours": ",.3g"}.get(axis, ",.0f")
            rows[f"{AXES[axis]}, until this version"] = format(position_by_version[version], format_spec)
    with contextlib.suppress(ConfigurationError):
        rows["devices"] = str(cost_of_run(view, price or 0.0).devices)
    rows["the whole run"] = f"{last_step:,} steps in {duration(view.summary.duration_s)}"
    keys = ("algorithm.loss", "algorithm.advantage", "algorithm.kl_coefficient", "trainer.learning_rate")
    keys += ("rollout.group_size", "queue.groups_per_step", "queue.budget", "verifier.name", "run.seed")
    for key in keys:
        setting = _nested(view.configuration, *key.split("."))
        if setting is not None:
            rows[f"`{key}`"] = f"`{_code(setting)}`"
    for split in ("train", "validation", "test"):
        sources = _nested(view.configuration, "tasks", split)
        for source in sources if isinstance(sources, list) else []:
            source_name = _nested(source, "path") or _nested(source, "name") or _nested(source, "source")
            rows[f"tasks, {split}"] = ", ".join(filter(None, (rows.get(f"tasks, {split}"), f"`{_code(source_name)}`")))
    return rows


def _nested(value: Any, *names: str) -> Any:
    for key in names:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _rows_table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {text} |" for label, text in rows.items())])


def _code(value: object) -> str:
    """``value`` as text that ends neither its code span nor its cell."""
    return re.sub(r"[`|\x00-\x1f]", "_", str(value))
