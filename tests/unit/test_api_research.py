"""treadle.Policy: the four verbs agree with each other, add up over any split, and go on from what was saved."""

import asyncio

import pytest
import torch

import treadle
from treadle.errors import ConfigError, MisuseError

MODEL = "treadle/tiny-calculator"
PROMPTS = ["12+34=", "(5*6)-7=", [{"role": "user", "content": "9-4="}]]


def make(**given) -> treadle.Policy:
    return treadle.Policy(MODEL, **{"lr": 1e-3, "max_length": 96, **given})


def flat(groups):
    return [sample for group in groups for sample in group]


def mean_loss(logprobs):
    return -torch.cat(logprobs).mean()


def weights(policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy._network.module.parameters()])


def gradients(policy) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy._network.module.parameters()])


def test_samples_have_the_logprobs_of_the_weights_that_drew_them():
    with make() as policy:
        for _ in range(2):
            samples = flat(policy.sample(PROMPTS, n=2, max_tokens=12))
            for sample, values in zip(samples, policy.logprobs(samples), strict=True):
                assert values.tolist() == pytest.approx(sample.logprobs, abs=1e-4)
            policy.forward_backward(samples, mean_loss)
            assert policy.step() > 0
        assert policy.version == 2


def test_the_temperature_is_that_of_sample_and_logprobs():
    with make(temperature=0.5) as policy:
        samples = flat(policy.sample(PROMPTS[:1], n=3, max_tokens=8))
        values = torch.cat(policy.logprobs(samples)).tolist()
        assert values == pytest.approx([value for sample in samples for value in sample.logprobs], abs=1e-4)
        greedy = flat(policy.sample(PROMPTS[:1], n=3, max_tokens=8, temperature=0))
        assert len({sample.ids for sample in greedy}) == 1


def test_gradients_do_not_depend_on_the_split():
    """One forward, several forwards, and two calls: the same gradients, up to rounding."""

    def trained(calls, **given) -> torch.Tensor:
        with make(**given) as policy:
            samples = flat(policy.sample(PROMPTS, n=4, max_tokens=12))
            assert len(samples) == 12
            total = sum(len(sample.ids) for sample in samples)
            for part in calls(samples):
                policy.forward_backward(part, lambda logprobs: (torch.cat(logprobs) ** 2).sum() / total)
            return gradients(policy)

    whole = trained(lambda samples: [samples])
    assert whole.norm() > 0.1
    small = trained(lambda samples: [samples], max_tokens_per_forward=64)
    twice = trained(lambda samples: [samples[:5], samples[5:]])
    assert torch.allclose(whole, small, atol=1e-5)
    assert torch.allclose(whole, twice, atol=1e-5)


@pytest.mark.parametrize("tokens", [16384, 64])
def test_a_loss_is_given_the_logprobs_of_each_sample_in_their_order(tokens):
    with make(max_tokens_per_forward=tokens) as policy:
        samples = [policy.encode("1+2=", answer) for answer in ("#### 3", "#### 30303", "3", "#### 303", "33")]
        own = policy.logprobs(samples)

        def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
            for given, wanted in zip(logprobs, own, strict=True):
                assert given.shape == wanted.shape
                assert torch.allclose(given, wanted, atol=1e-4)
            return torch.cat(logprobs).sum()

        policy.forward_backward(samples, loss)


def test_a_loss_of_all_samples_together_is_exact_over_several_forwards():
    def trained(**given) -> torch.Tensor:
        with make(**given) as policy:
            samples = flat(policy.sample(PROMPTS, n=4, max_tokens=12))
            policy.forward_backward(samples, lambda logprobs: -torch.stack([v.sum() for v in logprobs]).logsumexp(0))
            return gradients(policy)

    assert torch.allclose(trained(), trained(max_tokens_per_forward=64), atol=1e-5)


def test_the_same_seed_and_calls_give_the_same_samples():
    with make() as one, make() as same, make(seed=1) as other:
        drawn = [policy.sample(PROMPTS, n=2, max_tokens=12) for policy in (one, same, other)]
        assert drawn[0] == drawn[1] != drawn[2]
        second = one.sample(PROMPTS, n=2, max_tokens=12)
        assert second != drawn[0], "another call draws other noise"
        assert asyncio.run(same.sample_async(PROMPTS, n=2, max_tokens=12)) == second


def test_a_saved_policy_goes_on_with_the_same_samples_and_weights(tmp_path):
    def go_on(policy: treadle.Policy) -> tuple[object, torch.Tensor]:
        samples = flat(policy.sample(PROMPTS, n=2, max_tokens=12))
        policy.forward_backward(samples, mean_loss)
        policy.step()
        return samples, weights(policy)

    with make() as policy:
        go_on(policy)
        saved = policy.save(tmp_path / "saved")
        wanted_samples, wanted_weights = go_on(policy)
        with pytest.raises(MisuseError, match="exists: save to a directory of its own"):
            policy.save(saved)
    with make() as again:
        again.load(saved)
        assert again.version == 1
        samples, found = go_on(again)
    assert samples == wanted_samples
    assert torch.equal(found, wanted_weights)
    with treadle.Policy(saved, max_length=96) as fresh:
        assert fresh.version == 0
        with pytest.raises(MisuseError, match="has no training/"):
            fresh.load(tmp_path)


def test_a_demonstration_is_a_sample_too():
    with make() as policy:
        given = policy.encode("1+2=", "#### 3")
        before = policy.logprobs([given])[0].sum()
        policy.forward_backward([given], mean_loss)
        policy.step()
        assert policy.logprobs([given])[0].sum() > before
        assert given.ids[-1] in policy._renderer.stop_token_ids


def test_a_learning_rate_may_be_given_for_a_step():
    with make() as policy:
        before = weights(policy)
        policy.forward_backward(flat(policy.sample(PROMPTS, max_tokens=8)), mean_loss)
        policy.step(lr=0.0)
        assert torch.equal(weights(policy), before)


def test_mistakes_are_named():
    with make() as policy:
        groups = policy.sample(PROMPTS, n=2, max_tokens=8)
        with pytest.raises(MisuseError, match="call forward_backward before it"):
            policy.step()
        with pytest.raises(ConfigError, match="sample returns a list for each prompt"):
            policy.forward_backward(groups, mean_loss)
        with pytest.raises(MisuseError, match=r"must return a scalar tensor .* got float"):
            policy.forward_backward(groups[0], lambda logprobs: 1.0)
        with pytest.raises(MisuseError, match=r"must return a scalar tensor .* got a tensor of 1 values"):
            policy.forward_backward(groups[0], lambda logprobs: torch.tensor(1.0))
        with pytest.raises(ConfigError, match="must be a list of prompts, got a text"):
            policy.sample("1+2=")
        with pytest.raises(ConfigError, match="must be a list of prompts, got one conversation"):
            policy.sample([{"role": "user", "content": "1+2="}])
        with pytest.raises(ConfigError, match="must be a list of prompts, got token ids"):
            policy.sample([5, 6, 7])
        with pytest.raises(ConfigError, match=r"96 tokens hold no prompt of .* and an answer of 96"):
            policy.sample(["1+2="], max_tokens=96)
        with pytest.raises(ConfigError, match="there are none"):
            policy.logprobs([])
        with pytest.raises(
            ConfigError, match=r"n: must be at least 1, got 0\n.*\nmax_tokens: must be at least 1, got 0"
        ):
            policy.sample(["1+2="], n=0, max_tokens=0)
        with pytest.raises(ConfigError, match=r"temperature: must be 0 or more, got -1"):
            policy.sample(["1+2="], temperature=-1)
    with pytest.raises(MisuseError, match="this policy is closed"):
        policy.sample(["1+2="])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="device: torch sees no GPU on this machine"):
        make(device="cuda")
