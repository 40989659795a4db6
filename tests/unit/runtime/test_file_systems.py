"""Network file systems are recognised by the kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.orchestrator.preflight.cluster import cluster_findings
from headway.records.errors import ConfigurationError
from headway.runtime import file_systems
from headway.runtime.file_systems import network_file_system
from headway.runtime.run_directory import RunDirectory
from tests.support.simulated_run import experiment_of

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
90 22 0:50 / /shared rw,relatime shared:9 - nfs4 filer:/export rw,vers=4.2
91 90 8:2 / /shared/local rw - xfs /dev/sdb1 rw
92 22 0:51 / /my\040disk rw - fuse.sshfs host:/ rw
93 22 0:52 / /encrypted rw - fuse.gocryptfs /x rw
94 22 0:53 / /lustre rw - lustre 10.0.0.1@tcp:/x rw
95 22 0:54 / /again rw - ext4 /dev/sdc1 rw
96 22 0:55 / /again rw - beegfs beegfs_nodev rw
"""


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(file_systems, "_MOUNTS", tmp_path / "mounts")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/shared/runs/a", "nfs4"),
        ("/shared", "nfs4"),
        ("/shared2", ""),
        ("/shared/local/books", ""),
        ("/my disk/x", "fuse.sshfs"),
        ("/encrypted/x", ""),
        ("/lustre/x", "lustre"),
        ("/again/x", "beegfs"),
        ("/home/x", ""),
    ],
)
def test_network_file_system_is_that_of_the_longest_and_last_mount(path: str, kind: str) -> None:
    assert network_file_system(Path(path)) == kind


def test_books_on_a_network_file_system_are_refused_by_check_and_at_the_start(tmp_path: Path) -> None:
    shared = experiment_of(Path("/shared/run"))
    (found,) = cluster_findings(shared).by_level()
    assert (found.level, found.key) == ("error", "run.directory")
    assert "nfs4" in found.message
    assert "cluster.accounting_directory" in found.message
    there = experiment_of(tmp_path / "run", cluster={"accounting_directory": "/shared/books"})
    with pytest.raises(ConfigurationError, match="nfs4"):
        RunDirectory(tmp_path / "run").begin(there, resume=False)
    assert not RunDirectory(tmp_path / "run").has_run()


def test_books_lie_in_their_directory_and_are_found_from_the_runs(tmp_path: Path) -> None:
    books = tmp_path / "books"
    experiment = experiment_of(tmp_path / "run", cluster={"accounting_directory": str(books)})
    assert not cluster_findings(experiment).by_level()
    with RunDirectory(tmp_path / "run") as run:
        run.begin(experiment, resume=False)
        assert run.buffer == RunDirectory(tmp_path / "run").buffer == books / "buffer.db"
    run.buffer.touch()
    other = experiment_of(tmp_path / "other", cluster={"accounting_directory": str(books)})
    with pytest.raises(ConfigurationError, match="accounting of another run"):
        RunDirectory(tmp_path / "other").begin(other, resume=False)


def test_check_says_when_another_machine_could_not_resume(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, cluster={"address": "10.0.0.1:7400", "nodes": ["b"]})
    found = {finding.key: finding.level for finding in cluster_findings(experiment).by_level()}
    assert found == {"cluster.replicate_to": "warning"}
