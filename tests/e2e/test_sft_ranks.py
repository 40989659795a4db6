"""`headway sft` on two ranks: the model and the losses of one rank, adapters and batches of fewer sequences than ranks
included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tiny_trainer import make_experiment, make_model

from headway.config.load import validate_experiment
from headway.orchestrator.jobs.sft import run_sft
from headway.records.errors import ConfigurationError
from headway.runtime.devices import machine_cores
from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

pytestmark = pytest.mark.real
PAIRS = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(6)]


def trained(folder: Path, ranks: int, divided: dict[str, int] | None = None, **sections: Any) -> dict[str, Any]:
    model = folder / "model"
    if not model.exists():
        make_model(model, vocabulary=300)
        train_byte_fallback_tokenizer([p + s for p, s in PAIRS], 300, model)
        rows = [json.dumps({"prompt": p, "solution": s}) for p, s in PAIRS]
        (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    last = len(machine_cores()) - 1
    sft = {"data": str(folder / "pairs.jsonl"), "output": str(folder / f"out-{ranks}"), "batch_sequences": 12,
           "warmup_steps": 2, "learning_rate": 1e-2, "devices": [f"cpu:{min(rank, last)}" for rank in range(ranks)],
           **sections.pop("sft", {})}  # fmt: skip
    trainer = {"micro_batch_tokens": 20, "devices": sft["devices"]} | (divided if ranks > 1 and divided else {})
    raw = make_experiment(str(model), folder, sft=sft, trainer=trainer, **sections)
    return run_sft(validate_experiment(raw, "test"))


def tensors_of(folder: Path, file: str) -> dict[str, Any]:
    """The tensors of a folder, of which several ranks have written a file each."""
    files = folder.glob(f"{file.partition('.')[0]}*.safetensors")
    return {name: tensor for part in files for name, tensor in load_file(part).items()}


@pytest.mark.parametrize(
    ("sections", "file"),
    [
        ({"sft": {"epochs": 2}}, "model.safetensors"),  # with sequences held out
        pytest.param({"sft": {"steps": 3, "batch_sequences": 1}}, "model.safetensors", marks=pytest.mark.slow),
        pytest.param(
            {"sft": {"steps": 3}, "model": {"adapter": {"rank": 4, "alpha": 8.0}}},
            "adapter_model.safetensors",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.parametrize("divided", [{}, {"context_parallel": 2}])
def test_two_ranks_of_sft_equal_one(
    tmp_path: Path, sections: dict[str, Any], file: str, divided: dict[str, int]
) -> None:
    alone, both = (trained(tmp_path, ranks, divided, **{k: dict(v) for k, v in sections.items()}) for ranks in (1, 2))
    names = ("loss", "loss_mean", "grad_norm", "tokens", "version", "flops", "effective_token_share")
    names += ("held_out_loss",) if "epochs" in sections["sft"] else ()
    assert {name: both[name] for name in names} == pytest.approx({name: alone[name] for name in names}, rel=1e-4)
    first, second = (tensors_of(tmp_path / f"out-{ranks}", file) for ranks in (1, 2))
    assert all(abs(values - second[name]).max() < 1e-4 for name, values in first.items())


def test_old_key_is_refused_with_the_new_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sft\.device.*set sft\.devices to a list"):
        validate_experiment(make_experiment("m", tmp_path, sft={"device": "cpu:0"}), "test")
    with pytest.raises(ConfigurationError, match=r"sft\.devices"):
        validate_experiment(make_experiment("m", tmp_path, sft={"devices": []}), "test")
