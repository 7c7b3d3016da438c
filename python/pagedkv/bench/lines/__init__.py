"""The work of `make bench-scheduler`: what `benchmarks/bench_scheduler.py` measures beside a peer."""
