"""StepGraphs: captured steps by their shape, and what replaying them moved."""

from functools import partial
from typing import NamedTuple

from engine.device.base import Device, Graph
from engine.run.batch import Batch
from engine.run.decoder import Decoder


class StepShape(NamedTuple):
    """What a step is padded to, and so which graph runs it."""

    decodes: int
    """Rows that decode."""
    tokens: int = 0
    """Tokens of prompts."""
    reads_host: bool = False
    """Whether a decode reads blocks in the host tier, for which attention has a kernel variant."""


class StepGraphs:
    """Captures steps and runs them again.

    Args:
        decoder: Runs a step.
        device: Captures.
    """

    def __init__(self, decoder: Decoder, device: Device) -> None:
        self._decoder, self._device = decoder, device
        self.captured: dict[StepShape, tuple[Graph, int, int]] = {}
        """Graphs, and the weight bytes that each copies and reads in place."""
        self.steps = 0
        """Steps that ran as graphs."""
        self.copied_bytes = 0
        """Weight bytes that replays copied, less those counted while capturing."""
        self.in_place_bytes = 0
        """Bytes that replays read in place."""

    def capture(self, shape: StepShape, batch: Batch) -> None:
        """Run a batch of padding once, and capture it.

        Stream: waits for the device.
        """
        run, store = partial(self._decoder.forward, batch), self._decoder.weights
        run()
        self._device.synchronize()
        copied, read = store.copied_bytes, store.in_place_bytes
        graph = self._device.new_graph(run)
        counts = store.copied_bytes - copied, store.in_place_bytes - read
        self.captured[shape] = (graph, *counts)
        # Capturing counted the bytes, but moved none.
        self.copied_bytes -= counts[0]
        self.in_place_bytes -= counts[1]

    def replay(self, shape: StepShape, num_tokens: int) -> bool:
        """Run the graph of a shape on what the input buffers hold; return whether there is one.

        Args:
            shape: Of the step.
            num_tokens: Of the step, padding included.

        Stream: enqueued on the current stream.
        """
        found = self.captured.get(shape)
        if found is None:
            return False
        graph, copied, read = found
        # A step that failed amid its layers left other layers in the slots than the graph expects.
        store = self._decoder.weights
        store.begin_step(num_tokens)
        store.end_step()
        graph.replay()
        self.copied_bytes += copied
        self.in_place_bytes += read
        return True

    def clear(self) -> None:
        """Release the graphs."""
        self.captured.clear()
