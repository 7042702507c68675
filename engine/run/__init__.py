"""One step on the device: inputs, decoder, graphs, sampling."""
