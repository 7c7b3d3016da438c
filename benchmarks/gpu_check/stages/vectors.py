"""Ask the GPU what each function of the vocabulary gives; hold it to the definitions, and keep its answers."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vocabulary_cases import CASES, KERNEL, OUT_WORDS, SHARED_BYTES, run_case
from vocabulary_vectors import VECTORS, write_vectors

from gpu_check.machine import find_gpu
from gpu_check.runner import write_result

UNWRITTEN = 0x5DEADBEE
PARAMS = np.dtype([("out", "u8"), ("in", "u8"), ("function", "i4")], align=True)


class Probe:
    """The probe on the GPU."""

    def __init__(self, cubin: Path) -> None:
        import cupy

        self._kernel = cupy.RawModule(path=str(cubin)).get_function(KERNEL)

    def __call__(self, function: int, words: Any) -> Any:
        """Apply a function to 32 x 16 words."""
        given = torch.from_numpy(words.view(np.int32)).cuda()
        out = torch.full((32, OUT_WORDS), UNWRITTEN, dtype=torch.int32, device="cuda")
        params = np.array([(out.data_ptr(), given.data_ptr(), function)], PARAMS)
        # CuPy's stream and torch's are the device's default one.
        self._kernel((1,), (32,), (params,), shared_mem=SHARED_BYTES)
        return out.cpu().numpy().view(np.uint32)


def main(out: Path) -> int:
    """Ask for every case; write the answers beside the record."""
    from pagedkv.kernels.warmup import arch_of_capability

    gpu = find_gpu()
    arch = arch_of_capability(gpu["compute_capability"].replace(".", ""))
    probe = Probe(Path(os.environ["GPU_CHECK_PACK"]) / f"{KERNEL}-{arch}.cubin")
    outputs = {name: run_case(case, probe) for name, case in CASES.items()}
    wrong = {name: lanes for name, case in CASES.items() if (lanes := case.wrong_lanes(outputs[name]))}
    date = datetime.now(UTC).date().isoformat()
    write_vectors(out / VECTORS.name, outputs, gpu | {"arch": arch, "date": date})
    write_result(cases=len(CASES), file=VECTORS.name, wrong={name: lanes[:4] for name, lanes in wrong.items()})
    for lanes in wrong.values():
        print(*lanes[:8], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
