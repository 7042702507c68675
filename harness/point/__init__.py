"""One point: files, device, worker processes, status."""
