"""GRPO by hand: a tiny model learns to ask a calculator for the sum in brackets first."""

import random

import torch

import treadle


def draw(rng: random.Random) -> tuple[str, str]:
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    inner = f"{a}{rng.choice('+-*')}{b}"
    return f"({inner}){rng.choice('+-')}{c}=", f'"expression": "{inner}"'


def main(steps: int = 20, tasks: int = 16, n: int = 8, clip: float = 0.2) -> list[float]:
    rng, curve = random.Random(0), []
    with treadle.Policy("treadle/tiny-calculator", lr=3e-4) as policy:
        for step in range(1, steps + 1):
            prompts, wanted = zip(*(draw(rng) for _ in range(tasks)), strict=True)
            groups = policy.sample(prompts, n=n, max_tokens=32)
            samples = [sample for group in groups for sample in group]
            rewards = torch.tensor([[float(w in s.text) for s in g] for g, w in zip(groups, wanted, strict=True)])
            advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)
            lengths = torch.tensor([len(sample.ids) for sample in samples])
            weights = advantages.flatten().repeat_interleave(lengths)
            old = torch.tensor([value for sample in samples for value in sample.logprobs])

            def loss(logprobs: list[torch.Tensor], weights=weights, old=old) -> torch.Tensor:
                ratio = torch.exp(torch.cat(logprobs) - old)
                return -torch.min(ratio * weights, ratio.clamp(1 - clip, 1 + clip) * weights).mean()

            policy.forward_backward(samples, loss)
            curve.append(rewards.mean().item())
            print(f"step {step}: reward {curve[-1]:.3f}, gradient norm {policy.step():.2f}")
    return curve


if __name__ == "__main__":
    main()
