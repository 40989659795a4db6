"""Packs this Python for a sandbox of bubblewrap or Docker, whose root then needs no Python and keeps none.

Standard library alone. Python's modules and this package's are packed as compiled code, which needs no import path; the
program, its libraries and its extensions are packed as files.
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
STARTUP_PACKAGE = "encodings"  # needed before the loader runs, and therefore packed as files
# The first argument is a descriptor or a file with the codes; the others are the imported function's.
LOADER = f"""import marshal, os, sys
file = int(sys.argv[1]) if sys.argv[1].isdigit() else os.open(sys.argv[1], 0)
codes = marshal.loads(os.pread(file, os.fstat(file).st_size, 0))
class CodeFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in codes: return type(sys.__spec__)(name, cls, is_package=codes[name][0])
    create_module = staticmethod(lambda spec: None)
    exec_module = staticmethod(lambda module: exec(codes[module.__name__][1], module.__dict__))
sys.meta_path.insert(0, CodeFinder)
from {PACKAGE}.entry import """


def codes() -> bytes:
    """Return the compiled code of all loaded modules, since a sandbox may not be able to reach their files."""
    code_by_module: dict[str, tuple[bool, Any]] = {}
    for name, module in list(sys.modules.items()):
        loader = getattr(module, "__loader__", None)
        if isinstance(loader, SourceFileLoader) and not name.startswith((STARTUP_PACKAGE, "__main__")):
            code_by_module[name] = (hasattr(module, "__path__"), loader.get_code(name))
    return marshal.dumps(code_by_module)


def mapped_files() -> list[str]:
    """Return the files mapped into this process: the dynamic linker, libraries and extensions."""
    with open("/proc/self/maps") as file:
        return sorted({line.split(None, 5)[5].rstrip("\n") for line in file if "/" in line and ".so" in line})


def linker() -> str:
    for file in mapped_files():
        if re.match(r"ld[-.].*so", os.path.basename(file)):
            return file
    raise OSError(2, "no dynamic linker in this Python's memory")


def pack() -> bytes:
    """Return this Python as a tar that can be unpacked in any folder; `command` starts it there."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    tar_buffer = io.BytesIO()
    with tarfile.open(fileobj=tar_buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "linker", _content(linker()), 0o755)
        _add(archive, f"bin/{version}", _content(os.path.realpath(sys.executable)), 0o755)
        _add(archive, "codes", codes(), 0o644)
        _add(archive, f"lib/{version}/os.py", b"", 0o644)  # Python recognises its own folder by this file
        for file in mapped_files():
            is_extension = os.path.basename(os.path.dirname(file)) == "lib-dynload"
            folder = f"lib/{version}/lib-dynload" if is_extension else "libraries"
            _add(archive, f"{folder}/{os.path.basename(file)}", _content(file), 0o755)
            for name in _aliases(file):  # the names by which libraries are loaded
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.type, member.linkname = tarfile.SYMTYPE, os.path.basename(file)
                archive.addfile(member)
        for name, module in sorted(sys.modules.items()):
            if name == STARTUP_PACKAGE or name.startswith(STARTUP_PACKAGE + "."):
                stem = "__init__" if name == STARTUP_PACKAGE else name.partition(".")[2]
                _add(archive, f"lib/{version}/{STARTUP_PACKAGE}/{stem}.py", _content(str(module.__file__)), 0o644)
    return tar_buffer.getvalue()


def command(folder: str) -> list[str]:
    """Return the command that starts the packed Python from ``folder``; append the code to run and its arguments."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    linker_command = [f"{folder}/linker", "--library-path", f"{folder}/libraries"]
    return [*linker_command, f"{folder}/bin/{version}", "-I", "-S", "-c"]


def _aliases(file: str) -> list[str]:
    folder, file_name = os.path.split(file)
    stem = file_name.partition(".so")[0]
    siblings = [name for name in os.listdir(folder) if name.partition(".so")[0] == stem and name != file_name]
    return [name for name in sorted(siblings) if os.path.realpath(os.path.join(folder, name)) == os.path.realpath(file)]


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def _content(file: str) -> bytes:
    with open(file, "rb") as stream:
        return stream.read()


def main() -> None:
    """Write the tar to standard output, in a fresh process that has loaded only the modules that a sandbox needs."""
    from headway.sandbox.guest import entry  # noqa: F401

    sys.stdout.buffer.write(pack())
