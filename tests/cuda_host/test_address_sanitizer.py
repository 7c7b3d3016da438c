"""Kernels under AddressSanitizer. It ends the process that it finds something in, so each case has one of its own."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("asan_cases.py")


@functools.cache
def libraries():
    """Return the libraries that such a process must be started with."""
    names = ("libasan.so", "libubsan.so")
    return [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]


def run(case):
    if not all(Path(library).is_file() for library in libraries()):
        pytest.skip("needs g++'s libasan and libubsan")
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries()), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([sys.executable, CASES, case], env=environment, capture_output=True, text=True, check=False)


def test_kernels_are_clean():
    done = run("clean")
    assert done.returncode == 0, done.stderr


def test_an_access_beyond_a_threads_own_array_is_found():
    done = run("beyond_array")
    assert done.returncode != 0
    assert "AddressSanitizer: stack-buffer-overflow" in done.stderr
    assert "probe.cu" in done.stderr
