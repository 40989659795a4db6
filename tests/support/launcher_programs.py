"""Real sshd and Slurm for tests: each on ports of its own, with configuration and state in a test's folder."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDERS = f"{Path(__file__).resolve().parents[2]}:{Path(__file__).resolve().parent}"
COMMAND = f"env {shlex.quote(f'PYTHONPATH={FOLDERS}')} {shlex.quote(sys.executable)} -m headway.cli.main"
NO_RAY = "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install 'headway[ray]'"
NO_SSH = "" if shutil.which("sshd", path="/usr/sbin:/usr/bin") else "sshd is not installed: make system-packages"
NO_SLURM = next(
    (
        f"{program} is not installed: make system-packages"
        for program in ("slurmctld", "slurmd", "munged", "srun")
        if shutil.which(program, path="/usr/sbin:/usr/bin") is None
    ),
    "" if os.geteuid() == 0 else "slurmd needs root",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_until(condition: Callable[[], bool], cause: Callable[[], str], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, cause()
        time.sleep(0.05)


@contextmanager
def sshd(folder: Path) -> Iterator[str]:
    """A real sshd on loopback with keys of its own; yields options and destination for ssh."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"PidFile {folder}/sshd.pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "ssh_config").write_text(
        f"Host node-*\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    assert program is not None
    command = [program, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    with subprocess.Popen(command) as server:
        try:
            wait_until(lambda: _answers(port), lambda: (folder / "sshd.log").read_text())
            yield f"-F {folder}/ssh_config node-b"
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A real Slurm of this one machine: munged, slurmctld, slurmd; yields the environment that its commands need."""
    folder.mkdir(parents=True, exist_ok=True)
    host, cores = platform.node().partition(".")[0], os.cpu_count() or 1
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 // 2
    (folder / "slurm.conf").write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={free_port()}\nSlurmdPort={free_port()}\n"
        f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nCredType=cred/munge\nSlurmUser=root\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\nSlurmctldPidFile={folder}/slurmctld.pid\n"
        f"SlurmdPidFile={folder}/slurmd.pid\nSlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd.log\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nReturnToService=2\nMpiDefault=none\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSchedulerType=sched/backfill\nJobRequeue=1\n"
        "SchedulerParameters=sched_interval=2,bf_interval=2\nMinJobAge=300\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory_mib} State=UNKNOWN\n"
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE\n"
    )
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "MUNGE_SOCKET": str(folder / "munge.socket")}
    munge = ["--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munge += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
    commands = [["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]]
    with contextlib.ExitStack() as stack:
        for command in commands:
            program = shutil.which(command[0], path="/usr/sbin:/usr/bin")
            assert program is not None
            output = stack.enter_context(open(folder / f"{command[0]}.output", "wb"))
            process = subprocess.Popen(
                [program, *command[1:]], env=os.environ | environment, stdout=output, stderr=output
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, lambda: (folder / "munged.output").read_text())

        def idle() -> bool:
            told = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=os.environ | environment, capture_output=True, text=True, check=False
            )
            return told.stdout.strip() == "idle"

        def logs() -> str:
            return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.output")))

        wait_until(idle, logs, 60.0)
        yield environment
