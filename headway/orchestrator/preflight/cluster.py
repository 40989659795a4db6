"""Findings on a run's machines before the start: whether its books survive them."""

from __future__ import annotations

from pathlib import Path

from headway.config.schema import Experiment
from headway.orchestrator.preflight.findings import Findings
from headway.runtime.file_systems import require_local


def books_key(experiment: Experiment) -> str:
    """The key that says where the books lie."""
    return "run.directory" if experiment.cluster.books_directory is None else "cluster.books_directory"


def cluster_findings(experiment: Experiment) -> Findings:
    """Findings on where the books and their copy lie, and what can't be seen of the nodes from here."""
    findings, cluster = Findings(), experiment.cluster
    with findings.refused(books_key(experiment)):
        require_local(Path(cluster.books_directory or experiment.run.directory))
    if cluster.address and cluster.replicate_to is None:
        findings.warning(
            "cluster.replicate_to",
            "isn't set: the books are on this machine alone; should it be lost, no other can resume the run",
        )
    if cluster.nodes:
        findings.info(
            "cluster.nodes",
            f"{', '.join(cluster.nodes)}: not looked at here; the start compares their versions, devices and model "
            "files with this machine's, and --calibrate starts the run's workers on them",
        )
    return findings
