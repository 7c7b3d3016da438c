"""Load every compiled kernel that was packed. What this driver refuses is compiled here, by the NVRTC beside torch."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_check.runner import write_result

VERSION = "PAGEDKV_NVRTC_VERSION"


def load_all(folder: Path) -> tuple[int, list[str]]:
    """Return how many cubins the driver loads, and what it said of the others."""
    import cupy

    loaded, refused = 0, []
    for path in sorted(folder.rglob("*.cubin")):
        try:
            cupy.RawModule(path=str(path)).get_function(path.name.split("-")[0])
            loaded += 1
        except cupy.cuda.driver.CUDADriverError as error:
            refused.append(f"{path.name}: {error}")
    return loaded, refused


def missing_variants(arch: str) -> list[str]:
    """Return the variants that the package does not find on disk."""
    from pagedkv.kernels.compile import find_kernel
    from pagedkv.kernels.variants import VARIANTS

    return [variant.name for variant in VARIANTS if find_kernel(variant.kernel, arch, variant.macros) is None]


def compile_here(arch: str, packed: Path) -> dict[str, str]:
    """Compile all kernels and the probe; return what later stages find them by."""
    from vocabulary_cases import KERNEL, compile_probe

    from pagedkv.kernels.nvrtc import load_compiler
    from pagedkv.kernels.variants import VARIANTS
    from pagedkv.kernels.warmup import warm_up

    for _ in warm_up(VARIANTS, arch, num_threads=os.cpu_count() or 1):
        pass
    with tempfile.TemporaryDirectory() as sources:
        shutil.copy(compile_probe(arch, Path(sources) / "cuda").path, packed / f"{KERNEL}-{arch}.cubin")
    return {VERSION: load_compiler().version}


def main() -> int:
    """Load them; compile them again where that is needed."""
    import cupy

    from pagedkv.kernels.warmup import arch_of_capability

    packed = Path(os.environ["GPU_CHECK_PACK"])
    about = json.loads((packed / "pack.json").read_text())
    arch = arch_of_capability(str(cupy.cuda.Device().compute_capability))
    loaded, refused = load_all(packed)
    missing = missing_variants(arch)
    found: dict[str, Any] = {"arch": arch, "packed": about, "loaded": loaded, "refused": refused, "missing": missing}
    if refused or missing:
        print(*refused, *missing, f"compiling for {arch} here", sep="\n")
        found["environment"] = compile_here(arch, packed)
    write_result(**found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
