"""Code that means harm: each kind is contained, told apart, and leaves nothing behind; the machine is looked at after.

Every test first makes sure that its sandbox's limits are in force, and only then lets the code run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sandbox_backends import BACKENDS, HARMED, SMALL, groups_of, nothing_left, run
from tiers import first

from headway.records.sandbox import MIB, Command, ExecResult, ResourceLimits, SandboxError
from headway.sandbox.docker.backend import DockerBackend
from headway.sandbox.linux.cgroups import KEPT_PROCESSES
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.protocol import Sandbox

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
LIMITS = SMALL.limits


@pytest.fixture(params=HARMED)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalBackend]:
    with nothing_left(tmp_path / "state"):
        yield BACKENDS[request.param](tmp_path)


@pytest.fixture(params=[name for name in HARMED if name != "local-without-groups"])
def grouped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalBackend]:
    """Only where memory is limited for a sandbox as a whole."""
    made = BACKENDS[request.param](tmp_path)

    async def able() -> bool:
        async with BACKENDS[request.param](tmp_path) as probe:
            return (await probe.capabilities()).fit_for_untrusted

    if not run(able):
        pytest.skip("no control groups to be made here")
    with nothing_left(tmp_path / "state"):
        yield made


@pytest.fixture(autouse=True)
def machine(tmp_path: Path) -> Iterator[None]:
    """What lies outside is as it was."""
    bystander = subprocess.Popen(["sleep", "300"])
    canary = tmp_path / "canary"
    canary.write_text("singing")
    before = _outside()
    yield
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert canary.read_text() == "singing"
    assert _outside() == before


def _outside() -> list[str]:
    """Mounts and names that no test of this file may change, and nothing else on this machine does."""
    beside = ("/pytest-of-", "docker", "/run/netns")  # of tests that run beside this one
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = [line for line in lines if not any(name in line for name in beside)]
    places = ("/", "/usr", "/usr/bin", "/etc", "/home", "/sys/fs/cgroup")
    return mounts + sorted(f"{place} {name}" for place in places for name in os.listdir(place))


async def limited(box: Sandbox) -> None:
    """The limits are in force: inside, and where there are control groups, in those."""
    look = "ulimit -u; df -k --output=size . | tail -1; df --output=itotal . | tail -1; cat /sys/fs/cgroup/{}"
    files = "{memory/memory.limit_in_bytes,memory.max,pids/pids.max,pids.max}"  # Docker shows a container its own
    told = (await box.exec(Command(argv=["bash", "-c", f"{look.format(files)} 2>/dev/null"]))).stdout
    processes, kilobytes, inodes, *grouped = (int(word) for word in told.split())
    assert processes == LIMITS.processes + 1
    assert kilobytes * 1024 == LIMITS.disk_bytes
    assert inodes == LIMITS.inodes + 8
    assert grouped in ([], [LIMITS.memory_bytes, LIMITS.processes + KEPT_PROCESSES])
    for group in groups_of(f"owner-{os.getpid()}-"):
        if not group.name.startswith("slot-") or not (group / "cgroup.procs").read_text().strip():
            continue
        for file, value in (
            ("memory.limit_in_bytes", LIMITS.memory_bytes),
            ("pids.max", LIMITS.processes + KEPT_PROCESSES),
        ):
            limit = group / file
            if limit.exists() and limit.read_text().strip() not in ("max", "9223372036854771712"):  # a spare's
                assert int(limit.read_text()) == value


async def attempt(
    backend: LocalBackend,
    script: str,
    *,
    timeout_s: float = 20.0,
    program: str = "python3",
    network: tuple[str, ...] = (),
) -> ExecResult:
    """Let hostile code run in one sandbox, beside another; both answer afterwards."""
    async with backend:
        neighbour, box = await asyncio.gather(
            backend.create(SMALL), backend.create(msgspec.structs.replace(SMALL, network=network))
        )
        await neighbour.write("kept", b"mine")
        await limited(box)
        result = await box.exec(Command(argv=[program, "-c", script], timeout_s=timeout_s))
        assert await neighbour.read("kept") == b"mine"
        assert (await neighbour.exec(Command(argv=["echo", "well"]))).stdout == b"well\n"
        after = await box.exec(Command(argv=["echo", "usable"], exclusive=True))
        assert after.stdout == b"usable\n", "a sandbox outlives its code"
        return result


def blames_the_code(result: ExecResult) -> bool:
    return result.failure is not None and result.failure.cause == "model_code" and result.failure.reward_valid


def test_fork_bomb(backend):
    result = run(lambda: attempt(backend, "while True: __import__('os').fork()", timeout_s=3.0))
    assert result.exit_code == 1 or blames_the_code(result)


def test_shell_fork_bomb(backend):
    result = run(lambda: attempt(backend, ":(){ :|:& };:; while :; do :; done", program="bash", timeout_s=3.0))
    assert result.exit_code is not None or blames_the_code(result)


def test_a_fork_bomb_that_outlives_its_command_is_ended_by_a_command_alone(backend):
    bomb = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try: os.fork()
        except OSError: time.sleep(0.01)
time.sleep(1)
"""

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            await limited(box)
            await box.exec(Command(argv=["python3", "-c", bomb], timeout_s=10))
            assert (await box.exec(Command(argv=["true"]))).ok, "a place is kept for the owner's commands"
            full = await box.exec(Command(argv=["sh", "-c", "true & wait"]))
            assert b"fork" in full.stderr
            assert (await box.exec(Command(argv=["sh", "-c", "true & wait"], exclusive=True))).stderr == b""

    run(main)


def test_thread_bomb(backend):
    script = """
import threading, time
for _ in range(500): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
"""
    result = run(lambda: attempt(backend, script))
    assert result.exit_code == 1
    assert b"can't start new thread" in result.stderr


def test_heap_hog(backend):
    result = run(lambda: attempt(backend, "x = []\nwhile True: x.append(bytearray(1 << 20))"))
    assert b"MemoryError" in result.stderr or (result.oom and blames_the_code(result))


def test_hogs_of_memory_that_is_nobodys_heap(grouped):
    memfd = "import os\nfds = [os.memfd_create('x') for _ in range(30)]\nfor fd in fds: os.write(fd, bytes(20 << 20))"
    result = run(lambda: attempt(grouped, memfd))
    assert result.oom
    assert blames_the_code(result)


def test_many_hogs_together(grouped):
    script = """
import os, time
for _ in range(8):
    if os.fork() == 0: x = bytearray(40 << 20); time.sleep(100)
time.sleep(3)
"""
    assert run(lambda: attempt(grouped, script)).oom


@pytest.mark.parametrize("place", first(2, ["/tmp", "/dev/shm", "/work", "/home/user", "/var/tmp"]))
def test_disk_fill(backend, place: str):
    result = run(lambda: attempt(backend, f"f = open('{place}/full', 'wb')\nwhile True: f.write(bytes(1 << 20))"))
    assert b"No space left" in result.stderr or b"File too large" in result.stderr


def test_fill_by_deleted_files(backend):
    script = """
import os
kept = []
while True:
    kept.append(open('x', 'wb')); os.unlink('x'); kept[-1].write(bytes(5 << 20)); kept[-1].flush()
"""
    assert b"No space left" in run(lambda: attempt(backend, script)).stderr


def test_a_million_files(backend):
    result = run(lambda: attempt(backend, "for n in range(1_000_000): open(f'f{n}', 'w')"))
    assert b"No space left" in result.stderr


def test_a_million_nested_directories_can_neither_be_made_nor_hurt(backend):
    script = "import os\nfor n in range(1_000_000): os.mkdir('d'); os.chdir('d')"

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            await limited(box)
            assert b"No space left" in (await box.exec(Command(argv=["python3", "-c", script]))).stderr
            with pytest.raises(SandboxError) as raised:
                await box.snapshot("deep")
            assert raised.value.failure.cause == "model_code"
            assert (await box.exec(Command(argv=["true"]))).ok

    run(main)


def test_sparse_files_of_any_size(backend, tmp_path: Path):
    script = "import os\nfor n in range(500):\n    os.truncate(os.open(f'f{n}', os.O_CREAT | os.O_RDWR), 20 << 20)"

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            await box.exec(Command(argv=["python3", "-c", script]))
            with pytest.raises(SandboxError, match="take more than"):
                await box.snapshot("sparse")
            assert os.listdir(tmp_path / "snapshots") == []

    run(main)


def test_endless_output(backend):
    result = run(lambda: attempt(backend, "yes", program="sh", timeout_s=2.0))
    assert (result.truncated, result.timed_out, len(result.stdout)) == (True, True, 1 << 20)


def test_output_that_is_no_text(backend):
    script = "import os; os.write(1, bytes(range(256)) + b'\\x1b[2J\\x00\\xff\\xfe'); os.write(2, b'\\xc3\\x28')"
    result = run(lambda: attempt(backend, script))
    assert (result.stdout, result.stderr) == (bytes(range(256)) + b"\x1b[2J\x00\xff\xfe", b"\xc3\x28")


def test_a_daemon_that_holds_the_output(backend):
    script = "(setsid sh -c 'trap \"\" HUP TERM; while :; do echo still here; sleep 0.01; done' &) ; echo done"
    result = run(lambda: attempt(backend, script, program="sh"))
    assert result.ok
    assert result.stdout.startswith(b"done\n") or b"done\n" in result.stdout
    assert result.duration_s < 5


def test_a_daemon_that_pours_into_the_output(backend):
    result = run(lambda: attempt(backend, "(setsid yes &) ; echo done", program="sh"))
    assert result.ok


def test_killing_everything(backend):
    script = """
import os, time
for signal in (15, 9, 19, 9):
    for pid in (-1, 1, os.getppid()):
        try: os.kill(pid, signal)
        except OSError: pass
time.sleep(0.2)
print('alive')
"""
    result = run(lambda: attempt(backend, script))
    assert result.stdout == b"alive\n" or blames_the_code(result)


NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x02000000):
    print(libc.unshare(flag), libc.syscall(56, flag | 17, 0, 0, 0, 0), end=' ')
print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/proc', 2), libc.chroot(b'/tmp'), end=' ')
print(libc.syscall(435, ctypes.create_string_buffer(88), 88))
"""


def test_no_namespaces_and_no_mounts_within(backend):
    result = run(lambda: attempt(backend, NAMESPACES))
    assert set(result.stdout.split()) == {b"-1"}


CALLS = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for number in (101, 250, 248, 298, 321, 323, 425, 310, 272, 165, 175, 246, 304, 308, 442, 428, 169, 447):
    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno(), end=' ')
for family in (40, 16, 17, 38, 31, 29, 21):  # vsock, netlink, packet, alg, bluetooth, can, rds
    kind = socket.SOCK_RAW if family in (16, 17, 29) else socket.SOCK_SEQPACKET
    try: socket.socket(family, kind); print('open', family)
    except OSError as error: print(-1, error.errno, end=' ')
"""


def test_no_calls_beyond_the_list(backend):
    words = run(lambda: attempt(backend, CALLS)).stdout.split()
    assert set(words[::2]) == {b"-1"}
    assert set(words[1::2]) <= {b"1", b"97", b"38"}


@pytest.mark.parametrize("network", [(), ("example.com", "8.8.8.8:53")])
def test_no_way_out_by_network(backend, network):
    if network and (isinstance(backend, DockerBackend) or backend._settings.bubblewrap):
        pytest.skip("this backend refuses lists of hosts")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    name = f"\0headway-test-{os.getpid()}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(name)
    abstract.listen()
    reached: list[bool] = []
    threading.Thread(target=lambda: reached.append(bool(listener.accept())), daemon=True).start()
    script = f"""
import socket
def tried(make, address):
    try:
        with make() as s:
            s.settimeout(2); s.connect(address); s.send(b'out'); print('reached', address)
    except OSError as error: print('refused')
for host, port in (('127.0.0.1', {port}), ('169.254.169.254', 80), ('8.8.8.8', 53), ('1.1.1.1', 443)):
    tried(socket.socket, (host, port))
tried(lambda: socket.socket(socket.AF_UNIX), {name!r})
tried(lambda: socket.socket(socket.AF_INET6), ('2606:4700::1111', 443))
for host in ('8.8.8.8', '169.254.169.254'):
    try: socket.socket(type=socket.SOCK_DGRAM).sendto(b'out', (host, 53)); print('sent')
    except OSError: print('refused')
socket.socket(type=socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', {datagrams.getsockname()[1]}))
try: socket.getaddrinfo('example.com', 80); print('resolved')
except OSError: print('refused')
"""
    result = run(lambda: attempt(backend, script, network=network))
    assert set(result.stdout.split()) == {b"refused"}, result.stderr
    datagrams.settimeout(0.2)
    with pytest.raises(TimeoutError):
        datagrams.recv(10)
    assert reached == []


def test_the_host_cant_be_seen_or_changed(backend, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    script = f"""
import os
for path in ('{secret}', '/root/.bashrc', '/etc/shadow', '/etc/ssh', '/var/run/docker.sock', '/sys/kernel/mm',
             '/dev/vda', '/dev/kmsg', '/run/systemd', '/tmp/pytest-of-root'):
    try: os.stat(path); print('seen', path)
    except OSError: pass
for path in ('/usr/planted', '/usr/bin/planted', '/bin/planted', '/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern',
             '/proc/1/oom_score_adj', '/proc/self/oom_score_adj'):
    try:
        with open(path, 'w') as f: f.write('-1')
        print('written', path)
    except OSError: pass
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/1/maps', '/proc/kcore', '/dev/mem'):
    try: open(path, 'rb').read(1) and print('read', path)  # nothing comes of what Docker lays something over
    except OSError: pass
for path in ('/proc/1/root', '/proc/1/cwd', '/proc/1/fd'):
    try: os.listdir(path); print('listed', path)
    except OSError: pass
for mode in (0o60600, 0o20600):
    try: os.mknod('disk', mode, os.makedev(254, 0)); print('made a device')
    except OSError: pass
try: open('/proc/self/oom_score_adj', 'w').write('0'); print('spared')
except OSError: pass
print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 6, os.path.exists('/usr/bin/python3'))
print(open('/proc/1/cmdline').read().count('{tmp_path}') + open('/proc/mounts').read().count('{tmp_path}'))
"""
    result = run(lambda: attempt(backend, script))
    # Docker leaves /proc to be written to: a command may make itself as little a choice for the kernel as init is.
    assert result.stdout.removeprefix(b"spared\n") == b"True True\n0\n", result.stderr
    assert (b"spared" in result.stdout) == isinstance(backend, DockerBackend)
    assert not Path("/usr/planted").exists()


def test_no_rights_come_back(backend):
    script = """
cp /bin/su . ; chmod 4755 su; ./su -c id; /bin/su -c id
grep Cap /proc/self/status | grep -v 0000000000000000
"""
    result = run(lambda: attempt(backend, script, program="sh"))
    assert b"uid=0" not in result.stdout
    assert b"Cap" not in result.stdout


def test_what_the_owner_reads_is_never_what_a_link_or_a_lease_makes_of_it(backend):
    traps = """
import fcntl, os, time
os.symlink('/proc/1/environ', 'reward'); os.mkfifo('pipe'); os.symlink('loop', 'loop')
os.makedirs('real'); open('real/file', 'w').write('x'); os.symlink('/', 'root')
f = open('leased', 'w'); f.write('x'); f.flush()
r = open('leased'); f.close(); fcntl.fcntl(r, fcntl.F_SETLEASE, fcntl.F_WRLCK)
if os.fork() == 0: os.setsid(); time.sleep(100)
"""

    async def main():
        async with backend:
            box = await backend.create(SMALL)
            assert (await box.exec(Command(argv=["python3", "-c", traps]))).ok
            for path in ("reward", "pipe", "loop", "root", "/proc/self/environ", "/proc/kmsg", "real", "/dev/null"):
                with pytest.raises(SandboxError):
                    await asyncio.wait_for(box.read(path), 5)
            with pytest.raises(SandboxError):
                await asyncio.wait_for(box.read("leased"), 5)
            for path in ("pipe", "reward", "loop"):
                await asyncio.wait_for(box.write(path, b"the owner's"), 5)
                assert await box.read(path) == b"the owner's"
            with pytest.raises(SandboxError):
                await box.write("real", b"over a folder")

    run(main)


def test_a_snapshot_with_ways_out_makes_files_in_its_own_sandbox_alone(backend, tmp_path: Path):
    import io
    import tarfile

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in (f"../../../..{tmp_path}/planted", f"{tmp_path}/planted", "../planted", "usr/bin/planted"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"out"))
        for name, kind, target in (
            ("hard", tarfile.LNKTYPE, "../../etc/shadow"),
            ("soft", tarfile.SYMTYPE, "/etc/shadow"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    (tmp_path / "evil.tar").write_bytes(packed.getvalue())

    async def main():
        async with backend:
            taken = await (await backend.create(SMALL)).snapshot("good")
            evil = msgspec.structs.replace(taken, path=str(tmp_path / "evil.tar"))
            with pytest.raises(SandboxError):
                await backend.create(SMALL, snapshot=evil)

    run(main)
    assert not (tmp_path / "planted").exists()
    assert not Path("/planted").exists()
    assert not (tmp_path.parent / "planted").exists()


def test_disk_below_memory_is_demanded_so_that_a_full_disk_is_no_lack_of_memory(backend):
    limits = ResourceLimits(memory_bytes=64 * MIB, disk_bytes=60 * MIB)

    async def main():
        with pytest.raises(Exception, match="three quarters"):
            await backend.create(msgspec.structs.replace(SMALL, limits=limits))

    run(main)


def test_burning_all_cores_leaves_the_first_process_answering(backend):
    async def main():
        async with backend:
            box = await backend.create(SMALL)
            burning = asyncio.create_task(
                box.exec(
                    Command(argv=["sh", "-c", "for i in $(seq 30); do (while :; do :; done) & done; wait"], timeout_s=4)
                )
            )
            await asyncio.sleep(1)
            await asyncio.wait_for(box.list("/"), 5)
            assert (await burning).timed_out

    run(main)


def test_pipes_sockets_and_files_by_the_thousand(backend):
    script = "import os, socket\nkept = []\nwhile True: kept += [os.pipe(), socket.socketpair()]"
    assert b"Too many open files" in run(lambda: attempt(backend, script)).stderr
