"""What a GPU gave for the cases of the vocabulary: a file of inputs, outputs, and which GPU it was.

Only `benchmarks/gpu_check` writes the file, from what a GPU computed; the host shim's tests read it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vocabulary_cases import CASES

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vocabulary_vectors.npz"
FIELDS = ("device", "compute_capability", "driver", "arch", "date")


@dataclass(frozen=True)
class Vectors:
    """Inputs and outputs by function, and where they come from."""

    about: Mapping[str, str]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]


def write_vectors(path: Path, outputs: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Write what a GPU gave.

    Parameters
    ----------
    path : Path
        The file, of NumPy's npz format.
    outputs : mapping of str to array, shape (num_launches, 32, 4), uint32
        What it gave for the inputs of each case.
    about : mapping of str to str
        `FIELDS`, none of them empty.
    """
    if unsaid := [name for name in FIELDS if not about.get(name)]:
        raise ValueError(f"about: expected all of {', '.join(FIELDS)}, found nothing of {', '.join(unsaid)}")
    arrays = {"about": np.array(json.dumps({name: about[name] for name in FIELDS}))}
    for function, words in outputs.items():
        arrays |= {f"{function}.in": CASES[function].words, f"{function}.out": words}
    np.savez_compressed(path, **arrays)


def read_vectors(path: Path) -> Vectors:
    """Read what a GPU gave."""
    with np.load(path, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        parts = {end: {} for end in ("in", "out")}
        for name in arrays.files:
            if "." in name:
                function, end = name.split(".")
                parts[end][function] = arrays[name]
    return Vectors(about, parts["in"], parts["out"])
