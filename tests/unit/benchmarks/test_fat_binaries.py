"""benchmarks/parts/fat_binaries.py: libraries keep the machine code of one architecture, at the same addresses."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from benchmarks.parts.fat_binaries import CONTAINER, ELF, ENTRY, MAGIC, VERSION, containers, cut

PTX = 1
SOURCE = "__global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }"


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = bytearray(64)
    ENTRY.pack_into(header, 0, kind, 0, 64, len(payload))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return CONTAINER.pack(MAGIC, VERSION, CONTAINER.size, len(body)) + body


def test_entries_of_other_architectures_become_zeros_behind_the_kept_ones() -> None:
    kept, other, text = entry(ELF, 90, b"n" * 100), entry(ELF, 80, b"o" * 300), entry(PTX, 90, b"p" * 50)
    foreign = container(entry(ELF, 100, b"f" * 70), entry(ELF, 80, b"s" * 20))
    library = b"head" + container(other, kept, text) + b"between" + foreign + b"tail"
    out, counts = cut(library, 90)
    assert len(out) == len(library)
    assert out.startswith(b"head" + container(kept))
    assert library.index(b"between") == out.index(b"between")
    assert (counts.containers, counts.foreign) == (2, 1)
    assert counts.kept_bytes == len(kept) + 84
    assert bytes(out).count(b"n") >= 100
    assert not {*b"opf"} & {*bytes(out).replace(b"between", b"").replace(b"head", b"")[:600]} - {*b"tail"}
    position, (first,) = next(containers(out))
    assert (position, first.architecture) == (4, 90)


def test_what_only_looks_like_a_container_stays() -> None:
    """The magic number in code, and containers whose sizes don't fit."""
    magic = struct.pack("<I", MAGIC)
    library = magic + b"code" + CONTAINER.pack(MAGIC, VERSION, 16, 1 << 40) + container(b"x" * 80) + magic[:4]
    out, counts = cut(library, 90)
    assert (bytes(out), counts.containers) == (library, 0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_compiled_library_keeps_the_very_code(tmp_path: Path) -> None:
    """By NVIDIA's own reader of such files, which comes with triton."""
    reader = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not reader.is_file():
        pytest.skip("no cuobjdump")
    (tmp_path / "scale.cu").write_text(SOURCE)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", *codes, "-o", "scale.so", "scale.cu"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"nvcc doesn't compile here: {built.stderr[-200:]}")
    out, counts = cut((tmp_path / "scale.so").read_bytes(), 90)
    assert counts.blanked_bytes > 0
    (tmp_path / "cut.so").write_bytes(out)
    codes_of = {name: machine_code(reader, tmp_path / f"{name}.so", tmp_path / name) for name in ("scale", "cut")}
    assert {name.split(".")[-2] for name in codes_of["scale"]} == {"sm_80", "sm_90"}
    assert list(codes_of["cut"].values()) == [code for name, code in codes_of["scale"].items() if ".sm_90." in name]


def machine_code(reader: Path, library: Path, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    subprocess.run([str(reader), "-xelf", "all", str(library)], cwd=folder, capture_output=True, check=True)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
