"""What `bench_attention.py` is made of."""
