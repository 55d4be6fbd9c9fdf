"""Device code in compiled modules, for GPUs that a machine does not have.

nvcc puts it into an ELF file's section ``.nv_fatbin``, one container for each translation unit, in
it an entry for each GPU: machine code, or PTX that the driver compiles. A driver takes the entry
for its GPU by the headers, so the others' contents may be anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

SECTION = b".nv_fatbin"

_ELF64 = b"\x7fELF\x02\x01"  # 64 bits, the low byte first
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of the header, of the content; GPU
_PTX = 1


Place = tuple[int, int]
"""Where bytes of a file begin and end."""


def device_code(module: bytearray) -> Iterator[tuple[int, bool, Place]]:
    """All entries of an ELF file: capability (90 is a GPU of 9.0), whether it is PTX, its content's
    place. Raises ValueError if it is no ELF file, or a list does not end where it says."""
    for begin, end in _sections(module):
        at = begin
        while at + _CONTAINER.size <= end:
            magic, _, head, body = _CONTAINER.unpack_from(module, at)
            if magic != _MAGIC:  # padding
                at += 8
                continue
            entry, stop = at + head, at + head + body
            if not head or stop > end:
                raise ValueError(f"device code at byte {at} ends at {stop}, its section at {end}")
            while entry < stop:
                kind, _, head, content, capability = _ENTRY.unpack_from(module, entry)
                inside, entry = entry + head, entry + head + content
                if head < _ENTRY.size or entry > stop:
                    raise ValueError(f"an entry of device code ends at {entry}, its list at {stop}")
                yield capability, kind == _PTX, (inside, entry)
            at = stop + -stop % 8


def blank_others(module: bytearray, capability: int) -> tuple[int, int]:
    """Zeroes, in place, all device code but machine code for this capability. Kernels of which
    there is only PTX are lost. Returns the bytes kept and the bytes zeroed. Raises ValueError."""
    kept = zeroed = 0
    for of, is_ptx, (begin, end) in device_code(module):
        if of == capability and not is_ptx:
            kept += end - begin
        else:
            module[begin:end] = bytes(end - begin)
            zeroed += end - begin
    return kept, zeroed


def _sections(module: bytearray) -> Iterator[Place]:
    """The begin and end of each section of this name in the file."""
    if module[: len(_ELF64)] != _ELF64:
        raise ValueError("not an ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", module, 0x28)
    size, count, names = struct.unpack_from("<HHH", module, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", module, table + size * n) for n in range(count)]
    for name, begin, nbytes in sections:
        label = sections[names][1] + name
        if module[label : label + len(SECTION) + 1] == SECTION + b"\0":
            yield begin, begin + nbytes
