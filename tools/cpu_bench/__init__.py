"""Parts of tools/bench_cpu.py: our server and its peers over HTTP, on the same CPU and the same weights."""
