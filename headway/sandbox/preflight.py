"""Checks that sandboxes will work, before a token is generated: every finding comes with its fix."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence

import msgspec

from headway.config import sandbox as config
from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    MIB,
    Capabilities,
    Command,
    ResourceLimits,
    SandboxError,
    SandboxFinding,
    SandboxSpec,
)
from headway.sandbox.faults import SHARE, injected_share
from headway.sandbox.machine import look, machine_findings
from headway.sandbox.protocol import Backend, Reaping, Sandbox

ON_THIS_MACHINE = ("local", "bubblewrap", "docker")  # at a provider a sandbox of any size is somebody else's memory
TTL_S = 120.0
# Of a sandbox that takes HOG_BYTES, to find whether its limit holds.
HOG = ResourceLimits(memory_bytes=48 * MIB, disk_bytes=8 * MIB, inodes=1000, processes=16)
HOG_BYTES = 96 * MIB
WRITTEN = b"written and told"  # to a sandbox, as a file and as a command's input
FAILURES = (SandboxError, ConfigurationError, OSError, TimeoutError)


async def findings(
    settings: config.SandboxConfig, backend: Backend, needed: int, *, spec: SandboxSpec | None = None
) -> list[SandboxFinding]:
    """Findings that would stop or spoil a run with ``needed`` sandboxes at once; none: all is well.

    ``spec``: the specification where ``settings.spec`` isn't complete, with the image's root. Removes what dead owners
    have left, asks the backend, makes a sandbox, uses it, tries its memory limit and ends it. The backend is started,
    and not closed. Problems are reported, never raised.
    """
    spec = msgspec.structs.replace(settings.spec if spec is None else spec, ttl_s=TTL_S)
    found: list[SandboxFinding] = []
    needed = min(needed, settings.live)
    if share := injected_share():
        what = f"{SHARE} = {share:g}: THAT SHARE OF CALLS FAILS ON PURPOSE, for a drill"
        found.append(SandboxFinding(what=what, fix="unset it for a run that counts", fatal=False))
    try:
        found += [one async for one in _left_over(backend)]  # first: starting a backend reaps too, without reporting
        said = await backend.preflight(spec, live=needed)
        found += [SandboxFinding(what=line) for line in said]
        if any(finding.fatal for finding in found):
            return found
        can = await backend.capabilities()
        found += unbounded(can, allowed=settings.allow_unbounded)
        if settings.backend in ON_THIS_MACHINE:
            found += machine_findings(look(), spec, needed)
        if not any(finding.fatal for finding in found):
            found += [one async for one in _trial(backend, spec)]
            if can.memory_limit and settings.backend in ON_THIS_MACHINE:
                found += [one async for one in _hog(backend, msgspec.structs.replace(spec, limits=HOG))]
    except FAILURES as error:
        of_root = f" of {spec.root}" if spec.root else ""
        found.append(SandboxFinding(what=f"sandboxes{of_root} can't be made: {error}"))
    return found


def unbounded(can: Capabilities, *, allowed: bool) -> list[SandboxFinding]:
    """The finding that one sandbox could exhaust the machine for all others, if so."""
    if can.fit_for_untrusted:
        return []
    reasons: Sequence[str] = can.missing or ("the backend can't limit the memory of a sandbox as a whole",)
    if allowed:
        what = "untrusted code can take all memory of this machine, as sandbox.allow_unbounded = true accepts: "
        return [SandboxFinding(what=what + "; ".join(reasons), fatal=False)]
    fix = "or, where you trust the code: sandbox.allow_unbounded = true"
    return [SandboxFinding(what=f"untrusted code could take all memory: {'; '.join(reasons)}", fix=fix)]


async def _left_over(backend: Backend) -> AsyncIterator[SandboxFinding]:
    """Remove what dead owners have left; a finding for each, also where it can't be removed."""
    if not isinstance(backend, Reaping):
        return
    for owner in await backend.reap():
        if owner.stuck:
            fix = "look for its processes (they wait for a device or a disk), end them, then `headway sandboxes reap`"
            yield SandboxFinding(what=f"left over from a dead owner, {owner}", fix=fix, fatal=False)
        else:
            yield SandboxFinding(what=f"removed what a dead owner had left, {owner}", fatal=False)


async def _trial(backend: Backend, spec: SandboxSpec) -> AsyncIterator[SandboxFinding]:
    """Make a sandbox, use it as an environment does, end it, and check that it is gone."""
    labels = {"purpose": "preflight", "preflight": secrets.token_hex(8)}
    box = await backend.create(spec, labels=labels)
    try:
        async for finding in _use(box):
            yield finding
    finally:
        await box.terminate()
    if await backend.list(labels):
        fix = "don't start a run on it: it would leave every sandbox behind"
        yield SandboxFinding(what=f"sandbox {box.id} is still there though it was ended", fix=fix)


async def _use(box: Sandbox) -> AsyncIterator[SandboxFinding]:
    await box.write("/tmp/preflight", WRITTEN[:8])
    script = "cat /tmp/preflight - > preflight && cat preflight"
    done = await box.exec(Command(argv=["sh", "-c", script], stdin=WRITTEN[8:], timeout_s=30.0))
    if done.exit_code in (126, 127):
        said = done.stderr.decode(errors="replace").strip()[:200]
        fix = "an image with /bin/sh and coreutils"
        yield SandboxFinding(what=f"no shell can be run in a sandbox: {said}", fix=fix)
    elif not done.ok or done.stdout != WRITTEN:
        how = f"exit code {done.exit_code}, {done.stderr.decode(errors='replace').strip()[:200]}"
        fix = "see whether commands may write in their working directory, in this image and as its user"
        yield SandboxFinding(what=f"a command that writes a file doesn't: {how}", fix=fix)
    elif await box.read("preflight") != WRITTEN:
        what = "a file that a command wrote is read otherwise"
        yield SandboxFinding(what=what, fix="report it: nothing can be judged")


async def _hog(backend: Backend, spec: SandboxSpec) -> AsyncIterator[SandboxFinding]:
    """Check that a sandbox which takes more memory than its limit is stopped."""
    box = await backend.create(spec, labels={"purpose": "preflight"})
    try:
        script = f"x=$(head -c {HOG_BYTES} /dev/zero | tr '\\0' x) && echo taken"
        done = await box.exec(Command(argv=["sh", "-c", script], timeout_s=30.0))
    except SandboxError as error:
        if error.failure.cause == "model_code":
            return  # the whole sandbox was killed, for its memory
        raise
    finally:
        await box.terminate()
    if done.ok and not done.oom:
        most, took = spec.limits.memory_bytes // MIB, HOG_BYTES // MIB
        fix = "see that its control group limits memory and swap; `headway sandboxes check` tries again"
        yield SandboxFinding(what=f"a sandbox that may have {most} MiB took {took} MiB and wasn't stopped", fix=fix)
