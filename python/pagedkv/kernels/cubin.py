"""Read what a cubin says of its kernel: registers, memory, parameters, and how often it has which instruction.

A cubin is an ELF file. Its sections `.nv.info` hold attributes, each a format, a number, and a value or a payload of so
many bytes; what the numbers mean was found by comparing with ptxas's log, which a test repeats. Code is in
`.text.NAME`, 16 bytes an instruction since sm_70, whose lowest 12 bits say which one it is.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_REGISTERS, _FRAME_BYTES, _MAX_STACK_BYTES = 0x2F, 0x11, 0x23  # in .nv.info: symbol, value
_PARAMETER_BYTES = 0x19  # in .nv.info.NAME, in the place of a payload's size
_WITH_PAYLOAD = 4

OPCODES = {0x23C: "HMMA", 0x83B: "LDSM", 0xFAE: "LDGSTS", 0xB1D: "BAR", 0x387: "STL", 0x983: "LDL"}


@dataclass(frozen=True)
class Resources:
    """What a kernel uses.

    Attributes
    ----------
    registers : int
        Per thread.
    frame_bytes, max_stack_bytes : int
        Local memory per thread: of the kernel's own frame, and with what it calls.
    parameter_bytes : int
        The parameter struct.
    static_shared_bytes : int
        Shared memory of a block beside the dynamic one, with the 1,024 bytes that sm_90 and later reserve.
    """

    registers: int
    frame_bytes: int
    max_stack_bytes: int
    parameter_bytes: int
    static_shared_bytes: int


def read_resources(cubin: bytes, kernel: str) -> Resources:
    """Return what a kernel of a cubin uses."""
    elf = _Elf(cubin)
    symbol = elf.symbols.index(kernel)
    of_symbol: dict[int, int] = {}
    for number, payload in _attributes(elf.sections[".nv.info"]):
        if len(payload) == 8 and struct.unpack_from("<I", payload)[0] == symbol:
            of_symbol[number] = struct.unpack_from("<I", payload, 4)[0]
    of_kernel = dict(_attributes(elf.sections[f".nv.info.{kernel}"]))
    return Resources(
        registers=of_symbol[_REGISTERS],
        frame_bytes=of_symbol[_FRAME_BYTES],
        max_stack_bytes=of_symbol.get(_MAX_STACK_BYTES, 0),
        parameter_bytes=struct.unpack("<H", of_kernel[_PARAMETER_BYTES])[0],
        static_shared_bytes=elf.sizes.get(f".nv.shared.{kernel}", 0),
    )


def count_instructions(cubin: bytes, kernel: str) -> Counter[str]:
    """Return how often the code has each instruction of `OPCODES`."""
    code = _Elf(cubin).sections[f".text.{kernel}"]
    counts: Counter[str] = Counter()
    for (low,) in struct.iter_unpack("<Q8x", code):
        if name := OPCODES.get(low & 0xFFF):
            counts[name] += 1
    return counts


class _Elf:
    """The sections of a 64-bit ELF file by name, and the names of its symbols in order."""

    def __init__(self, file: bytes) -> None:
        if file[:5] != b"\x7fELF\x02":
            raise ValueError("expected a 64-bit ELF file")
        (start,) = struct.unpack_from("<Q", file, 0x28)
        count, names = struct.unpack_from("<HH", file, 0x3C)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        headers = [struct.unpack_from("<IIQQQQIIQQ", file, start + 64 * i) for i in range(count)]
        self._file = file
        self.sections: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        for header in headers:
            name, offset, size = self._text(headers[names][4] + header[0]), header[4], header[5]
            self.sections[name] = file[offset : offset + size]
            self.sizes[name] = size
            if name == ".symtab":
                texts = headers[header[6]][4]
                entries = struct.iter_unpack("<I20x", self.sections[name])
                self.symbols = [self._text(texts + at) for (at,) in entries]

    def _text(self, offset: int) -> str:
        return self._file[offset : self._file.index(b"\0", offset)].decode()


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(section):
        form, number, value = struct.unpack_from("<BBH", section, at)
        size = value if form == _WITH_PAYLOAD else 0
        yield number, section[at + 4 : at + 4 + size] if form == _WITH_PAYLOAD else section[at + 2 : at + 4]
        at += 4 + size
