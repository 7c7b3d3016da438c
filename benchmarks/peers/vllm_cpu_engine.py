"""vLLM's engine for the CPU on the work of `bench_engine.py`.

usage: python vllm_cpu_engine.py MODEL_FOLDER DTYPE
       (in the environment that vllm_env.sh builds)

Reads jobs, one JSON object per line of standard input: the prompts' ids, the samples per prompt and the tokens per
sample. Writes one JSON line when the model is loaded, and one per job.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def take_stdout():
    """Return what answers are written to; all else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def run(llm, params_of, job):
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    samples = job["samples"]
    temperature = 0.0 if samples == 1 else 1.0
    params = params_of(max_tokens=job["tokens"], ignore_eos=True, temperature=temperature, n=samples)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return tokens / seconds


def main():
    answers = take_stdout()
    import vllm

    folder, dtype = sys.argv[1:]
    llm = vllm.LLM(model=folder, dtype=dtype, max_model_len=4096, enforce_eager=True, seed=0)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], vllm.SamplingParams(max_tokens=4), use_tqdm=False)
    print(json.dumps({"peer": f"vLLM {vllm.__version__}"}), file=answers, flush=True)
    for line in sys.stdin:
        found = run(llm, vllm.SamplingParams, json.loads(line))
        print(json.dumps({"tokens_per_second": found}), file=answers, flush=True)


if __name__ == "__main__":
    main()
