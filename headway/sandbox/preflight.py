"""Checks that sandboxes will work, before a token is generated. Every finding has its fix."""

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
from headway.sandbox.machine import machine_findings, read_limits
from headway.sandbox.protocol import Backend, Reaping, Sandbox

ON_THIS_MACHINE = ("local", "bubblewrap", "docker")  # a provider's sandboxes don't use this machine's memory
TTL_S = 120.0
# Limits of a sandbox that takes OVERLOAD_BYTES, to check that its memory limit holds.
OVERLOAD_LIMITS = ResourceLimits(memory_bytes=48 * MIB, disk_bytes=8 * MIB, inodes=1000, processes=16)
OVERLOAD_BYTES = 96 * MIB
PROBE_CONTENT = b"written and told"  # sent to a sandbox, half as a file, half as a command's input
FAILURES = (SandboxError, ConfigurationError, OSError, TimeoutError)


async def findings(
    settings: config.SandboxConfig, backend: Backend, needed: int, *, spec: SandboxSpec | None = None
) -> list[SandboxFinding]:
    """Return findings that would stop or spoil a run with ``needed`` sandboxes at once; []: no problem.

    ``spec``: replaces ``settings.spec`` if that is incomplete; has the image's root. Removes dead owners' resources,
    runs the backend's own checks, makes a sandbox, uses it, tries its memory limit and ends it. Starts the backend and
    doesn't close it. Problems are returned, never raised.
    """
    spec = msgspec.structs.replace(settings.spec if spec is None else spec, ttl_s=TTL_S)
    reported: list[SandboxFinding] = []
    needed = min(needed, settings.live)
    if share := injected_share():
        message = f"{SHARE} = {share:g}: THAT SHARE OF CALLS FAILS ON PURPOSE, for a drill"
        reported.append(SandboxFinding(message=message, fix="unset it for a run that counts", fatal=False))
    try:
        # First, since starting a backend reaps too, without a report.
        reported += [finding async for finding in _reap_dead_owners(backend)]
        problems = await backend.preflight(spec, live=needed)
        reported += [SandboxFinding(message=problem) for problem in problems]
        if any(finding.fatal for finding in reported):
            return reported
        capabilities = await backend.capabilities()
        reported += unbounded(capabilities, allowed=settings.allow_unbounded)
        if settings.backend in ON_THIS_MACHINE:
            reported += machine_findings(read_limits(), spec, needed)
        if not any(finding.fatal for finding in reported):
            reported += [finding async for finding in _try_sandbox(backend, spec)]
            if capabilities.memory_limit and settings.backend in ON_THIS_MACHINE:
                overload_spec = msgspec.structs.replace(spec, limits=OVERLOAD_LIMITS)
                reported += [finding async for finding in _try_overload(backend, overload_spec)]
    except FAILURES as error:
        root_text = f" of {spec.root}" if spec.root else ""
        reported.append(SandboxFinding(message=f"sandboxes{root_text} can't be made: {error}"))
    return reported


def unbounded(capabilities: Capabilities, *, allowed: bool) -> list[SandboxFinding]:
    """Return a finding if one sandbox could exhaust the machine's memory for all others, else []."""
    if capabilities.fit_for_untrusted:
        return []
    reasons: Sequence[str] = capabilities.missing or ("the backend can't limit the memory of a sandbox as a whole",)
    if allowed:
        message = "untrusted code can take all memory of this machine, as sandbox.allow_unbounded = true accepts: "
        return [SandboxFinding(message=message + "; ".join(reasons), fatal=False)]
    fix = "or, where you trust the code: sandbox.allow_unbounded = true"
    return [SandboxFinding(message=f"untrusted code could take all memory: {'; '.join(reasons)}", fix=fix)]


async def _reap_dead_owners(backend: Backend) -> AsyncIterator[SandboxFinding]:
    """Remove dead owners' resources; yield a finding for each owner, also if its resources can't be removed."""
    if not isinstance(backend, Reaping):
        return
    for owner in await backend.reap():
        if owner.stuck:
            fix = "find its processes (they wait for a device or a disk), end them, then `headway sandboxes reap`"
            yield SandboxFinding(message=f"left over from a dead owner, {owner}", fix=fix, fatal=False)
        else:
            yield SandboxFinding(message=f"removed what a dead owner had left, {owner}", fatal=False)


async def _try_sandbox(backend: Backend, spec: SandboxSpec) -> AsyncIterator[SandboxFinding]:
    """Make a sandbox, use it like an environment, end it, and check that it is gone."""
    labels = {"purpose": "preflight", "preflight": secrets.token_hex(8)}
    sandbox = await backend.create(spec, labels=labels)
    try:
        async for finding in _exercise(sandbox):
            yield finding
    finally:
        await sandbox.terminate()
    if await backend.list(labels):
        fix = "don't start a run on it: it would leave every sandbox behind"
        yield SandboxFinding(message=f"sandbox {sandbox.id} is still there though it was ended", fix=fix)


async def _exercise(box: Sandbox) -> AsyncIterator[SandboxFinding]:
    await box.write("/tmp/preflight", PROBE_CONTENT[:8])
    script = "cat /tmp/preflight - > preflight && cat preflight"
    completed = await box.exec(Command(argv=["sh", "-c", script], stdin=PROBE_CONTENT[8:], timeout_s=30.0))
    if completed.exit_code in (126, 127):
        stderr = completed.stderr.decode(errors="replace").strip()[:200]
        fix = "an image with /bin/sh and coreutils"
        yield SandboxFinding(message=f"no shell can be run in a sandbox: {stderr}", fix=fix)
    elif not completed.ok or completed.stdout != PROBE_CONTENT:
        details = f"exit code {completed.exit_code}, {completed.stderr.decode(errors='replace').strip()[:200]}"
        fix = "see whether commands may write in their working directory, in this image and as its user"
        yield SandboxFinding(message=f"a command that writes a file doesn't: {details}", fix=fix)
    elif await box.read("preflight") != PROBE_CONTENT:
        message = "a file that a command wrote has other content when it is read"
        yield SandboxFinding(message=message, fix="report it: nothing can be judged")


async def _try_overload(backend: Backend, spec: SandboxSpec) -> AsyncIterator[SandboxFinding]:
    """Check that a sandbox which takes more memory than its limit is stopped."""
    sandbox = await backend.create(spec, labels={"purpose": "preflight"})
    try:
        script = f"x=$(head -c {OVERLOAD_BYTES} /dev/zero | tr '\\0' x) && echo taken"
        completed = await sandbox.exec(Command(argv=["sh", "-c", script], timeout_s=30.0))
    except SandboxError as error:
        if error.failure.cause == "model_code":
            return  # the whole sandbox was killed, for its memory
        raise
    finally:
        await sandbox.terminate()
    if completed.ok and not completed.oom:
        limit_mib, taken_mib = spec.limits.memory_bytes // MIB, OVERLOAD_BYTES // MIB
        fix = "see that its control group limits memory and swap; `headway sandboxes check` tries again"
        yield SandboxFinding(
            message=f"a sandbox limited to {limit_mib} MiB took {taken_mib} MiB and wasn't stopped", fix=fix
        )
