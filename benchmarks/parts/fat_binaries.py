"""Cut a CUDA library to the machine code of one architecture: ``python fat_binaries.py SOURCE TARGET [ARCHITECTURE]``.

A library has *fat binaries*, each a container with an entry per architecture: machine code (ELF) or PTX. Of each
container, entries of the architecture move to the front, its header gets their size, and the rest becomes zeros, which
compress to nothing: all addresses in the library stay as they are. A container without such an entry keeps its
smallest, since none of it can run on that architecture.

A container is u32 magic, u16 version (1), u16 header size (16), u64 size of the entries. An entry is u16 kind (1 PTX, 2
ELF), u16 attributes, u32 header size, u64 payload size, and at byte 28 u32 architecture (90 for sm_90).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
MAGIC, VERSION, ELF = 0xBA55ED50, 1, 2
ARCHITECTURE_OFFSET = 28
LEAST_HEADER_BYTES, MOST_HEADER_BYTES = 32, 4096


class Entry(NamedTuple):
    """An entry of a container."""

    kind: int
    architecture: int
    start: int  # in the library
    size: int  # header and payload


class Cut(NamedTuple):
    """Counts of a cut."""

    containers: int
    foreign: int  # containers without the architecture
    kept_bytes: int
    blanked_bytes: int


def containers(library: bytes | bytearray) -> Iterator[tuple[int, list[Entry]]]:
    """The position of each container and its entries. What only looks like a container is none: its sizes don't fit."""
    magic, position = struct.pack("<I", MAGIC), -1
    while (position := library.find(magic, position + 1)) >= 0:
        if position + CONTAINER.size > len(library):
            return
        _, version, header_size, size = CONTAINER.unpack_from(library, position)
        end = position + header_size + size
        if version != VERSION or header_size != CONTAINER.size or end > len(library):
            continue
        entries = list(_entries(library, position + header_size, end))
        if entries and entries[-1].start + entries[-1].size == end:
            yield position, entries
            position = end - 1


def _entries(library: bytes | bytearray, start: int, end: int) -> Iterator[Entry]:
    """The entries up to the first whose sizes don't fit."""
    while start + LEAST_HEADER_BYTES <= end:
        kind, _, header_size, payload = ENTRY.unpack_from(library, start)
        size = header_size + payload
        if not LEAST_HEADER_BYTES <= header_size <= MOST_HEADER_BYTES or start + size > end:
            return
        (architecture,) = struct.unpack_from("<I", library, start + ARCHITECTURE_OFFSET)
        yield Entry(kind, architecture, start, size)
        start += size


def cut(library: bytes, architecture: int) -> tuple[bytearray, Cut]:
    """The library with machine code of ``architecture`` alone, of the same length, and what was cut."""
    out = bytearray(library)
    total = foreign = kept = blanked = 0
    for position, entries in containers(library):
        chosen = [entry for entry in entries if (entry.kind, entry.architecture) == (ELF, architecture)]
        foreign += not chosen
        chosen = chosen or [min(entries, key=lambda entry: entry.size)]
        body = b"".join(library[entry.start : entry.start + entry.size] for entry in chosen)
        first, size = position + CONTAINER.size, sum(entry.size for entry in entries)
        out[first : first + size] = body + bytes(size - len(body))
        CONTAINER.pack_into(out, position, MAGIC, VERSION, CONTAINER.size, len(body))
        total, kept, blanked = total + 1, kept + len(body), blanked + size - len(body)
    return out, Cut(total, foreign, kept, blanked)


def main() -> None:
    source, target = sys.argv[1:3]
    architecture = int(sys.argv[3]) if len(sys.argv) > 3 else 90
    library, counts = cut(Path(source).read_bytes(), architecture)
    if counts.containers == counts.foreign:
        raise SystemExit(f"error: {source} has no code of sm_{architecture} in its {counts.containers} containers")
    Path(target).write_bytes(library)
    kept_mb, blanked_mb = counts.kept_bytes / 1e6, counts.blanked_bytes / 1e6
    print(f"{source}: sm_{architecture} {kept_mb:.1f} MB kept, {blanked_mb:.1f} MB blanked")


if __name__ == "__main__":
    main()
