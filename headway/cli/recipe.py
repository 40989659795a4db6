"""`Recipe`: trains a small model from its tasks to the report, by commands that a user would type."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Recipe:
    """Makes tasks, a model, its cold start, RL and a report in one folder, for `headway quickstart` and the examples.

    Each step is a command, which is printed and run, or skipped if an earlier run in the folder has done it; a command
    that fails ends this process with its exit code.

    Example::

        recipe = Recipe.from_arguments("repair", __doc__)  # --seed, --directory, --cold-start-only, --section.key=value
        model, keys = recipe.cold_start("experiment.toml", "make_tasks.py", template=TEMPLATE)
        if not recipe.options["cold_start_only"]:
            recipe.train("experiment.toml", model, *keys)
    """

    def __init__(self, folder: str | Path, seed: int = 0, overrides: Sequence[str] = (), **options: Any) -> None:
        """``overrides``: keys of the experiment file, as ``--section.key=value``; ``options``: options of the
        caller."""
        self.folder, self.seed, self.overrides, self.options = Path(folder), seed, list(overrides), options

    @classmethod
    def from_arguments(cls, name: str, description: str | None, **options: tuple[Any, str]) -> Recipe:
        """Build the recipe from this process's command line; its folder is by default ``runs/NAME-SEED``. ``options``:
        further options, each with its default and help; a default of False makes a flag."""
        parser = argparse.ArgumentParser(description=(description or name).splitlines()[0])
        parser.add_argument("--seed", type=int, default=0, help="of tasks, model, cold start and RL")
        parser.add_argument("--directory", help=f"default: runs/{name}-SEED")
        parser.add_argument("--cold-start-only", action="store_true", help="stop before RL")
        for option, (default, help_text) in options.items():
            argument_settings: dict[str, Any] = (
                {"action": "store_true"} if default is False else {"type": type(default), "default": default}
            )
            parser.add_argument(f"--{option.replace('_', '-')}", help=help_text, **argument_settings)
        namespace, overrides = parser.parse_known_args()
        arguments = vars(namespace)
        seed: int = arguments.pop("seed")
        return cls(arguments.pop("directory") or f"runs/{name}-{seed}", seed, overrides, **arguments)

    def run(self, *words: object, unless: Path | None = None) -> None:
        """Print and run ``headway ...`` or ``python ...``; no-op if the path ``unless`` exists."""
        if unless is not None and unless.exists():
            return
        program, *arguments = map(str, words)
        print(f"\n$ {shlex.join((program, *arguments))}", flush=True)
        command = [sys.executable, *(("-m", "headway.cli.main") if program == "headway" else ()), *arguments]
        if exit_code := subprocess.run(command).returncode:
            sys.exit(exit_code if exit_code > 0 else 1)

    def cold_start(
        self,
        config: str | Path,
        make_tasks: str | Path,
        *,
        splits: Sequence[str] = ("train", "validation", "test"),
        initial: Sequence[object] = (),
        template: str = "",
        sft: Sequence[str] = (),
    ) -> tuple[Path, list[str]]:
        """Make tasks, a random model and its cold start on the tasks' ``sft.jsonl``. Returns the model's folder, and
        the keys of ``config`` that name tasks and seed. ``initial``, ``sft``: further arguments of init-model and sft;
        ``template``: the model's chat template."""
        tasks, init, model_folder = (self.folder / name for name in ("tasks", "init", "sft"))
        keys = [*(f"--tasks.{split}.path={tasks}/{split}.jsonl" for split in splits), f"--run.seed={self.seed}"]
        seed = ("--seed", self.seed)
        self.run("python", make_tasks, tasks, *seed, unless=tasks / f"{splits[-1]}.jsonl")
        self.run("headway", "init-model", init, "--texts", tasks / "sft.jsonl", *initial, *seed, unless=init)
        if template and not model_folder.exists():
            (init / "chat_template.jinja").write_text(template, encoding="utf-8")
        path_options = (f"--model.path={init}", f"--sft.data={tasks}/sft.jsonl", f"--sft.output={model_folder}")
        self.run("headway", "sft", config, *path_options, *keys, *sft, unless=model_folder)
        return model_folder, keys

    def quickstart(self, template: str) -> tuple[Path, list[str]]:
        """Run the cold start of `headway quickstart`, and add a chat template to the model. Returns as `cold_start`."""
        self.run("headway", "quickstart", self.folder, "--seed", self.seed, "--cold-start-only")
        model_folder = self.folder / "chat"
        if not model_folder.exists():
            shutil.copytree(self.folder / "sft", model_folder)
            (model_folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        task_paths = [f"--tasks.{split}.path={self.folder}/tasks/{split}.jsonl" for split in ("train", "validation")]
        return model_folder, [*task_paths, f"--run.seed={self.seed}"]

    def train(self, config: str | Path, model: Path, *keys: str, command: str = "train", name: str = "rl") -> Path:
        """Train a model by RL in the folder ``name``, or resume that run, and print its report. Returns the run's
        folder."""
        run_folder = self.folder / name
        if _finished(run_folder):
            print(f"\n{run_folder} holds a finished run; remove {self.folder} to start again.")
        else:
            resume_option = ("--resume",) if (run_folder / "config.json").exists() else ()
            path_options = (f"--model.path={model}", f"--run.directory={run_folder}")
            self.run("headway", command, config, *resume_option, *path_options, *keys, *self.overrides)
        self.run("headway", "report", run_folder)
        return run_folder


def _finished(run: Path) -> bool:
    summary_file = run / "summary.json"
    return summary_file.exists() and bool(json.loads(summary_file.read_text(encoding="utf-8"))["finished"])
