"""The structs of a kernel's sources, read from the text: what `pagedkv.kernels.params` is compared with."""

import functools
import re

import numpy as np

from host_device.build import read_sources

SCALARS = {"i32": "i4", "u32": "u4", "float": "f4", "i64": "i8", "u64": "u8", "u8": "u1", "u16": "u2"}
COMMENT = re.compile(r"//[^\n]*")
STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (G<[^>]*>|\w+) (\w+(?:, \w+)*);$", re.MULTILINE)


@functools.cache
def struct_of(kernel, name):
    """Return the dtype of a struct that a kernel's file or one of its headers defines."""
    texts = read_sources(kernel)
    bodies = {}
    for text in texts.values():
        bodies |= {
            found[1]: found[2] for found in STRUCT.finditer(re.sub(r" *$", "", COMMENT.sub("", text), flags=re.M))
        }
    return _dtype(name, bodies)


def _dtype(name, bodies):
    fields = []
    for kind, names in FIELD.findall(bodies[name]):
        of_field = "u8" if kind.startswith("G<") else SCALARS.get(kind) or _dtype(kind, bodies)
        fields += [(field, of_field) for field in names.split(", ")]
    return np.dtype(fields, align=True)
