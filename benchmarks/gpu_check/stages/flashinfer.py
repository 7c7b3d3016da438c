"""FlashInfer on the shapes of `timings`, if it is installed."""

import importlib.util
import sys

import torch

import lines
from gpu_check.runner import NOT_TO_BE_HAD, write_result
from gpu_check.stages import timings
from gpu_check.stages.shapes import BLOCK_SIZE, PagedBatch, Shape

WORKSPACE_BYTES = 128 << 20


def time_flashinfer(shape: Shape) -> list[float]:
    """Time its decode, or its prefill where there are many queries, over our cache as it lies."""
    import flashinfer

    batch = PagedBatch(shape, "cuda")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    width = batch.table.shape[1]
    indptr = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device="cuda") * width
    last = torch.full((shape.num_seqs,), (shape.seq_len - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device="cuda")
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    indices = batch.table.flatten()
    types = {"q_data_type": torch.bfloat16, "kv_data_type": getattr(torch, shape.dtype)}
    if shape.num_queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.starts.cuda(), indptr, indices, last, *heads, causal=True, **types)
    return timings.time_runs(lambda layer: wrapper.run(batch.q, batch.layers[layer], out=batch.out), shape.num_layers)


def main() -> int:
    """Add a line for each shape."""
    if importlib.util.find_spec("flashinfer") is None:
        write_result(outcome="flashinfer is not installed")
        return NOT_TO_BE_HAD
    report = lines.Report("flashinfer")
    try:
        for name, shape in (("decode_bf16_32x4096", timings.DECODE), ("prefill_bf16_4x4096", timings.PREFILL)):
            seconds = timings.measured(time_flashinfer, shape)
            report.add(f"flashinfer_{name}", "us", [each * 1e6 for each in seconds], better="lower")
        seconds = timings.measured(time_flashinfer, timings.LONG)
        report.add("flashinfer_decode_bf16_1x8192", "us", [each * 1e6 for each in seconds], better="lower")
    finally:
        write_result(lines=report.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
