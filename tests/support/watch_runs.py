"""Run folders for tests of `headway watch`: rollouts that attack the page, a very long one, damage of every kind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tiny_run
from synthetic_run import synthetic_lines

from headway.config.schema import LedgerConfig
from headway.records.generation import VersionSpan
from headway.records.ledger import EventRecord, LedgerLine
from headway.records.rollout import Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.trace import GroupTrace, Mark, RolloutTrace, Span
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import SCHEMA
from headway.telemetry.rollouts.columns import TRAINED, list_array, trained_batch
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.rollouts.segments import SegmentWriter
from headway.telemetry.trace_file import TraceFile
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "run_folders"

# Each would set window.__pwned, load something or open a dialog, were it ever taken for HTML, a link or a style.
HOSTILE = (
    "<script>window.__pwned=1</script>",
    "<img src=x onerror=\"window.__pwned='img'\">",
    "<svg/onload=window.__pwned='svg'>",
    "<iframe srcdoc='<script>parent.__pwned=1</script>'></iframe>",
    '"><a href="javascript:window.__pwned=1" autofocus onfocus=window.__pwned=1>a link</a>',
    "[a link](javascript:window.__pwned=1) ![](http://198.51.100.7/pixel.png)",
    "</textarea></pre></title><style>@import 'http://198.51.100.7/x.css';*{display:none}</style>",
    "${alert(1)} {{constructor.constructor('window.__pwned=1')()}} __proto__",
    "\u202eecivda\u202c \u2066\u05e9\u05dc\u05d5\u05dd\u2069 \u0645\u0631\u062d\u0628\u0627",  # right to left
    "a\0b\x1b[31m\x07\u2028\u2029\ufeff\U000e0041\U0001f642",
)
HOSTILE_NAME = "<img src=x onerror=window.__pwned=1>"  # a folder's: as much as a file name can hold
LONG_TOKENS = 1_000_000
_GROUP = 4


def write_tokenizer(folder: Path) -> Tokenizer:
    """A character-level tokenizer, which is all that the page needs of a model's folder."""
    folder.mkdir(parents=True)
    texts = ["".join(map(chr, range(32, 127))) + "\n", *HOSTILE]
    return train_byte_fallback_tokenizer(texts, 1024, folder, character_level=True)


def write_hostile_run(folder: Path, model: Path, tokenizer: Tokenizer, *, long_tokens: int = 0) -> Path:
    """A run in which all that others wrote is an attack: tasks, responses, verdicts, failures, events, workers' names,
    logs, the configuration. ``long_tokens``: length of one more rollout, the last."""
    hostile = HOSTILE[1]
    folder.mkdir(parents=True)
    shutil.copytree(RECORDED / "ended" / "epoch", folder / "epoch")
    (folder / "config.json").write_text(json.dumps({"schema": SCHEMA, **_configuration(folder, model)}))
    lines: list[LedgerLine] = [*synthetic_lines(40)]
    events = ("stall", "worker_death", "alert", "restart", hostile)
    lines[-2:-2] = [
        EventRecord(event=event, detail=hostile, step=30, time_s=30.0 + n, worker=hostile, cause=hostile,
                    data={"rule": hostile, "at": 1.7e9, "host": hostile})
        for n, event in enumerate(events)
    ]  # fmt: skip
    (folder / "ledger.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (folder / "logs").mkdir()
    (folder / "logs" / "trainer-0.log").write_text("\n".join(HOSTILE) + "\n")
    _write_record(folder, tokenizer, long_tokens)
    with TraceFile(folder, RealClock(), 1.7e9) as trace:
        now_s = RealClock().now()
        for n, text in enumerate(HOSTILE):
            trace.write(Span(track=text, name=text, start_s=now_s + n, end_s=now_s + n + 0.9, step=n))
            trace.write(Mark(event=text, detail=text, time_s=now_s + n))
            members = [
                RolloutTrace(member=member, first_token_s=now_s + n, generated_s=now_s + n + 0.4,
                             finished_s=now_s + n + 0.6, verify_s=0.1, tokens=30, first_version=n, last_version=n + 1,
                             reward=1.0, resumes=0, reprefills=0, failure=text)
                for member in range(_GROUP)
            ]  # fmt: skip
            trace.write(GroupTrace(index=n, task=text, admitted_s=now_s, admitted_version=0, finished_s=now_s + n + 0.6,
                                   rollouts=tuple(members)))  # fmt: skip
    return folder


def _configuration(folder: Path, model: Path) -> dict[str, Any]:
    config = tiny_run.write_experiment(folder, run={"directory": str(folder)}, model={"path": str(model)})
    raw = tiny_run.experiment_of(config).model_dump(mode="json")
    raw["verifier"]["parameters"] = {"name": HOSTILE[0], HOSTILE[1]: 1}
    raw["run"]["steps"] = 40
    return raw


def _write_record(folder: Path, tokenizer: Tokenizer, long_tokens: int) -> None:
    recorder = RolloutRecorder(folder, LedgerConfig(), RealClock(), lambda *told, **data: _fail(told))
    recorder.begin(lambda share: 0)
    trained = SegmentWriter(folder / "rollouts" / "trained", TRAINED)
    for index, text in enumerate((*HOSTILE, *HOSTILE)):
        prompt = TokenIds(tokenizer.encode(f"Task {index}: {text}"))
        group = Group(index=index, task=Task(task_id=f"{index % len(HOSTILE)} {text}", prompt=text), prompt_ids=prompt,
                      size=_GROUP, admitted_version=index, admitted_s=float(index))  # fmt: skip
        rollouts = tuple(_rollout(group, member, text, tokenizer) for member in range(_GROUP))
        recorder.finished(FinishedGroup(group=group, rollouts=rollouts))
        recorder.ended([index], "trained", "", index)
        trained.append(_trained(index, rollouts[1:]), index)
    if long_tokens:
        prompt = TokenIds(tokenizer.encode("Go on:"))
        group = Group(index=len(HOSTILE) * 2, task=Task(task_id="long", prompt="long"), prompt_ids=prompt, size=1,
                      admitted_version=0, admitted_s=0.0)  # fmt: skip
        recorder.finished(FinishedGroup(group=group, rollouts=(_long(group, long_tokens, tokenizer),)))
        recorder.ended([group.index], "filtered", HOSTILE[0], None)
    recorder.close()
    trained.close()


def _rollout(group: Group, member: int, text: str, tokenizer: Tokenizer) -> Rollout:
    ids = tokenizer.encode(f"Answer {member}: {text}")
    cut = len(ids) // 2
    failure = Failure(boundary="environment", cause=text, infrastructure=False, detail=text) if member == 0 else None
    return Rollout(
        group=group.index,
        member=member,
        prompt_ids=group.prompt_ids,
        response_ids=TokenIds(ids),
        response_logprobs=TokenLogprobs(-np.linspace(0, 9, len(ids))),
        response_mask=TokenMask([n % 7 > 0 for n in range(len(ids))]),
        versions=(
            VersionSpan(version=group.index, tokens=cut),
            VersionSpan(version=group.index + 1, tokens=len(ids) - cut),
        ),
        reward=member / _GROUP,
        solved=member > 1,
        verdict={"detail": text, text: [text, None, 1]},
        failure=failure,
        turn_ends=(cut, len(ids)),
        turn_rewards=(0.0, 0.5),
        turns=2,
        opened_s=group.index + 0.0,
        first_token_s=group.index + 0.2,
        generated_s=group.index + 0.8,
        finished_s=group.index + 0.9,
        verify_s=0.05,
    )


def _long(group: Group, tokens: int, tokenizer: Tokenizer) -> Rollout:
    sentence = tokenizer.encode("All work and no play makes a very long rollout. " + HOSTILE[0] + "\n")
    ids = np.resize(np.array(sentence, np.int32), tokens)
    return Rollout(
        group=group.index,
        member=0,
        prompt_ids=group.prompt_ids,
        response_ids=TokenIds(ids),
        response_logprobs=TokenLogprobs(np.full(tokens, -0.5, np.float32)),
        response_mask=TokenMask.filled(True, tokens),
        versions=(VersionSpan(version=3, tokens=tokens),),
        finish_reason="length",
        finished_s=100.0,
    )


def _trained(step: int, rollouts: Sequence[Rollout]) -> Any:
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    total = sum(lengths)
    return trained_batch(
        step=np.full(len(lengths), step, np.int32),
        group=[rollout.group for rollout in rollouts],
        member=[rollout.member for rollout in rollouts],
        sequence=np.zeros(len(lengths), np.int32),
        weight=np.ones(len(lengths)),
        logprobs=list_array(-np.linspace(0, 9, total).astype(np.float32), lengths),
        clipped=list_array(np.arange(total) % 5 == 0, lengths),
        trained=list_array(np.ones(total, bool), lengths),
        advantages=list_array(np.linspace(-1, 1, total).astype(np.float32), lengths),
    )


def _fail(told: object) -> None:
    raise AssertionError(f"the recorder stopped: {told}")


# --- damage ----------------------------------------------------------------------------------------------


def write_damaged_runs(root: Path, whole: Path) -> list[str]:
    """Folders below ``root`` with one thing wrong each, made of a ``whole`` run; the names of all."""
    for name, spoil in DAMAGE.items():
        shutil.copytree(whole, root / name)
        spoil(root / name)
    for name in ("ended", "interrupted", "killed"):
        copy_recorded(name, root / f"older-{name}")
    (root / "only-an-epoch" / "epoch").mkdir(parents=True)
    return sorted(path.name for path in root.iterdir())


def copy_recorded(name: str, folder: Path) -> None:
    """A run of the format before rollouts/, out of tests/fixtures."""
    shutil.copytree(RECORDED / name, folder)


def _append(name: str, data: bytes) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(data)

    return spoil


def _remove(*names: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for name in names:
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return spoil


def _overwrite(pattern: str, data: bytes, at: float) -> Callable[[Path], None]:
    """Of each file of ``pattern``: ``data`` written over what lies ``at`` this share of it."""

    def spoil(run: Path) -> None:
        for path in run.glob(pattern):
            with path.open("r+b") as file:
                file.seek(int(at * os.path.getsize(path)))
                file.write(data)

    return spoil


def _truncate(pattern: str, share: float) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for path in run.glob(pattern):
            os.truncate(path, int(share * path.stat().st_size))

    return spoil


_GARBAGE = bytes(range(256)) * 16
DAMAGE: dict[str, Callable[[Path], None]] = {
    "half-a-line": _append("ledger.jsonl", b'{"kind":"step","st'),
    "garbage-in-ledger": _overwrite("ledger.jsonl", _GARBAGE, 0.4),
    "deep-line": _append("ledger.jsonl", b"[" * 100_000 + b"\n"),
    "ledger-is-garbage": _overwrite("ledger.jsonl", b"\0" * (1 << 20), 0.0),
    "no-ledger": _remove("ledger.jsonl"),
    "no-config": _remove("config.json"),
    "config-is-a-list": lambda run: (
        run.joinpath("config.json").write_text(json.dumps({"schema": SCHEMA, "run": [1], "queue": 3})) and None
    ),
    "config-is-garbage": _overwrite("config.json", _GARBAGE, 0.0),
    "no-rollouts": _remove("rollouts"),
    "no-endings": _remove("rollouts/ended", "rollouts/trained"),
    "garbage-in-segment": _overwrite("rollouts/*/*.arrow", _GARBAGE, 0.6),
    "segment-is-garbage": _overwrite("rollouts/*/*.arrow", _GARBAGE, 0.0),
    "torn-segment": _truncate("rollouts/*/*.arrow", 0.7),
    "empty-segment": _truncate("rollouts/*/*.arrow", 0.0),
    "half-a-trace": _truncate("trace.jsonl", 0.7),
    "garbage-in-trace": _overwrite("trace.jsonl", _GARBAGE, 0.3),
    "no-trace": _remove("trace.jsonl"),
    "no-logs": _remove("logs"),
    "ledger-is-a-folder": lambda run: (run / "ledger.jsonl").unlink() or (run / "ledger.jsonl").mkdir(),
    "garbage-in-waits": lambda run: (run / "waits.json").write_bytes(_GARBAGE) and None,
    "empty-ledger": _truncate("ledger.jsonl", 0.0),
}
