"""What of the CUDA kernels can be checked without a card."""

import ctypes
import itertools
import os
import threading
import time

import pytest
import torch

from kernels.arguments import Stored
from kernels.compile_time import LISTENER, Compilation, CudaError
from kernels.cuda import driver, experts, loaders, products
from kernels.cuda.driver import Kernel
from kernels.cuda.restore import restore_kernel
from kernels.ops import codes, linear, quantised
from tests.kernels.quantised_cases import CASES, Case, make
from tests.slow import slow

KIB = 1024
CARDS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (12, 0): 99}
"""Compute capabilities and the shared memory of a block, KiB (CUDA C++ Programming Guide)."""


HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
K_QUANT = frozenset({"low", "subscale", "sublow"})
QUANTISED = (
    loaders.quantised("uint4", HALF, 128, 4096, frozenset({"zero"})),
    loaders.quantised("uint4", HALF, 256, 32, K_QUANT),
    loaders.quantised("uint8", BF16, 4096, 4096, frozenset({"offset"})),
)
OTHERS = (
    loaders.quantised("uint4", BF16, 32, 4096, frozenset({"offset"})),
    loaders.quantised("uint4", FLOAT, 16, 4096, frozenset({"zero", "low"})),
    loaders.quantised("uint5", HALF, 256, 32, K_QUANT),
    loaders.quantised("uint5", HALF, 32, 4096, frozenset({"offset"})),
    loaders.quantised("uint6", HALF, 256, 16, frozenset({"offset", "subscale"})),
    loaders.quantised("uint6", FLOAT, 16, 16, frozenset({"zero"}) | K_QUANT),
    loaders.quantised("uint8", HALF, 32, 4096, frozenset({"offset"})),
    loaders.quantised("uint8", FLOAT, 16, 64, frozenset({"zero"}) | K_QUANT),
    loaders.quantised("float8_e4m3fn", FLOAT, 128, 4096, frozenset()),
    loaders.quantised("float8_e4m3fn", BF16, 4096, 4096, frozenset()),
    loaders.quantised("table4", FLOAT, 64, 4096, frozenset()),
)
LOADERS = (loaders.PLAIN, loaders.CODES, *QUANTISED)


def shapes(capability):
    """Every kernel of a card, with the shared memory of its block."""
    for tokens, rows, is_gated, loader, is_half in itertools.product(
        (1, 9, 17, 33, 40, 41, 64),
        (32, 4096, 6144, 22016, 28672),
        (False, True),
        LOADERS,
        (False, True),
    ):
        card = products.Card(132, CARDS[capability] * KIB, capability[0] == 9)
        tile = products.tile_of(tokens, rows, card, is_gated=is_gated, loader=loader)
        if not (loader == loaders.CODES and is_half):
            kernel = tile.kernel(loader, is_gated=is_gated, is_half=is_half)
            yield tokens, rows, is_gated, loader, tile, kernel


@pytest.mark.parametrize("capability", CARDS, ids=str)
def test_blocks_fit_every_card(capability):
    for tokens, _, is_gated, loader, tile, kernel in shapes(capability):
        assert tile.shared_bytes(loader, tokens) <= CARDS[capability] * KIB
        assert not is_gated or tile.is_wide or tile.rows % 2 == 0
        if loader in QUANTISED and tile.num_tiles <= 2:
            assert tile.num_warps * kernel.least_blocks <= 24
            assert tile.stages % tile.steps(loader) == 0
            assert tile.stages >= 2 * tile.steps(loader) >= 4


@pytest.mark.parametrize("capability", CARDS, ids=str)
def test_weights_of_all_kinds_are_added_in_one_order(capability):
    """Only what decides the order of sums: not how much is copied ahead, nor rows of a warp."""
    order = {}
    for tokens, rows, is_gated, _, tile, _ in shapes(capability):
        key = min(tokens - 1, 33) // 16, rows, is_gated
        assert order.setdefault(key, (tile.is_wide, tile.splits)) == (tile.is_wide, tile.splits)


@pytest.mark.parametrize("is_gated", [False, True])
def test_one_token_has_a_kernel_of_its_own_where_values_are_small(is_gated):
    """A ring of the token for each warp, beside that of its weights."""
    card = products.Card(132, 227 * KIB, is_hopper=True)
    for loader, rows in itertools.product(LOADERS, (4096, 12288, 22016)):
        of = {"is_gated": is_gated, "loader": loader}
        one, two = (products.tile_of(tokens, rows, card, **of) for tokens in (1, 2))
        assert (one.is_alone, two.is_alone) == (loader.steps > 2, False)
        if one.is_alone:
            kernel = one.kernel(loader, is_gated=is_gated, is_half=True)
            assert kernel.expression.startswith("alone<")
            steps, chunks = one.steps(loader), one.stages // one.steps(loader)
            ring = chunks * (loader.chunk_bytes(steps * one.rows) + steps * 128)
            assert one.shared_bytes(loader, 1) == one.num_warps * ring


@pytest.mark.parametrize("capability", CARDS, ids=str)
def test_a_block_of_quantised_weights_has_room_for_what_eight_tokens_copy(capability):
    """One kernel serves 1 to 8 tokens, whose rows are copied as many as there are."""
    card = products.Card(132, CARDS[capability] * KIB, capability[0] == 9)
    for loader in QUANTISED:
        tile = products.tile_of(8, 4096, card, is_gated=False, loader=loader)
        weights = tile.sharing * tile.rows * tile.stages * loader.tile_bytes
        filled = tile.sharing * tile.stages // tile.steps(loader) * 128
        extra = tile.shared_bytes(loader, 8) // tile.splits - weights - tile.stages * 1024
        assert 0 <= extra < filled


@pytest.mark.parametrize("capability", CARDS, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
def test_blocks_of_experts_fit_every_card_and_add_in_one_order(capability, is_gated):
    """Whatever the tokens are: a row of experts has the same bits in every batch."""
    room = CARDS[capability] * KIB
    for tokens, loader in itertools.product((1, 8, 9, 16, 32, 40, 64), LOADERS):
        tile = experts.experts_tile(tokens, loader, room, is_gated=is_gated)
        assert tile.shared_bytes(loader, tokens) <= room - KIB
        assert (tile.splits, tile.is_wide, 8 * tile.num_tiles >= tokens) == (4, False, True)
        assert not is_gated or tile.rows == 2
        if loader.steps > 1 and tile.num_tiles <= 2:
            assert tile.stages % tile.steps(loader) == 0
            assert tile.stages >= 2 * tile.steps(loader) >= 4


def test_the_host_lays_out_as_many_bytes_as_the_source(monkeypatch, tmp_path):
    """A launch has the shared memory that the host works out, and the kernel does not look."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    claims = [
        f"chunk_bytes<{loader.expression}>({tiles}) == {loader.chunk_bytes(tiles)}"
        for loader in (*LOADERS, *OTHERS)
        for tiles in (1, 2, 8)
    ]
    lines = [f'  static_assert({claim}, "");' for claim in claims]
    source = "\n".join([driver._SOURCE.read_text(), "__device__ void sizes() {", *lines, "}\n"])
    monkeypatch.setattr(driver, "_SOURCE", tmp_path / "sizes.cu")
    driver._SOURCE.write_text(source)
    assert driver.compiled(Kernel("rows", 128), (8, 6))
    driver._SOURCE.write_text(source.replace(f"== {loaders.PLAIN.chunk_bytes(1)}", "== 1", 1))
    with pytest.raises(CudaError, match="static assertion failed"):
        driver.compiled(Kernel("rows", 128), (8, 6))


def test_experts_with_exponents_as_scales_run_elsewhere(monkeypatch, rng):
    monkeypatch.setattr(experts, "capability", lambda _: (9, 0))
    x = torch.zeros((1, 64), dtype=torch.bfloat16)
    w13, w2 = (make(CASES[1], rows, 64, torch.bfloat16, rng) for rows in (256, 128))
    assert experts.can_run(x, w13, w2, 64)
    exponents = Case("table4", 32, scale_dtype=torch.uint8)
    w13, w2 = (make(exponents, rows, 64, torch.bfloat16, rng) for rows in (256, 128))
    assert not experts.can_run(x, w13, w2, 64)


@pytest.mark.thorough_but("Loader(expression='Plain', tile_bytes=2048, steps=1)")
@pytest.mark.parametrize(
    ("loader", "tokens", "is_gated", "capability"),
    [
        (loaders.PLAIN, 1, True, (8, 6)),
        slow(loaders.PLAIN, 64, False, (9, 0)),
        slow(loaders.CODES, 1, True, (8, 6)),
        slow(loaders.CODES, 64, False, (9, 0)),
        (QUANTISED[0], 1, True, (8, 6)),
        slow(QUANTISED[0], 64, False, (9, 0)),
    ],
    ids=str,
)
def test_products_with_experts_compile(loader, tokens, is_gated, capability):
    room = CARDS[capability] * KIB
    tile = experts.experts_tile(tokens, loader, room, is_gated=is_gated)
    kernel = tile.kernel(loader, is_gated=is_gated, is_half=False, has_experts=True)
    assert driver.compiled(kernel, capability)[:4] == b"\x7fELF"


def test_wide_products_are_hoppers_alone():
    assert not any(tile.is_wide for *_, tile, _ in shapes((8, 0)))
    assert any(tile.is_wide for *_, tile, _ in shapes((9, 0)))


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "wide rows", "columns"])
def test_tokens_of_any_layout_are_handed_over_as_rows(begin, layout, monkeypatch):
    """The kernel copies 16 bytes of a row at a time, from where they are aligned."""
    shapes = {"rows": (3, 64), "wide rows": (3, 67), "columns": (64, 3)}
    num_rows, num_columns = shapes[layout]
    memory = torch.arange(begin + num_rows * num_columns).to(torch.bfloat16)
    x = memory[begin:].view(num_rows, num_columns)
    x = x.T if layout == "columns" else x[:, :64]
    read = []

    def launch(_kernel, _blocks, _shared_bytes, args, _device):
        assert args.x % 16 == args.x_stride % 8 == 0
        words = (ctypes.c_int16 * (2 * args.x_stride + 64)).from_address(args.x)
        read.extend(list(words[row * args.x_stride :][:64]) for row in range(3))

    monkeypatch.setattr(products, "launch", launch)
    monkeypatch.setattr(products, "launch_shape", lambda *_: (Kernel("narrow", 32), 1, 0))
    products.linear(x, torch.zeros((16, 64), dtype=torch.bfloat16), None)
    assert read == x.contiguous().view(torch.int16).tolist()


def test_a_kernel_is_compiled_once_and_a_damaged_file_anew(tmp_path, monkeypatch):
    calls = []

    def compile_it(kernel, capability):
        calls.append(kernel.expression)
        return f"{kernel.expression} {capability}".encode()

    version = type("Version", (), {"nvrtcVersion": lambda: (0, 13, 0)})
    monkeypatch.setattr(driver, "compiled", compile_it)
    monkeypatch.setattr(driver, "_imported", lambda _: version)
    kernel = Kernel("restore", 64)
    folder, told = tmp_path / "kernels", list[float]()
    token = LISTENER.set(told.append)
    for _ in range(2):
        assert driver.kept(kernel, (8, 6), folder) == b"restore (8, 6)"
    LISTENER.reset(token)
    assert calls == ["restore"]
    assert len(told) == 1
    driver.kept(kernel, (9, 0), folder)
    assert len(list(folder.iterdir())) == len(calls) == 2
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert driver.kept(kernel, (8, 6), folder) == b"restore (8, 6)"
    assert len(calls) == 3


@pytest.mark.parametrize(("capability", "is_half"), [((8, 9), False), ((9, 0), True)])
def test_what_is_compiled_ahead_is_what_products_launch(capability, is_half, monkeypatch):
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(products, "max_shared_bytes", lambda _: CARDS[capability] * KIB)
    monkeypatch.setattr(products, "capability", lambda _: capability)
    shape_of = products.launch_shape.__wrapped__
    monkeypatch.setattr(products, "launch_shape", shape_of)
    device, dtype = torch.device("cuda", 0), torch.float16 if is_half else torch.bfloat16
    for rows, is_gated in itertools.product((32, 4096, 22016), (False, True)):
        for most in (1, 20, 64, 2048):
            found = linear.kernels_of((rows, 64), dtype, device, is_gated=is_gated, max_tokens=most)
            counts = range(1, min(most, 64) + 1)
            launched = {
                shape_of(n, rows, device, is_gated, loaders.PLAIN, is_half)[0] for n in counts
            }
            assert found == launched
    coded = codes.kernels_of((4096, 64), torch.bfloat16, device, is_gated=True, max_tokens=65)
    restore = restore_kernel(loaders.CODES)
    assert restore in coded
    assert len(coded) == len(products.TOKEN_TILES) + 1
    few = codes.kernels_of((4096, 64), torch.bfloat16, device, is_gated=True, max_tokens=64)
    assert few == coded - {restore}
    stored = Stored.of(
        kind="uint4", scale_dtype="float16", group=128, subgroup=0, offset=0, arrays=("zero",)
    )
    of_stored = {"stored": stored, "is_gated": True}
    found = quantised.kernels_of((4096, 256), dtype, device, max_tokens=65, **of_stored)
    counts = range(1, 65)
    launched = {shape_of(n, 4096, device, True, QUANTISED[0], is_half)[0] for n in counts}
    assert found == launched | {restore_kernel(QUANTISED[0], is_half=is_half)}
    odd = quantised.kernels_of((4096, 200), dtype, device, max_tokens=65, **of_stored)
    assert not odd
    assert not quantised.kernels_of((4096, 256), dtype, device, is_gated=True, max_tokens=65)
    for shape in ((24, 64), (32, 60)):
        assert not linear.kernels_of(shape, dtype, device, is_gated=False, max_tokens=64)
    wide = {"is_gated": False, "max_tokens": 64}
    assert not linear.kernels_of((32, 64), torch.float32, device, **wide)
    assert not linear.kernels_of((32, 64), dtype, torch.device("cpu"), **wide)
    monkeypatch.setattr(products, "capability", lambda _: (7, 5))
    assert not linear.kernels_of((32, 64), dtype, device, **wide)


def test_kernels_are_compiled_beside_each_other_and_what_fails_is_told(tmp_path, monkeypatch):
    both = threading.Barrier(2, timeout=30)
    monkeypatch.setenv("TIGHTFIT_HOME", str(tmp_path))
    version = type("Version", (), {"nvrtcVersion": lambda: (0, 13, 0)})
    monkeypatch.setattr(driver, "_imported", lambda _: version)

    def compile_it(kernel, _):
        both.wait()
        if kernel.expression == "rows":
            raise CudaError("rows: it does not compile")
        return kernel.expression.encode()

    monkeypatch.setattr(driver, "compiled", compile_it)
    work = Compilation({Kernel("restore", 64), Kernel("narrow", 64)}, torch.device("cpu"))
    assert work.join() > 0
    assert len(list((tmp_path / "kernels").iterdir())) == 2
    work = Compilation({Kernel("rows", 64), Kernel("wide", 64)}, torch.device("cpu"))
    with pytest.raises(CudaError, match="rows: it does not compile"):
        work.join()
    work.close()
    assert Compilation(set(), torch.device("cpu")).join() == 0


def test_kernels_of_other_sources_go_when_nobody_used_them_for_long(tmp_path, monkeypatch):
    version = type("Version", (), {"nvrtcVersion": lambda: (0, 13, 0)})
    monkeypatch.setattr(driver, "compiled", lambda kernel, _: kernel.expression.encode())
    monkeypatch.setattr(driver, "_imported", lambda _: version)
    source = tmp_path / "products.cu"
    folder, long_ago = tmp_path / "kernels", time.time() - 15 * 86400

    def keep(text, *expressions):
        source.write_text(text)
        before = set(folder.glob("*"))
        for expression in expressions:
            driver.kept(Kernel(expression, 64), (8, 6), folder)
        return set(folder.glob("*")) - before

    monkeypatch.setattr(driver, "_SOURCE", source)
    old, used = keep("a", "restore"), keep("a", "rows")
    for path in old | used:
        os.utime(path, (long_ago, long_ago))
    keep("a", "rows")  # found: it is in use again
    same = keep("b", "rows")
    for path in same:
        os.utime(path, (long_ago, long_ago))
    new = keep("b", "restore")
    assert set(folder.iterdir()) == used | same | new


def test_a_folder_that_cannot_be_written_is_said_once_a_kernel(tmp_path, monkeypatch, logged):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(driver, "compiled", lambda *_: b"code")
    monkeypatch.setattr(
        driver, "_imported", lambda _: type("M", (), {"nvrtcVersion": lambda: (0, 13, 0)})
    )
    assert driver.kept(Kernel("rows", 128), (8, 6), blocked / "kernels") == b"code"
    assert "compiled anew in every process" in logged[-1].getMessage()


def test_a_full_disk_is_left_without_parts_of_files(tmp_path, monkeypatch, logged):
    version = type("M", (), {"nvrtcVersion": lambda: (0, 13, 0)})
    monkeypatch.setattr(driver, "compiled", lambda *_: b"code")
    monkeypatch.setattr(driver, "_imported", lambda _: version)

    def replace(_self, _path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", replace)
    assert driver.kept(Kernel("rows", 128), (8, 6), tmp_path) == b"code"
    assert "No space left" in logged[-1].getMessage()
    assert not list(tmp_path.iterdir())


def test_without_the_bindings_or_nvrtc_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named 'cuda.bindings.{name}'")

    def no_library():
        raise RuntimeError("Failure finding libnvrtc.so")

    without_library = type("M", (), {"nvrtcVersion": no_library})
    for imported, why in ((missing, "No module"), (lambda _: without_library, "libnvrtc")):
        monkeypatch.setattr(driver, "_imported", imported)
        with pytest.raises(CudaError, match=rf"got .*{why}.*pip install cuda-bindings"):
            driver.compiled(Kernel("rows", 128), (8, 6))


def test_kernels_are_kept_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("TIGHTFIT_HOME", "~/mine")
    assert driver.cache_folder() == tmp_path / "mine" / "kernels"
    monkeypatch.setenv("TIGHTFIT_HOME", "")
    assert driver.cache_folder() == tmp_path / ".cache" / "tightfit" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(driver.cache_folder()) == "/cache/tightfit/kernels"
    monkeypatch.setenv("TIGHTFIT_HOME", "~no-such-user/mine")
    with pytest.raises(CudaError, match=r"TIGHTFIT_HOME: expected a folder .*mine"):
        driver.cache_folder()


@pytest.mark.slow
@pytest.mark.parametrize("capability", CARDS, ids=str)
def test_every_kernel_compiles_for_every_card(capability):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    kernels = {kernel for *_, loader, _, kernel in shapes(capability) if loader not in QUANTISED}
    kernels |= {Kernel("rows", 128), restore_kernel(loaders.CODES)}
    card = products.Card(132, CARDS[capability] * KIB, capability[0] == 9)
    for at, loader in enumerate((*QUANTISED, *OTHERS)):
        for tokens, is_half in ((1, at % 2 == 0), (64, at % 2 == 1)):
            tile = products.tile_of(tokens, 22016, card, is_gated=False, loader=loader)
            kernels.add(tile.kernel(loader, is_gated=False, is_half=is_half))
        kernels.add(restore_kernel(loader, is_half=at % 2 == 0))
    gated = products.tile_of(1, 22016, card, is_gated=True, loader=QUANTISED[0])
    kernels.add(gated.kernel(QUANTISED[0], is_gated=True, is_half=True))
    for loader, tokens in itertools.product((QUANTISED[1], OTHERS[2], OTHERS[4]), (1, 16)):
        tile = products.tile_of(tokens, 4096, card, is_gated=False, loader=loader)
        kernels.add(tile.kernel(loader, is_gated=False, is_half=True))
    for kernel in sorted(kernels, key=repr):
        assert driver.compiled(kernel, capability)[:4] == b"\x7fELF"


@pytest.mark.slow
def test_a_source_that_does_not_compile_is_told_with_its_messages():
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    with pytest.raises(CudaError, match=r"kernel no_such_kernel, .*8\.6: NVRTC .*error: .*Install"):
        driver.compiled(Kernel("no_such_kernel", 32), (8, 6))
