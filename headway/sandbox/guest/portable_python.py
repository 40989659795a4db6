"""A Python taken along into a sandbox that something else makes: a root needs none of its own, and none is left in it.

Standard library alone. Its modules, and this package's, go as compiled code, which needs no searching; the program, its
libraries and its extensions go as files.
"""

from __future__ import annotations

import io
import marshal
import os
import re
import sys
import tarfile
from importlib.machinery import SourceFileLoader
from typing import Any

PACKAGE = "headway.sandbox.guest"
AT_START = "encodings"  # needed before the loader runs: a package that goes as files
# The first argument is a descriptor or a file with the codes; the rest are told to the function at the end.
LOADER = f"""import marshal, os, sys
given = int(sys.argv[1]) if sys.argv[1].isdigit() else os.open(sys.argv[1], 0)
codes = marshal.loads(os.pread(given, os.fstat(given).st_size, 0))
class Given:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in codes: return type(sys.__spec__)(name, cls, is_package=codes[name][0])
    create_module = staticmethod(lambda spec: None)
    exec_module = staticmethod(lambda module: exec(codes[module.__name__][1], module.__dict__))
sys.meta_path.insert(0, Given)
from {PACKAGE}.entry import """


def codes() -> bytes:
    """The modules that are loaded, compiled: their files may lie where a sandbox can't look."""
    found: dict[str, tuple[bool, Any]] = {}
    for name, module in list(sys.modules.items()):
        loader = getattr(module, "__loader__", None)
        if isinstance(loader, SourceFileLoader) and not name.startswith((AT_START, "__main__")):
            found[name] = (hasattr(module, "__path__"), loader.get_code(name))
    return marshal.dumps(found)


def mapped_files() -> list[str]:
    """Files mapped into this process: the dynamic linker, libraries, extensions."""
    with open("/proc/self/maps") as file:
        return sorted({line.split(None, 5)[5].rstrip("\n") for line in file if "/" in line and ".so" in line})


def linker() -> str:
    for file in mapped_files():
        if re.match(r"ld[-.].*so", os.path.basename(file)):
            return file
    raise OSError(2, "no dynamic linker in this Python's memory")


def packed() -> bytes:
    """This Python as a tar that can be unpacked anywhere: `command` starts it there."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packing = io.BytesIO()
    with tarfile.open(fileobj=packing, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "linker", _content(linker()), 0o755)
        _add(archive, f"bin/{version}", _content(os.path.realpath(sys.executable)), 0o755)
        _add(archive, "codes", codes(), 0o644)
        _add(archive, f"lib/{version}/os.py", b"", 0o644)  # what Python knows its own folder by
        for file in mapped_files():
            extension = os.path.basename(os.path.dirname(file)) == "lib-dynload"
            folder = f"lib/{version}/lib-dynload" if extension else "libraries"
            _add(archive, f"{folder}/{os.path.basename(file)}", _content(file), 0o755)
            for name in _other_names(file):  # which libraries are asked for by
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.type, member.linkname = tarfile.SYMTYPE, os.path.basename(file)
                archive.addfile(member)
        for name, module in sorted(sys.modules.items()):
            if name == AT_START or name.startswith(AT_START + "."):
                inner = "__init__" if name == AT_START else name.partition(".")[2]
                _add(archive, f"lib/{version}/{AT_START}/{inner}.py", _content(str(module.__file__)), 0o644)
    return packing.getvalue()


def command(folder: str) -> list[str]:
    """The command that starts the packed Python from ``folder``; append the code to run and its arguments."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    linked = [f"{folder}/linker", "--library-path", f"{folder}/libraries"]
    return [*linked, f"{folder}/bin/{version}", "-I", "-S", "-c"]


def _other_names(file: str) -> list[str]:
    folder, own = os.path.split(file)
    alike = [name for name in os.listdir(folder) if name.partition(".so")[0] == own.partition(".so")[0] and name != own]
    return [name for name in sorted(alike) if os.path.realpath(os.path.join(folder, name)) == os.path.realpath(file)]


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def _content(file: str) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def main() -> None:
    """A fresh process that has loaded what a sandbox needs and nothing else: its tar goes to the output."""
    from headway.sandbox.guest import entry  # noqa: F401

    sys.stdout.buffer.write(packed())
