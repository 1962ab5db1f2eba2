"""Rows that are taken several times have the gradient of all their copies, the same one every time."""

import pytest
import torch

from treadle.algorithm.micro_batch import take_rows

COPIES = 8


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def gradient(index: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    values = torch.zeros(len(index) // COPIES, given.shape[1], requires_grad=True)
    (take_rows(values, index) * given).sum().backward()
    assert values.grad is not None
    return values.grad


def test_gradients_of_copies_are_added_up_in_the_same_order_with_any_number_of_threads(threads):
    """Sums of floats depend on their order: in that of the copies there is one result."""
    noise = torch.Generator().manual_seed(3)
    index = torch.arange(256).repeat(COPIES)
    given = torch.randn(len(index), 512, generator=noise) * torch.logspace(-3, 3, len(index))[:, None]
    expected = torch.zeros(256, 512)
    for part in given.split(256):
        expected += part
    for _ in range(20):
        assert torch.equal(gradient(index, given), expected)


def test_what_is_taken_is_what_indexing_takes():
    values, index = torch.arange(12.0).view(4, 3), torch.tensor([3, 0, 3])
    assert torch.equal(take_rows(values, index), values[index])
