"""Run the check: `PYTHONPATH=benchmarks python3 -m gpu_check --out DIR`, or `make gpu-check`.

The exit status is 0 where all is well, 1 where a stage failed, 2 where only a mark was missed, 3 without a GPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_check import pack, plan
from gpu_check.machine import NoGpuError, describe, find_gpu
from gpu_check.record import exit_status, make_record, summary, write_record
from gpu_check.runner import run_stages

NO_GPU = 3
# What Python imports beside the package: this check, and the cases and batches of the tests.
IMPORTED = ("benchmarks", "tests/cuda_host", "tests/kernels")
RECORD, LOG = "gpu_check.json", "gpu_check.log"


class NotPackedError(Exception):
    """What `make gpu-pack` makes is not there."""


def unpack(packed: Path, site: Path) -> dict[str, Any]:
    """Unpack the wheel into a folder; return what was packed."""
    try:
        about: dict[str, Any] = json.loads((packed / "pack.json").read_text())
        with zipfile.ZipFile(packed / "wheel" / about["wheel"]) as wheel:
            wheel.extractall(site)
    except OSError as error:
        raise NotPackedError(f"{packed}: expected what `make gpu-pack` makes there: {error}") from error
    return about


def environment(packed: Path, site: Path, about: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the stages: the wheel's package, and the kernels that came with it."""
    imported = [str(site), *(str(pack.ROOT / part) for part in IMPORTED)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(imported),
        "PYTHONUNBUFFERED": "1",
        "PAGEDKV_CACHE_DIR": str(packed / "cache"),
        "PAGEDKV_NVRTC_VERSION": about["nvrtc"],
        "GPU_CHECK_PACK": str(packed),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; print a summary, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the record, the log and golden vectors")
    parser.add_argument("--pack", type=Path, default=pack.FOLDER, help="what gpu-pack made (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=plan.SECONDS, help="for all of it (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="some stages, and what they need")
    options = parser.parse_args(arguments)
    try:
        gpu = find_gpu()
    except NoGpuError as error:
        print(f"gpu-check needs an NVIDIA GPU: {error}", file=sys.stderr)
        return NO_GPU
    stages = plan.make_plan(options.out.resolve())
    if options.only:
        if unknown := set(options.only) - {stage.name for stage in stages}:
            parser.error(f"--only: expected some of {', '.join(s.name for s in stages)}, found {', '.join(unknown)}")
        stages = [stage for stage in stages if stage.name in (*options.only, plan.KERNELS)]
    return check(stages, gpu, options)


def check(stages: list[Any], gpu: dict[str, str], options: argparse.Namespace) -> int:
    """Run stages on a GPU; write the record after each."""
    out, packed = options.out.resolve(), options.pack.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begun, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    (out / LOG).write_text("")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        work = Path(folder)
        about = unpack(packed, work / "site")
        record: dict[str, Any] = {}

        def keep(done: list[dict[str, Any]]) -> None:
            nonlocal record
            record = make_record(
                done,
                commit=about["commit"],
                started=started,
                seconds=time.monotonic() - begun,
                machine=describe(gpu),
                planned=[stage.name for stage in stages],
            )
            write_record(out / RECORD, record)
            print(f"{done[-1]['stage']}: {done[-1]['status']}, {done[-1]['seconds']:.0f} s", flush=True)

        run_stages(
            stages,
            seconds=options.seconds - (time.monotonic() - begun),
            folder=work,
            log=out / LOG,
            environment=environment(packed, work / "site", about),
            after_each=keep,
        )
    print(summary(record))
    return exit_status(record)


if __name__ == "__main__":
    sys.exit(main())
