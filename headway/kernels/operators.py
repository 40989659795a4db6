"""The operators of torch that a candidate may call beside its own kernels: a check of its source, and lists for a check
at run time."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from headway.kernels.operator_lists import PREFIXES, WORDS, packet_name, with_relatives
from headway.kernels.source_check import OperatorFinding, SourceCheck
from headway.kernels.triton_source import kernel_findings
from headway.records.kernels import KernelBackend, KernelTask


def allowed_aten(backend: KernelBackend, task: KernelTask) -> frozenset[str] | None:
    """Operators of torch.ops.aten by packet ("empty", "_to_copy") that a forward pass may call beside its own kernels:
    the back end's list and the task's ``allowed_operators``. None for "torch": all but `forbidden_aten`."""
    if backend == "torch":
        return None
    return WORDS["allowed"].union(map(packet_name, task.allowed_operators or ()))


def forbidden_aten(task: KernelTask) -> frozenset[str]:
    """Operators of torch.ops.aten by packet that a candidate of back end "torch" may not call: the task's
    ``forbidden_operators`` and operators that compute the same, in place or not."""
    names = {name.strip("_") for name in with_relatives(task.forbidden_operators)}
    return frozenset(f"{head}{name}{tail}" for name in names for head in ("", "_", *PREFIXES) for tail in ("", "_"))


def called_operator(task: KernelTask, names: Iterable[str]) -> str:
    """The first of a forward pass's operators ("aten.mm") that the task's back end doesn't allow; "": all are allowed.
    Operators of other torch libraries are allowed to "torch" alone."""
    allowed, forbidden = allowed_aten(task.backend, task), forbidden_aten(task)
    for name in map(packet_name, names):
        if name in forbidden if allowed is None else name not in allowed:
            return name
    return ""


def check_operators(source: str, backend: KernelBackend, task: KernelTask) -> list[OperatorFinding]:
    """Findings in a candidate's source, by line. A source that isn't Python has none, since it doesn't compile."""
    try:
        tree = ast.parse(source)
        allowed, forbidden = allowed_aten(backend, task) or (), with_relatives(task.forbidden_operators)
        findings = SourceCheck(tree, backend, allowed, forbidden).findings()
        return sorted([*findings, *kernel_findings(tree)]) if backend == "triton" else findings
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):
        return [OperatorFinding(1, "expressions nested too deeply to be checked")]
