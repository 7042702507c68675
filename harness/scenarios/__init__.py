"""What is measured: load, throughput, latency, serving."""
