"""Choose the device that a configuration names."""

import torch

from engine.device.base import Device
from engine.device.cpu import CPUDevice
from engine.device.cuda import CUDADevice


def open_device(device: str) -> Device:
    """Open cuda, cpu, or whichever is here (auto).

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return CUDADevice()
    return CPUDevice()
