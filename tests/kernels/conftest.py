"""Where the kernels run in these tests: on the GPU, or in Triton's interpreter on the CPU."""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = pytest.param(torch.float16, marks=pytest.mark.slow)
"""No kernel treats float16 unlike bfloat16; `make test-slow` runs it too."""
DTYPES = (torch.float32, torch.bfloat16, HALF)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one; otherwise the CPU, with kernels that Triton interprets."""
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    if not isinstance(tl.sum, InterpretedFunction):
        pytest.fail("Triton was imported before tests/conftest.py set TRITON_INTERPRET")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield torch.device("cpu")


def _dot(_builder, a, b, accumulator, _input_precision, _max_num_imprecise_acc):
    """Multiply values; the interpreter of Triton 3.9 multiplies the bit patterns of bfloat16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def values(operand):
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32)
        return operand.data

    product = np.matmul(values(a), values(b), dtype=accumulator.data.dtype)
    return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


@pytest.fixture(autouse=True)
def exact_twins():
    """Let the twins multiply float32 as float32 on a GPU too, where faster backends may not."""
    if not torch.cuda.is_available():
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def rng(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(1234)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class _HostArray:
    """A host tensor's memory, described to torch as memory of the GPU."""

    def __init__(self, host: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (host.numel() * host.element_size(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


@pytest.fixture
def host_view():
    """Return a function that gives a CUDA tensor over the pinned copy of a host tensor."""
    kept = []

    def view(tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.contiguous().pin_memory()
        kept.append(pinned)
        raw = torch.as_tensor(_HostArray(pinned), device="cuda")
        assert raw.data_ptr() == pinned.data_ptr()
        return raw.view(tensor.dtype).view(tensor.shape)

    yield view
    torch.cuda.current_stream().synchronize()


@pytest.fixture
def beside(device: torch.device, request: pytest.FixtureRequest):
    """Return a function that copies a tensor to where host blocks lie, as operators see them."""
    if device.type == "cuda":
        view = request.getfixturevalue("host_view")
        return lambda tensor: view(tensor.cpu())
    return lambda tensor: tensor.clone()
