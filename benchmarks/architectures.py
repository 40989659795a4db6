"""Does an architecture that only transformers has learn? The arithmetic of benchmarks/quickstart.py from its random
weights: imitation of imperfect demonstrations, then reinforcement learning.

    python benchmarks/architectures.py [--kinds Olmo2 FalconH1 ...] [KEYS OF THE EXPERIMENT]

Three layers of width 96, as the quickstart's own model, with its tokenizer; sizes that a kind alone has are those of
tests/support/tiny_hub.py. Prints each run's validation curve and, as the last line, one JSON object: per kind the solve
rate on the held-out test before and after reinforcement learning, its standard error and the wall-clock of all.
Limits: two cores, one for the generator and one for the trainer; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from quickstart import run_seed

from headway.cli.projects import QUICKSTART, write_files
from headway.models.initialise import initialise_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.tiny_hub import ONE_A_ROW, PACKED, SIZES, copy_tokenizer, vocabulary_of

_OWN = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def prepare(folder: Path, kind: str) -> None:
    """Write the quickstart's files and tasks, and a random model of this kind, which `headway quickstart` takes up."""
    write_files(QUICKSTART, folder)
    subprocess.run([sys.executable, folder / "make_tasks.py", folder / "tasks", "--seed", "0"], check=True)
    rows = [json.loads(line) for line in (folder / "tasks" / "sft.jsonl").read_text().splitlines()]
    own = folder / "tokenizer"
    texts = [row["prompt"] + row["solution"] for row in rows]
    initialise_model(own, texts, character_level=True)
    torch.manual_seed(0)
    options = (PACKED | ONE_A_ROW)[kind]
    if kinds := options.get("layer_types"):
        options = options | {"layer_types": [*kinds, *kinds][: _OWN["num_hidden_layers"]]}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options, **_OWN, **vocabulary_of(own)})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "init")
    copy_tokenizer(own, folder / "init")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-architectures"))
    parser.add_argument("--kinds", nargs="*", default=["Olmo2", "FalconH1"], choices=[*PACKED, *ONE_A_ROW])
    arguments, overrides = parser.parse_known_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.2f}, transformers {transformers.__version__}", flush=True)
    found: dict[str, object] = {}
    for kind in arguments.kinds:
        prepare(arguments.directory / kind, kind)
        run = run_seed(arguments.directory / kind, 0, overrides)
        found[kind] = {key: value for key, value in run._asdict().items() if key not in ("seed", "curve")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
