"""Block masks: the builders, their errors, and the kernels under them."""

import pytest
import torch

import flash_cuda
import kit
from flash_cuda import BlockMask, masks

SIZES = ((16, 16), (8, 32), (1, 1), (7, 13), (64, 64), (100, 3))


def test_to_dense_repeats_every_block():
    blocks = torch.rand(2, 3, 3, 4) < 0.5
    dense = BlockMask(blocks, (4, 5), 11, 17).to_dense()
    expected = blocks.repeat_interleave(4, dim=2).repeat_interleave(5, dim=3)[:, :, :11, :17]
    assert torch.equal(dense, expected)


@pytest.mark.parametrize("lead", ((), (3,), (1,), (2, 3), (2, 1), (1, 3)), ids=str)
def test_blocks_are_kept_4d(lead):
    mask = BlockMask(torch.ones(*lead, 2, 3, dtype=torch.bool), (8, 8), 16, 20)
    assert mask.blocks.shape == (*(1,) * (2 - len(lead)), *lead, 2, 3)
    assert mask.density == 1.0 and mask.to("cpu").to_dense().shape == (*mask.blocks.shape[:2], 16, 20)


def test_density():
    assert BlockMask(torch.eye(4, dtype=torch.bool), (8, 8), 32, 32).density == 0.25
    assert BlockMask(torch.ones(0, 4, dtype=torch.bool), (8, 8), 0, 32).density == 0.0


@pytest.mark.parametrize("arguments, error, words", (
    ((torch.ones(2, 2), (8, 8), 16, 16), TypeError, "bool tensor, got torch.float32"),
    (([[True]], (8, 8), 8, 8), TypeError, "bool tensor, got list"),
    ((torch.ones(2, 2, dtype=torch.bool), (8, 8), 16, 17), ValueError, r"\(\.\.\., 2, 3\).*got \(2, 2\)"),
    ((torch.ones(2, dtype=torch.bool), (8, 8), 16, 16), ValueError, r"got \(2,\)"),
    ((torch.ones(1, 1, 1, 2, 2, dtype=torch.bool), (8, 8), 16, 16), ValueError, r"2 to 4 dimensions"),
    ((torch.ones(2, 2, dtype=torch.bool), (8, 0), 16, 16), ValueError, r"at least \(1, 1\), got \(8, 0\)"),
    ((torch.ones(2, 2, dtype=torch.bool), 8, 16, 16), ValueError, r"\(block_q, block_k\), got 8"),
    ((torch.ones(2, 2, dtype=torch.bool), (8, 8), -1, 16), ValueError, "not be negative, got -1"),
), ids=str)
def test_errors_of_the_mask(arguments, error, words):
    with pytest.raises(error, match=words) as caught:
        BlockMask(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("lead", ((), (3,), (2, 3)), ids=str)
def test_from_dense_is_the_inverse_of_to_dense(lead, size):
    blocks = torch.rand(*lead, -(-50 // size[0]), -(-70 // size[1])) < 0.5
    mask = BlockMask(blocks, size, 50, 70)
    again = masks.from_dense(mask.to_dense(), size)
    assert torch.equal(again.blocks, mask.blocks) and again.block_size == size
    assert (again.seqlen_q, again.seqlen_k) == (50, 70)


def test_from_dense_names_the_first_mixed_block():
    dense = torch.zeros(2, 3, 30, 40, dtype=torch.bool)
    dense[1, 2, 17, 33] = True
    with pytest.raises(ValueError, match="batch 1, head 2, row 10, column 30 is mixed"):
        masks.from_dense(dense, (10, 10))
    with pytest.raises(TypeError, match="got torch.float32"):
        masks.from_dense(dense.float())
    with pytest.raises(ValueError, match=r"2 to 4 dimensions, got \(30,\)"):
        masks.from_dense(dense[0, 0, :, 0])


@pytest.mark.parametrize("window", (0, 1, (2, 0), (0, 3)), ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("lengths", ((50, 70), (70, 50), (64, 64)), ids=str)
def test_local_is_the_diagonal_and_some_blocks_beside_it(lengths, size, window):
    mask = masks.local(*lengths, window, size)
    left, right = (window, window) if isinstance(window, int) else window
    expected = torch.zeros_like(mask.blocks[0, 0])
    for row in range(lengths[0]):
        own = (row + lengths[1] - lengths[0]) // size[1]
        expected[row // size[0], max(own - left, 0):max(own + right + 1, 0)] = True
    # A query block may lie on several key blocks: what lies between the first and the last is visible as well.
    assert torch.equal(mask.blocks[0, 0], expected)


def test_local_covers_the_window_of_its_blocks():
    tensors = kit.qkv(seqlen_q=64, seqlen_k=64)
    block = flash_cuda.attention(**tensors, block_mask=masks.local(64, 64, (1, 0), (16, 16)), causal=True)
    exact = flash_cuda.attention(**tensors, window_size=(31, 0))
    torch.testing.assert_close(block[:, 31::16], exact[:, 31::16])  # the last row of each block sees 32 keys


def test_bigbird_is_band_and_global_and_random():
    mask = masks.bigbird(640, 640, block_size=(32, 32), window_blocks=1, global_blocks=2, random_blocks=3, seed=1)
    blocks = mask.blocks[0, 0]
    band = masks.local(640, 640, 1, (32, 32)).blocks[0, 0]
    assert blocks[:2].all() and blocks[:, :2].all() and (blocks | ~band).all()
    fixed = band.clone()
    fixed[:2] = fixed[:, :2] = True
    assert (blocks[2:].sum(1) == fixed[2:].sum(1) + 3).all()
    same = masks.bigbird(640, 640, block_size=(32, 32), window_blocks=1, global_blocks=2, random_blocks=3, seed=1)
    other = masks.bigbird(640, 640, block_size=(32, 32), window_blocks=1, global_blocks=2, random_blocks=3, seed=2)
    assert torch.equal(same.blocks, mask.blocks) and not torch.equal(other.blocks, mask.blocks)


def test_bigbird_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    masks.bigbird(256, 256)
    assert torch.equal(torch.get_rng_state(), before)


def test_bigbird_with_more_random_blocks_than_there_are():
    assert masks.bigbird(100, 100, block_size=(16, 16), random_blocks=50).density == 1.0


def test_errors_of_the_builders():
    with pytest.raises(ValueError, match="window_blocks must not be negative, got -1"):
        masks.local(10, 10, -1)
    with pytest.raises(ValueError, match="must not be negative, got 1 and -2"):
        masks.bigbird(10, 10, random_blocks=-2)
    with pytest.raises(ValueError, match="not be negative, got -3 and 10"):
        masks.local(-3, 10, 1)


@kit.each_version
@pytest.mark.parametrize("lead", ((), (1,), (4,), (2, 1), (1, 4), (2, 4)), ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_under_a_mask_of_every_shape(size, lead, version):
    blocks = torch.rand(*lead, -(-45 // size[0]), -(-70 // size[1])) < 0.4
    options = {"block_mask": BlockMask(blocks, size, 45, 70), "causal": len(lead) == 1}
    kit.check(kit.Inputs(kit.qkv(2, 45, 70), options), version)


@kit.each_version
@pytest.mark.parametrize("density", (0.0, 0.02, 1.0))
def test_rows_that_see_no_block_are_empty(density, version):
    mask = BlockMask(torch.rand(1, 4, 12, 18) < density, (4, 4), 45, 70)
    got = kit.check(kit.Inputs(kit.qkv(2, 45, 70) | {"sinks": torch.randn(4)}, {"block_mask": mask}), version)
    empty = ~mask.to_dense().any(-1).expand(2, 4, 45)
    assert torch.equal(got["lse"] == -torch.inf, empty)
    assert (got["out"].transpose(1, 2)[empty] == 0).all() and (got["dq"].transpose(1, 2)[empty] == 0).all()


@kit.each_version
def test_a_mask_of_all_blocks_changes_nothing(version):
    tensors = kit.qkv(2, 45, 70)
    for mask in (BlockMask(torch.ones(3, 5, dtype=torch.bool), (16, 16), 45, 70),
                 masks.bigbird(45, 70, block_size=(16, 16), random_blocks=9)):
        torch.testing.assert_close(flash_cuda.attention(**tensors, block_mask=mask, version=version),
                                   flash_cuda.attention(**tensors, version=version))


@kit.each_version
def test_a_mask_whose_storage_is_not_contiguous(version):
    blocks = (torch.rand(5, 3, 4, 2) < 0.5).permute(3, 2, 1, 0)
    kit.check(kit.Inputs(kit.qkv(2, 45, 70), {"block_mask": BlockMask(blocks, (16, 16), 45, 70)}), version)
    expanded = (torch.rand(1, 1, 3, 5) < 0.5).expand(2, 4, 3, 5)
    kit.check(kit.Inputs(kit.qkv(2, 45, 70), {"block_mask": BlockMask(expanded, (16, 16), 45, 70)}), version)


@pytest.mark.parametrize("version", kit.VERSIONS)
def test_traffic_falls_with_the_density(version):
    """FlashAttention, section 3.3: work and traffic are proportional to the share of blocks."""
    tensors, loaded = kit.qkv(1, 512, 512, 1, 1, 64), []
    for window in (0, 3, 7):
        mask = masks.local(512, 512, window, (64, 64))
        flash_cuda.attention(**tensors, block_mask=mask, version=version)
        loaded.append(flash_cuda.last_call().bytes_loaded)
    assert loaded[0] < loaded[1] < loaded[2]
