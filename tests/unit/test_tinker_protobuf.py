"""The Tinker API's protobuf messages, against Google's own protobuf."""

import pytest
import torch

from tests.tinker_messages import MESSAGES, floats, forward_backward, integers, read_outputs, read_sample
from treadle.tinker.protobuf import (
    SampledSet,
    SampledTokens,
    TopLogprobs,
    read_forward_backward,
    write_forward_backward,
    write_sample,
)
from treadle.tinker.refusals import ApiError


def test_a_request_is_read_as_it_was_written() -> None:
    weights = torch.tensor([0.0, 0.5, -1.0])
    targets = torch.tensor([1, 2, 300])
    body = forward_backward(
        "m:1", 7, [([5, 6, 70_000], {"target_tokens": targets, "weights": weights})], "ppo", beta=0.25
    )
    found = read_forward_backward(body)
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("m:1", 7, "ppo", False)
    assert found.loss_fn_config == {"beta": 0.25}
    (datum,) = found.data
    assert datum.ids.tolist() == [5, 6, 70_000]
    assert torch.equal(datum.inputs["weights"], weights) and torch.equal(datum.inputs["target_tokens"], targets)


def test_a_sparse_tensor_is_spread_out() -> None:
    targets = torch.tensor([[0, 4], [5, 0], [0, 0]])
    body = forward_backward("m", 1, [([1, 2, 3], {"target_tokens": targets})], sparse=("target_tokens",))
    assert torch.equal(read_forward_backward(body).data[0].inputs["target_tokens"], targets)


def test_a_text_of_a_loss_config_stays_a_text() -> None:
    message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="custom")
    message.loss_fn_config_v2.add(key="loss_id").value.text = "x"
    assert read_forward_backward(message.SerializeToString()).loss_fn_config == {"loss_id": "x"}


def test_images_are_refused_by_their_place() -> None:
    message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(ApiError, match=r"data\[0\].model_input has an image") as error:
        read_forward_backward(message.SerializeToString())
    assert error.value.status == 400


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_message_that_is_cut_off_is_refused_or_read_short(cut: int) -> None:
    body = forward_backward("m", 1, [([1, 2, 3], {"weights": torch.ones(3), "target_tokens": torch.ones(3).long()})])
    try:
        read_forward_backward(body[: len(body) - cut])
    except ApiError as error:
        assert error.status == 422


def test_a_sparse_tensor_cannot_claim_more_than_the_limit() -> None:
    message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1)
    datum = message.data.add()
    field = datum.loss_fn_inputs.add(key="weights")
    field.value.dtype = 1
    field.value.shape.extend([10**9, 10**9])
    field.value.sparse_csr.values = b"\x00" * 4
    with pytest.raises(ApiError, match=r"data\[0\].weights: a tensor of shape"):
        read_forward_backward(message.SerializeToString())


def test_outputs_of_other_widths_come_back_in_their_shapes() -> None:
    wide = {"logprobs": torch.arange(6.0).view(3, 2)}
    flat = {"logprobs": torch.tensor([-1.0, -2.0]), "elementwise_loss": torch.tensor([1.0, 2.0])}
    outputs, metrics = read_outputs(write_forward_backward([flat, flat, wide], {"loss:sum": 1.5}))
    assert metrics == {"loss:sum": 1.5}
    assert torch.equal(outputs[1]["elementwise_loss"], torch.tensor([1.0, 2.0]))
    assert torch.equal(outputs[2]["logprobs"], wide["logprobs"])


def test_samples_are_written_as_the_client_reads_them() -> None:
    top = TopLogprobs(torch.tensor([[7, 8]]), torch.tensor([[-0.5, -1.5]]))
    sequences = [SampledTokens([7], [-0.5], True, top), SampledTokens([8, 9], [-1.0, -2.0], False)]
    prompt = torch.tensor([float("nan"), -3.0])
    target = torch.tensor([[-0.25]])
    found = read_sample(write_sample(SampledSet(sequences, prompt, top, target, top)))
    assert [item.stop_reason for item in found.sequences] == [0, 1]
    assert integers(found.sequences[1].tokens) == [8, 9] and floats(found.sequences[1].logprobs) == [-1.0, -2.0]
    assert integers(found.sequences[0].topk_sampled_logprobs.token_ids) == [7, 8]
    assert (found.topk_prompt_logprobs.k, found.topk_prompt_logprobs.length) == (2, 1)
    assert floats(found.prompt_logprobs)[1] == -3.0 and floats(found.target_prompt_logprobs.dense) == [-0.25]
    assert list(found.prompt_alt_tokens.tokens.shape) == [1, 2]
