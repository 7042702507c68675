"""Compile a kernel for the card at hand, keep it on disk, launch it.

NVRTC and the driver are those that PyTorch for CUDA brings (cuda-bindings); no compiler need be
installed. A kernel is compiled when it is first launched, and kept in TIGHTFIT_HOME/kernels, by
default in the user's cache folder.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kernels.compile_time import LISTENER, CudaError

HOPPER: Final = 9
"""Major compute capability of the cards that have products of groups of four warps."""
_SOURCE: Final = Path(__file__).with_name("products.cu")
_ERROR_LINES: Final = 3
_UNUSED_DAYS: Final = 14
"""After which kernels of another source are removed."""
_LOG = logging.getLogger("tightfit")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, as compiled.

    Attributes:
        expression: the function of the source that it calls, with its template arguments.
        num_threads: of a block.
        is_half: whether elements are float16, else bfloat16.
        starts_early: whether it may start while the kernel before it ends; it holds its places on
            the card until that one is done, which that one then lacks if it is large.
        least_blocks: blocks for which a multiprocessor has registers at least.
    """

    expression: str
    num_threads: int
    is_half: bool = False
    starts_early: bool = True
    least_blocks: int = 1

    def options(self, capability: tuple[int, int]) -> list[str]:
        """Return the compiler's options."""
        suffix = "a" if capability[0] == HOPPER else ""
        options = [
            f"--gpu-architecture=sm_{capability[0]}{capability[1]}{suffix}",
            "-std=c++17",
            f"-DKERNEL={self.expression}",
            f"-DTHREADS={self.num_threads}",
            f"-DLEAST_BLOCKS={self.least_blocks}",
        ]
        return options + ["-DHALF"] * self.is_half + ["-DHOPPER"] * bool(suffix)

    def keep(self, device: torch.device) -> None:
        """Compile it for a device, unless it is kept on disk.

        Raises:
            CudaError: as kept.
        """
        kept(self, capability(device), cache_folder())


def compiled(kernel: Kernel, capability: tuple[int, int]) -> bytes:
    """Compile a kernel, which needs no card.

    Args:
        kernel: which.
        capability: of the card that it is for, LEAST_CAPABILITY or more.

    Returns:
        The machine code.

    Raises:
        CudaError: with the compiler's messages.
    """
    nvrtc = _bindings("nvrtc")
    program = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(_SOURCE.read_bytes(), b"products.cu", 0, [], [])
    )
    options = [option.encode() for option in kernel.options(capability)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(
            f"{_named(kernel, capability)}: NVRTC did not compile it: "
            f"{_first_errors(log.decode(errors='replace'))}. Install the cuda-bindings and "
            "nvidia-cuda-nvrtc that your PyTorch was made with."
        )
    code: bytes = b" " * _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc, nvrtc.nvrtcDestroyProgram(program))
    return code


def _named(kernel: Kernel, capability: tuple[int, int]) -> str:
    return f"CUDA kernel {kernel.expression}, compute capability {'.'.join(map(str, capability))}"


def _first_errors(log: str) -> str:
    """Return the first lines of a compiler's log that tell an error, or the last of all."""
    lines = [line.strip(" \0") for line in log.splitlines()]
    told = [line for line in lines if ": error" in line] or lines[-1:]
    return "; ".join(told[:_ERROR_LINES])


def cache_folder() -> Path:
    """Return where compiled kernels are kept.

    Raises:
        CudaError: no folder is named, and the user has no home directory.
    """
    names = "TIGHTFIT_HOME", "XDG_CACHE_HOME"
    home, cache = (os.environ.get(name, "").strip() for name in names)
    folder = Path(home) if home else Path(cache or "~/.cache") / "tightfit"
    try:
        return folder.expanduser() / "kernels"
    except RuntimeError as error:
        raise CudaError(
            f"TIGHTFIT_HOME: expected a folder for compiled kernels, got {home or 'none'!r}, and "
            "that user has no home directory. Set it to a whole path."
        ) from error


def kept(kernel: Kernel, capability: tuple[int, int], folder: Path) -> bytes:
    """Return a kernel's machine code from the folder, compiled now unless it is there whole.

    A folder that cannot be written keeps nothing, and the log says so.

    Args:
        kernel: which.
        capability: of the card.
        folder: of compiled kernels; made if need be.
    """
    nvrtc = _bindings("nvrtc")
    version = nvrtc.nvrtcVersion()
    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    key = [source.encode(), repr(version).encode()]
    key += [option.encode() for option in kernel.options(capability)]
    name = kernel.expression.partition("<")[0]
    digest = hashlib.sha256(b"\n".join(key)).hexdigest()
    path = folder / f"{name}-{source}-{digest[:24]}.cubin"
    if (code := _read(path)) is not None:
        return code
    begin = time.perf_counter()
    code = compiled(kernel, capability)
    seconds = time.perf_counter() - begin
    _LOG.info("Compiled %s in %.1f s: %s", kernel.expression, seconds, path)
    if (listener := LISTENER.get()) is not None:
        listener(seconds)
    try:
        _write(path, code)
        _remove_old(folder, source)
    except OSError as error:
        _LOG.warning("%s: kernels are compiled anew in every process (%s)", folder, error.strerror)
    return code


def _read(path: Path) -> bytes | None:
    """Return the code of a file that is whole, and note that it was used."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    if hashlib.sha256(code).digest() != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return code


def _remove_old(folder: Path, source: str) -> None:
    """Remove kernels of other sources that nobody used for long.

    A process that looks for one meanwhile compiles it anew.
    """
    oldest = time.time() - _UNUSED_DAYS * 86400
    for path in folder.glob("*.cubin"):
        with contextlib.suppress(OSError):
            if f"-{source}-" not in path.name and path.stat().st_mtime < oldest:
                path.unlink()


def _write(path: Path, code: bytes) -> None:
    """Write a file whole or not at all; other processes may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        own.write_bytes(hashlib.sha256(code).digest() + code)
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


class Args(ctypes.Structure):
    """The argument of every kernel; fields as in products.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bytes", "codes", "first")),
        *((name, ctypes.c_void_p) for name in ("offsets", "table", "values", "high", "scale")),
        *((name, ctypes.c_void_p) for name in ("zero", "low", "subscale", "sublow", "numbers")),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "inputs")),
        *((name, ctypes.c_int) for name in ("x_stride", "weight_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("is_gelu", "offset")),
        *((name, ctypes.c_int) for name in ("group_units", "subgroup_units")),
        *((name, ctypes.c_uint) for name in ("group_inverse", "subgroup_inverse")),
        ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("top_k", "is_by_pair", "row_blocks", "copiers")),
        *((name, ctypes.c_void_p) for name in ("missing", "num_missing", "copied", "multiplied")),
    )


_Pointers = ctypes.c_void_p * 1
"""Where the driver reads where the arguments are."""


def launch(
    kernel: Kernel, num_blocks: int, shared_bytes: int, args: Args, device: torch.device
) -> None:
    """Launch a kernel on the current stream of a device.

    One that starts early waits for the kernel before it before it reads what that one wrote
    (compute capability 9.0; elsewhere it starts afterwards).

    Args:
        kernel: which; compiled and loaded if this is its first launch on the device.
        num_blocks: of the grid.
        shared_bytes: of a block.
        args: read before this returns; what its pointers name must stay until the stream is done.
        device: a CUDA device with its index.
    """
    index = device.index
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            launch(kernel, num_blocks, shared_bytes, args, device)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001  an object takes longer
    ready = _ready(kernel, num_blocks, shared_bytes, stream, index)
    pointers = _Pointers(ctypes.addressof(args))
    # Not through cuda.bindings: it copies the configuration anew in every call.
    status = _launcher()(ready.config_address, ready.function_address, pointers, None)
    if status:
        raise CudaError(
            f"{_named(kernel, capability(device))}: cuLaunchKernelEx failed with CUDA error "
            f"{status}."
        )


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device; (0, 0) of a CPU."""
    return _capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def max_shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a block may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A kernel with the shape of its launch, as the driver takes them."""

    config: Any
    """Owns the memory at config_address."""
    config_address: int
    function_address: int


@functools.lru_cache(maxsize=4096)
def _ready(kernel: Kernel, num_blocks: int, shared_bytes: int, stream: int, index: int) -> _Ready:
    """Return what a launch takes beside its arguments."""
    driver = _bindings("driver")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.num_threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    if kernel.starts_early and capability(torch.device("cuda", index))[0] >= HOPPER:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return _Ready(config, config.getPtr(), int(_loaded(kernel, index, shared_bytes)))


@functools.cache
def _loaded(kernel: Kernel, index: int, shared_bytes: int) -> Any:
    """Return the function of a kernel on a device, which may use so much shared memory."""
    driver = _bindings("driver")
    device = torch.device("cuda", index)
    card = capability(device)
    code = kept(kernel, card, cache_folder())
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    try:
        module = _checked(driver, driver.cuModuleLoadData(code))
        function = _checked(driver, driver.cuModuleGetFunction(module, b"kernel"))
        _checked(driver, driver.cuFuncSetAttribute(function, limit, shared_bytes))
    except CudaError as error:
        raise CudaError(
            f"{_named(kernel, card)}: expected the driver to load it with {shared_bytes} bytes of "
            f"shared memory a block, got: {error}. Update NVIDIA's driver to one that runs your "
            "PyTorch's version of CUDA."
        ) from error
    return function


@functools.cache
def _launcher() -> Any:
    """Return the driver's function of launches."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


def _bindings(name: str) -> Any:
    """Return a module of cuda.bindings.

    Raises:
        CudaError: It is not installed, or NVRTC is not.
    """
    try:
        module = _imported(name)
        if name == "nvrtc":
            module.nvrtcVersion()  # loads the library, which is another package
    except (ImportError, RuntimeError) as error:
        raise CudaError(
            f"cuda.bindings.{name}: expected the packages cuda-bindings and nvidia-cuda-nvrtc, "
            f"which PyTorch for CUDA brings, got {error}. `pip install cuda-bindings "
            "nvidia-cuda-nvrtc`."
        ) from error
    return module


@functools.cache
def _imported(name: str) -> Any:
    from importlib import import_module  # noqa: PLC0415

    return import_module(f"cuda.bindings.{name}")


def _checked(module: Any, result: Sequence[Any]) -> Any:
    """Return what a call returned beside its status.

    Raises:
        CudaError: naming the status.
    """
    status, *values = result
    if status.value:
        raise CudaError(f"{module.__name__}: {status.name}")
    return values[0] if values else None
