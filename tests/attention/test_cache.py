"""What a layer's cache holds, in the form of heads and of latents."""

import pytest
import torch

from kvfold.attention.cache import LayerCache
from kvfold.common.errors import UserError


@pytest.mark.parametrize("shapes", [((2, 3, 5, 4), (2, 3, 5, 6)), ((2, 5, 16), (2, 5, 4))], ids=["heads", "latent"])
def test_appended_tokens_come_back_in_order_and_are_counted(shapes):
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    cache = LayerCache()
    assert (cache.length, cache.elements, cache.bytes) == (0, 0, 0)
    for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
        held = cache.append(*(tensor[..., part, :] for tensor in whole))
        assert cache.length == part.stop
    torch.testing.assert_close(list(held), whole, rtol=0, atol=0)
    assert cache.elements == sum(tensor.numel() for tensor in whole)
    assert cache.bytes == 2 * cache.elements


def test_another_batch_or_size_is_refused():
    cache = LayerCache()
    cache.append(torch.zeros(2, 1, 8), torch.zeros(2, 1, 4))
    for first, second in (((1, 1, 8), (1, 1, 4)), ((2, 1, 8), (2, 1, 6))):
        with pytest.raises(UserError, match="one cache for each layer and batch"):
            cache.append(torch.zeros(first), torch.zeros(second))
    assert cache.length == 1
