"""The parts of `bench_scheduler.py`: its work, its lines, and the programs that it runs."""
