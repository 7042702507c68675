import pytest

from kernels.triton.tiles import PART_INPUTS, linear_tile

# rows of the weight, inputs, whether they are gates and ups
PRODUCTS = [
    (12288, 4096, False),
    (4096, 4096, False),
    (4096, 11008, False),
    (100352, 4096, False),
    (22016, 4096, True),
    (960, 576, False),
    (576, 1536, False),
    (3072, 576, True),
    (64, 48, False),
]
CONSUMER_SHARED_BYTES = 99 * 1024


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pytest.mark.parametrize("tokens", [range(1, 17), range(17, 33), range(33, 65)], ids=str)
def test_one_tile_serves_a_range_of_tokens(tokens, product):
    rows, inputs, is_gated = product
    tiles = {linear_tile(count, rows, inputs, is_gated=is_gated) for count in tokens}
    assert len(tiles) == 1
    assert tiles.pop().block_t >= tokens[-1]


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_order_of_sums_does_not_depend_on_tokens(product):
    rows, inputs, is_gated = product
    tiles = [linear_tile(count, rows, inputs, is_gated=is_gated) for count in (1, 32, 64)]
    assert len({tile.parts for tile in tiles}) == 1
    assert all(PART_INPUTS % tile.block_k == 0 for tile in tiles)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 32, 64])
def test_two_stages_fit_a_consumer_card(tokens, product):
    rows, inputs, is_gated = product
    tile = linear_tile(tokens, rows, inputs, is_gated=is_gated)
    loaded = tile.block_t + tile.block_n * (2 if is_gated else 1)
    assert 2 * loaded * tile.block_k * 2 <= CONSUMER_SHARED_BYTES - 2048


def test_few_rows_are_shared_by_programs_with_enough_inputs_each():
    assert linear_tile(1, 12288, 4096).parts == 1
    assert linear_tile(1, 4096, 4096).parts == 1
    assert linear_tile(1, 4096, 11008).parts == 2
    assert linear_tile(1, 2048, 8192).parts == 4
    assert linear_tile(1, 5120, 13824).parts == 1  # enough rows without
    assert linear_tile(1, 576, 1536).parts == 2
    assert linear_tile(1, 64, 48).parts == 1
    for rows, inputs, _ in PRODUCTS:
        parts = linear_tile(1, rows, inputs).parts
        assert parts == 1 or inputs >= parts * PART_INPUTS
