"""The dense attentions that others are measured against."""

import pytest
import torch
from dense_attention import causal_block_mask, is_causal_pair


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_the_causal_block_mask_is_the_one_of_every_pair(length):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = causal_block_mask(length, "cpu")
    truth = create_block_mask(is_causal_pair, None, None, length, length, device="cpu")
    assert mask.seq_lengths == truth.seq_lengths == (length, length) and mask.BLOCK_SIZE == truth.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, wanted = (getattr(one, f"{kind}_num_blocks") for one in (mask, truth))
        assert torch.equal(counts, wanted)
        places, all_places = (getattr(one, f"{kind}_indices") for one in (mask, truth))
        for row, count in enumerate(wanted[0, 0].tolist()):
            assert set(places[0, 0, row, :count].tolist()) == set(all_places[0, 0, row, :count].tolist())
