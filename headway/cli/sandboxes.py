"""``headway sandboxes``: list, reap and check this machine's sandboxes; list and prune unpacked images."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli import experiment_options as experiments
from headway.cli.printing import print_json
from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.records.sandbox_statistics import Reaped
    from headway.sandbox.images.store import ImageStore
    from headway.sandbox.leftovers import SandboxRecord

STORE = typer.Option(None, "--store", help="Folder of unpacked images, sandbox.store; default: this user's.")
STATE = typer.Option(None, "--state", help="Folder of the owners' records; default: this user's.")

JSON = typer.Option(False, "--json", help="Print everything as one JSON object.")

BACKEND = typer.Option("", "--backend", help="A provider as well: modal, e2b or prime, with the key it needs.")


def add_commands(app: typer.Typer) -> None:
    sandboxes_app = typer.Typer(help="Sandboxes of this machine.", no_args_is_help=True)
    sandboxes_app.command("list")(list_)
    sandboxes_app.command("reap")(reap)
    experiments.add_command(sandboxes_app, check)
    sandboxes_app.command("images")(list_images)
    sandboxes_app.command("prune")(prune)
    app.add_typer(sandboxes_app, name="sandboxes")


def list_(state: Path | None = STATE, as_json: bool = JSON) -> None:
    """List this machine's sandboxes, containers included where a Docker daemon answers: id, backend, owner, run, age,
    time to live, labels."""
    records = _sandbox_records(state)
    if as_json:
        return print_json({"sandboxes": [{"record": record, "owner_lives": alive} for record, alive in records]})
    for record, alive in records:
        owner_text = f"{record.owner_pid} ({'alive' if alive else 'dead'})"
        labels = " ".join(f"{key}={value}" for key, value in sorted(record.labels.items()))
        age_text = f"{time.time() - record.created_s:.0f} of {record.ttl_s:.0f} s"
        typer.echo(f"{record.id}  {record.backend}  owner {owner_text}  run {record.run or '-'}  {age_text}  {labels}")
    dead_count = sum(not alive for _, alive in records)
    remedy = ": `headway sandboxes reap` removes those" if dead_count else ""
    typer.echo(f"{len(records)} sandboxes, {dead_count} of dead owners{remedy}")


def reap(state: Path | None = STATE, backend: str = BACKEND, as_json: bool = JSON) -> None:
    """Remove what dead owners have left: processes, control groups, directories; containers where a Docker daemon
    answers; with --backend also sandboxes at a provider made from this machine. Living owners' aren't touched."""
    from headway.sandbox import leftovers

    reaped = leftovers.reap(state or leftovers.default_state())
    with contextlib.suppress(ImportError):  # without aiodocker Docker has nothing of ours
        from headway.sandbox.docker import daemon

        reaped += daemon.query_default_daemon(daemon.reap)
    if backend:
        reaped += asyncio.run(_reap_hosted(backend))
    living_count = sum(alive for _, alive in _sandbox_records(state))
    if as_json:
        return print_json({"reaped": reaped, "living": living_count})
    for reaped_owner in reaped:
        typer.echo(str(reaped_owner))
    typer.echo(f"{len(reaped)} dead owners were cleaned up; {living_count} sandboxes of living owners were kept")


def _sandbox_records(state: Path | None) -> list[tuple[SandboxRecord, bool]]:
    """Return the record of every sandbox of this machine, and whether its owner lives."""
    from headway.sandbox import leftovers

    records = list(leftovers.records(state or leftovers.default_state()))
    with contextlib.suppress(ImportError):
        from headway.sandbox.docker import daemon

        records += daemon.query_default_daemon(daemon.records)
    return records


async def _reap_hosted(name: str) -> list[Reaped]:
    from headway.config.sandbox import SandboxConfig
    from headway.sandbox.backends import HOSTED, backend_of
    from headway.sandbox.hosted.backend import HostedBackend

    if name not in HOSTED:
        raise ConfigurationError(f"--backend {name}: valid: {', '.join(HOSTED)}")
    backend = backend_of(SandboxConfig.model_validate({"backend": name}))
    assert isinstance(backend, HostedBackend)
    try:
        return await backend.reap()
    finally:
        await backend.close()


def check(
    context: typer.Context,
    config: str = typer.Argument(
        "", metavar="[CONFIG]", help="Experiment file: check its sandboxes, as many as it needs."
    ),
    state: Path | None = STATE,
    image: str = typer.Option("", help="Image, as sandbox.image; unpacked if necessary."),
    store: Path | None = STORE,
    as_json: bool = JSON,
) -> None:
    """Make a sandbox, use it, try its limits, end it; report what is missing here, with the remedy.

    Any key of the experiment file can be given as --section.key=value.
    """
    from headway.config.sandbox import SandboxConfig
    from headway.records.sandbox import SandboxFinding
    from headway.sandbox.backends import backend_of, spec_of
    from headway.sandbox.local.backend import LocalBackend
    from headway.sandbox.preflight import findings

    settings, needed_sandboxes = SandboxConfig(image=image, store=str(store or "")), 1
    if config:
        experiment = experiments.load(context, config)
        settings, needed_sandboxes = experiment.sandbox, experiment.concurrent_rollouts
    elif context.args:
        context.fail(f"unexpected argument: {context.args[0]}")

    async def collect_findings() -> list[SandboxFinding]:
        spec = await spec_of(settings)
        backend = LocalBackend(state) if state is not None and settings.backend == "local" else backend_of(settings)
        try:
            return await findings(settings, backend, needed_sandboxes, spec=spec)
        finally:
            await backend.close()

    preflight_findings = asyncio.run(collect_findings())
    if as_json:
        print_json({"findings": preflight_findings})
        if any(finding.fatal for finding in preflight_findings):
            raise typer.Exit(2)
        return
    for finding in preflight_findings:
        if not finding.fatal:
            typer.echo(f"warning: {finding}")
    fatal_texts = [str(finding) for finding in preflight_findings if finding.fatal]
    if fatal_texts:
        raise ConfigurationError("sandboxes: " + "; ".join(fatal_texts))
    typer.echo("sandboxes work here, with all limits" if not settings.allow_unbounded else "sandboxes work here")


def list_images(store: Path | None = STORE, as_json: bool = JSON) -> None:
    """List unpacked images, the longest unused first: size, last use, whether a sandbox uses it, source."""
    opened_store = _store(store)
    images = opened_store.images() if opened_store is not None else []
    used_bytes = opened_store.used_bytes() if opened_store is not None else 0
    if as_json:
        return print_json({"images": images, "used_bytes": used_bytes})
    for image in images:
        idle_h = max(0.0, time.time() - image.used_s) / 3600
        use = "in use" if image.in_use else "unused"
        name, layers = image.record.id[:12], len(image.record.layers)
        typer.echo(f"{name}  {_size(image.bytes)} in {layers} layers  {idle_h:.1f} h ago  {use}  {image.record.source}")
    typer.echo(f"{len(images)} images, {_size(used_bytes)} on disk: shared layers are stored once")


def prune(
    store: Path | None = STORE,
    to_bytes: int = typer.Option(0, min=0, help="Stop when the remaining images take no more than this."),
    as_json: bool = JSON,
) -> None:
    """Remove unused unpacked images, the longest unused first, and layers of no image."""
    opened_store = _store(store)
    removed: list[str] = []
    remaining_bytes = 0
    if opened_store is not None:
        with opened_store.changing() as change:
            change.prune(to_bytes)
            removed = change.removed
        remaining_bytes = opened_store.used_bytes()
    if as_json:
        return print_json({"removed": removed, "left_bytes": remaining_bytes})
    for line in removed:
        typer.echo(line)
    typer.echo(f"{len(removed)} images removed, {_size(remaining_bytes)} left")


def _store(folder: Path | None) -> ImageStore | None:
    """Open the store of images; None when this user has none yet."""
    from headway.sandbox.images import resolve
    from headway.sandbox.images import store as image_store
    from headway.sandbox.images.tree import ImageError

    if folder is None and not resolve.default_store().exists():
        return None
    try:
        return image_store.ImageStore.existing(folder or resolve.default_store())
    except ImageError as error:
        raise ConfigurationError(f"--store: {error}") from None


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
