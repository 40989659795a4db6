"""`headway quickstart` and `headway new`: train a small model, and write a project from a template."""

from __future__ import annotations

import difflib
import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import typer

from headway.cli import experiment_options as experiments
from headway.cli.recipe import Recipe
from headway.records.errors import ConfigurationError

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
PROJECTS = {
    "math": "a verifier of your own; sums written out step by step",
    "agent": "a program that calls the model over HTTP, one call a step",
    "tools": "an environment with a tool that the model learns to call",
    "kernel": "C++ kernels, compiled and checked by a kernel service",
    "gym": "a game with reset and step, played by its rewards",
    "simulator": "a policy of vectors, not words, that acts in a simulator of many lanes",
}
GPU = "gpu"  # files of "math", but for those in its folder, and an experiment that fits the machine
QUICKSTART = "quickstart"  # the folder of its template
PLACEHOLDER = "myproject"  # stands for the project's name in names and texts of a template's files
_COMPILERS = ("g++", "c++", "clang++")


def add_commands(app: typer.Typer) -> None:
    experiments.add_command(
        app, quickstart, "headway quickstart", "headway quickstart runs/mine --seed 3 --run.steps=50"
    )
    experiments.add_command(app, new, "headway new demo --template tools", overridable=False)


def quickstart(
    context: typer.Context,
    folder: str = typer.Argument("", metavar="[FOLDER]", help="Default: runs/arithmetic-SEED.", show_default=False),
    seed: int = typer.Option(0, metavar="N", help="Seed of tasks, model, cold start and RL."),
    engine: str = typer.Option("torch", metavar="NAME", help="Engine that generates: torch or vllm."),
    cold_start_only: bool = typer.Option(False, "--cold-start-only", help="Stop before RL."),
) -> None:
    """Train a small model by RL on this machine: tasks, a random model, a cold start, asynchronous GRPO, a report.

    Takes 5 to 13 minutes on two cores. Runs each step by the command that you would type, prints it, and skips what an
    earlier run in the folder has done. Any key of the experiment file can be given as --section.key=value.
    """
    if folder.startswith("--"):  # an override, which the parser takes for a missing folder
        context.args.insert(0, folder)
        folder = ""
    user_overrides = experiments.given_overrides(context)
    if engine not in ("torch", "vllm"):
        raise ConfigurationError(f"--engine {engine!r}: valid: torch, vllm (docs/vllm.md)")
    target_folder = Path(folder or f"runs/arithmetic-{seed}")
    if not (target_folder / "make_tasks.py").exists():
        write_files(QUICKSTART, target_folder)
    _note_missing_compiler()
    config, recipe = target_folder / "experiment.toml", Recipe(target_folder, seed, user_overrides)
    head_options = ("--heads", 3, "--kv-heads", 1) if engine == "vllm" else ()  # of 32 dimensions
    model_options = ("--character-level", *head_options)
    model, keys = recipe.cold_start(config, target_folder / "make_tasks.py", initial=model_options, sft=user_overrides)
    if not cold_start_only:
        # vLLM's fixed cost of a step exceeds what it saves for a model this small: more time gives as many steps
        vllm_keys = ("--generator.engine=vllm", "--run.time_limit_s=600") if engine == "vllm" else ()
        recipe.train(config, model, *keys, *vllm_keys)


def new(
    name: str = typer.Argument(
        ..., metavar="NAME", help="Folder to make; its last part names the project's module.", show_default=False
    ),
    template: str = typer.Option("math", "--template", "-t", metavar="NAME", help=f"{', '.join((*PROJECTS, GPU))}."),
    model: str = typer.Option(
        "", "--model", metavar="NAME", help="For gpu: a folder, or Qwen/Qwen3-4B[@REVISION] and the like."
    ),
    machine: str = experiments.MACHINE,
) -> None:
    """Write a small project that learns: experiment, verifier or environment, tasks, tests, Makefile, README.

    In its folder `make test` takes seconds, and `make run` trains a small model, or policy, in minutes on two cores.
    """
    if template == GPU:
        return _new_gpu_project(name, model, machine)
    if model or machine:
        raise ConfigurationError(f"--model and --machine: valid with --template {GPU}, not {template}")
    if template not in PROJECTS:
        close_matches = difflib.get_close_matches(template, (*PROJECTS, GPU), n=1)
        hint = f"did you mean {close_matches[0]}? " if close_matches else ""
        raise ConfigurationError(f"--template {template!r}: {hint}valid: {', '.join((*PROJECTS, GPU))} (docs/new.md)")
    folder, module_name = Path(name), _module_name(name, template)
    compiler = _compiler()
    if template == "kernel" and not compiler:
        raise ConfigurationError(f"--template kernel: {_no_compiler()}")
    write_files(template, folder, _substitutions(module_name))
    typer.echo(
        f"{folder}: {PROJECTS[template]}\n\n  cd {folder}\n  make test   seconds\n  make run    minutes, on two cores"
    )
    if shutil.which("make") is None:
        typer.echo("\nnote: there is no make on PATH; on Debian: apt install make")
    _note_missing_compiler()


def _new_gpu_project(name: str, model: str, pool: str) -> None:
    from headway.models.hf.downloads import model_folder
    from headway.planner.gpu_experiment import fitted_experiment, has_chat_template
    from headway.runtime.nodes.gpus import read_machine

    if not model:
        raise ConfigurationError(f"--template {GPU} needs --model; valid: a folder, or the like of Qwen/Qwen3-4B")
    folder, module_name = Path(name), _module_name(name, "math")
    machine = experiments.described_machine(pool) or read_machine()
    if machine.obstacle:
        raise ConfigurationError(f"--template {GPU}: {machine.obstacle}; or describe a machine by --machine POOL.toml")
    model_path = model_folder(model, weights=False, key="--model")
    setting_tables = {
        "run": {"directory": "runs/rl", "steps": 200},
        "model": {"template": "chat" if has_chat_template(model_path) else "raw"},
        "tasks": {split: {"path": f"tasks/{split}.jsonl"} for split in ("train", "validation", "test")},
        "verifier": {"name": f"{module_name}:score"},
        "rollout": {"group_size": 8},
        "queue": {"groups_per_step": 32, "budget": 2},
        "algorithm": {"loss": "decoupled_ppo"},
        "evaluation": {"every_steps": 20},
    }
    model_name = str(Path(model).resolve()) if model_path == model else model
    experiment_text = fitted_experiment(machine, model_name, model_path, setting_tables)
    write_files("math", folder, _substitutions(module_name), (TEMPLATES / GPU, experiment_text))
    check_command = "make check" + (f" MACHINE={shlex.quote(str(Path(pool).resolve()))}" if pool else "")
    hardware = "its GPUs" if machine.usable else "CPU cores, for want of a GPU"
    typer.echo(f"{folder}: {model} on {hardware}\n\n  cd {folder}\n  make tasks\n  {check_command}\n  make run")


def _substitutions(module: str) -> dict[str, str]:
    python_path = shutil.which("python")
    is_activated = python_path is not None and os.path.samefile(Path(python_path).parent, Path(sys.executable).parent)
    # lets `make` find this interpreter even if its environment isn't activated, or its path has blanks
    python_command = "python" if is_activated else shlex.quote(sys.executable).replace("$", "$$").replace("#", "\\#")
    return {PLACEHOLDER: module, "PYTHON ?= python\n": f"PYTHON ?= {python_command}\n"}


def write_files(
    template: str, folder: Path, substitutions: Mapping[str, str] | None = None, changed: tuple[Path, str] | None = None
) -> None:
    """Copy a template's files to ``folder``, which must be empty or not exist.

    All files are staged first. A new folder appears in one rename; an existing one gets its files one by one.

    ``changed``: a folder whose files replace some, and the text of experiment.toml.
    ``substitutions``: replacements, by the text that they replace, in contents and names of files. Raises
    ConfigurationError for a folder that isn't empty, or can't be written.
    """
    remedy = "choose a folder that doesn't exist yet, or an empty one"
    scratch_folder: Path | None = None
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{folder} is a file; {remedy}")
        if folder.is_dir() and (existing_names := sorted(os.listdir(folder))):
            raise ConfigurationError(f"{folder} isn't empty: it holds {', '.join(existing_names[:3])}; {remedy}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch_parent = folder if folder.is_dir() else folder.parent
        scratch_folder = Path(tempfile.mkdtemp(dir=scratch_parent, prefix=f".{folder.name}.", suffix=".partial"))
        staged_folder = scratch_folder / "files"
        staged_folder.mkdir()  # with the rights that a new folder has here; `scratch_folder`'s are its owner's alone
        file_by_name = {file.name: file for file in sorted((TEMPLATES / template).iterdir())}
        for file in (file_by_name | ({file.name: file for file in changed[0].iterdir()} if changed else {})).values():
            if file.is_file():
                (staged_folder / _substitute(file.name, substitutions)).write_text(
                    _substitute(file.read_text(encoding="utf-8"), substitutions), encoding="utf-8"
                )
        if changed:
            (staged_folder / "experiment.toml").write_text(changed[1], encoding="utf-8")
        if folder.is_dir():
            for file in staged_folder.iterdir():
                file.rename(folder / file.name)
        else:
            staged_folder.rename(folder)
    except OSError as error:
        raise ConfigurationError(f"{folder} can't be written ({error.strerror}); choose a folder of your own") from None
    finally:
        if scratch_folder is not None:
            shutil.rmtree(scratch_folder, ignore_errors=True)


def _substitute(text: str, substitutions: Mapping[str, str] | None) -> str:
    for placeholder, replacement in (substitutions or {}).items():
        text = text.replace(placeholder, replacement)
    return text


def _module_name(name: str, template: str) -> str:
    """Return the module name of the project ``name``. Raises ConfigurationError for a name that can't be imported, or
    is taken."""
    module = Path(name).name
    if not module.isidentifier() or keyword.iskeyword(module):
        valid = re.sub(r"\W", "_", module)
        valid = valid if valid.isidentifier() and not keyword.iskeyword(valid) else f"my_{valid}"
        raise ConfigurationError(
            f"NAME {name!r}: {module!r} is no Python identifier, and the project's module is called so; try {valid}"
        )
    template_modules = {file.stem for file in (TEMPLATES / template).glob("*.py")}
    module_spec = importlib.util.find_spec(module) if module not in template_modules else None
    if module in template_modules or (module_spec is not None and module_spec.origin):
        raise ConfigurationError(f"NAME {name!r}: there is a module {module!r} already; try my_{module}")
    return module


def _compiler() -> str:
    """Return the C++ compiler that is used on this machine; "" when there is none."""
    return os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), "")


def _no_compiler() -> str:
    return f"no C++ compiler (CXX is not set; no {', '.join(_COMPILERS)}); on Debian: apt install g++"


def _note_missing_compiler() -> None:
    if not _compiler():
        typer.echo(f"note: {_no_compiler()}; plain torch replaces the C++ kernels and is slower")
