"""Where waiting for the device is an error."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_fail() -> Iterator[None]:
    """Let torch raise where it waits for the device; waiting for an event is not counted."""
    with warnings.catch_warnings():  # torch warns once that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
