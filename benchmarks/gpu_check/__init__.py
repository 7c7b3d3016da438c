"""The check on a GPU: correctness of all CUDA kernels, then their speed, in one run and one record.

`make gpu-pack`, on a machine that builds, puts a wheel and compiled kernels into `.gpu/`; `make gpu-check`, on a
machine with a GPU and nothing of ours but the checkout and that folder, runs the stages of `plan.py`. docs/kernels.md
says more.
"""
