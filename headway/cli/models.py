"""`headway init-model`, `headway sft`, `headway merge` and `headway weights`, which make models."""

from __future__ import annotations

import typer

from headway.cli import experiment_options as experiments
from headway.cli.printing import print_json, print_result, print_rows


def add_commands(app: typer.Typer) -> None:
    example = "headway init-model models/tiny --texts data/sft.jsonl --layers 3"
    experiments.add_command(app, init_model, example, overridable=False)
    example = "headway sft experiment.toml --model.path=runs/init"
    experiments.add_command(app, sft, example)
    example = "headway merge models/base runs/rl/best models/merged"
    experiments.add_command(app, merge, example, overridable=False)
    example = "headway weights runs/rl --version 137 --output models/rl-137"
    experiments.add_command(app, weights, example, overridable=False)


def init_model(
    output: str = typer.Argument(
        ..., metavar="OUTPUT", help="Folder to write; must not exist yet.", show_default=False
    ),
    texts: list[str] = typer.Option(
        ..., "--texts", metavar="FILE", help="JSONL; every text in its objects trains the tokenizer. May be repeated."
    ),
    family: str = typer.Option(
        "qwen3",
        metavar="NAME",
        help="llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3; with experts qwen3_moe, mixtral.",
    ),
    vocabulary_size: int = typer.Option(512, metavar="N", help="Largest vocabulary of the tokenizer."),
    character_level: bool = typer.Option(False, "--character-level", help="One token per character: no merges."),
    layers: int = typer.Option(3, metavar="N", help="Decoder blocks."),
    width: int = typer.Option(96, metavar="N", help="Hidden size."),
    heads: int = typer.Option(4, metavar="N", help="Query heads; divides the width."),
    kv_heads: int = typer.Option(2, metavar="N", help="Key/value heads; divides the query heads."),
    intermediate: int = typer.Option(256, metavar="N", help="Feed-forward size (of one expert)."),
    max_positions: int = typer.Option(1024, metavar="N", help="Context, tokens."),
    window: int | None = typer.Option(
        None,
        metavar="N",
        help="Sliding window, tokens. Default: a quarter of the context for gemma2 and gemma3, else none.",
        show_default=False,
    ),
    experts: int = typer.Option(8, metavar="N", help="Experts of a layer."),
    experts_per_token: int = typer.Option(2, metavar="N", help="Experts per token."),
    tied: bool = typer.Option(True, metavar="", help="One matrix for embedding and output."),
    seed: int = typer.Option(0, metavar="N", help="Seed of the random weights."),
    as_json: bool = typer.Option(False, "--json", help="Print its sizes as one JSON object."),
) -> None:
    """Write a small, randomly initialised model with its own tokenizer, so that no network is needed."""
    from headway.tasks.source_rows import read_texts

    corpus = read_texts(texts)  # before torch is loaded, so that a wrong path fails at once
    from headway.models.initialise import initialise_model
    from headway.models.sizes import sizes_of

    model_config = initialise_model(
        output,
        corpus,
        vocabulary_size=vocabulary_size,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        max_positions=max_positions,
        tied=tied,
        seed=seed,
        family=family,
        window=window,
        experts=experts,
        experts_per_token=experts_per_token,
        character_level=character_level,
    )
    model_sizes = sizes_of(output)
    if as_json:
        parameter_counts = {"parameters": model_sizes.parameters, "active_parameters": model_sizes.active_parameters}
        return print_json({"model": output, **parameter_counts, "vocabulary_size": model_config.vocabulary_size})
    size_text = f"{model_sizes.parameters / 1e6:.2f} M parameters"
    if model_config.mixture is not None:
        size_text += f" ({model_sizes.active_parameters / 1e6:.2f} M for each token)"
    typer.echo(f"{output}: {size_text}, vocabulary of {model_config.vocabulary_size}")


def sft(
    context: typer.Context,
    config: str = experiments.CONFIG,
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    quiet: bool = typer.Option(False, "--quiet", help="Print no progress."),
) -> None:
    """Supervised cold start: train the model on the pairs or conversations of sft.data, into sft.output.

    Any key of the experiment file can be given as --section.key=value.
    """
    experiment = experiments.load(context, config, ranks_of="sft")
    from headway.orchestrator.jobs.sft import run_sft
    from headway.report.progress_bars import SftProgress
    from headway.report.tables import sft_rows

    with SftProgress(silent=quiet or as_json, time_limit_s=experiment.run.time_limit_s) as progress:
        outcome = run_sft(experiment, on_progress=progress)
    print_result(outcome, as_json, lambda: print_rows(sft_rows(outcome)))


def merge(
    model: str = typer.Argument(..., metavar="MODEL", help="The base's folder.", show_default=False),
    adapter: str = typer.Argument(..., metavar="ADAPTER", help="Folder in PEFT's format.", show_default=False),
    output: str = typer.Argument(..., metavar="OUTPUT", help="Folder to write; must not exist.", show_default=False),
) -> None:
    """Merge an adapter into the model it was trained beside: a whole model, with its tokenizer."""
    from headway.models.run_model import merge_folders
    from headway.orchestrator.jobs.model_card import write_merge_card

    merge_folders(model, adapter, output)
    write_merge_card(output, model, adapter)
    typer.echo(f"{output}: {model} with {adapter} merged")


def weights(
    run: str = typer.Argument(..., metavar="RUN", help="The run's folder.", show_default=False),
    version: int = typer.Option(..., "--version", metavar="V", help="The published version.", show_default=False),
    output: str = typer.Option(
        ..., "--output", metavar="DIR", help="Folder to write; must not exist.", show_default=False
    ),
) -> None:
    """Rebuild a version that a run has published between two checkpoints, bit for bit, as a model folder.

    It needs the deltas that a run with checkpoint.delta_bytes keeps beside its checkpoints. The weights are in the
    dtype that they were published in (generator.dtype), without the optimiser's state.
    """
    from headway.report.doctor import stored_experiment
    from headway.report.run_view import view_run

    experiment = stored_experiment(view_run(run))  # before torch is loaded, so that a wrong path fails at once
    from headway.services.published_version import rebuild

    base = rebuild(run, experiment, version, output)
    typer.echo(f"{output}: version {version}, verified, from the checkpoint of version {base}")
