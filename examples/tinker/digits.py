"""Reinforcement learning with the tinker package against `treadle serve --tinker`: answers learn to be digits.

    treadle serve treadle/tiny-calculator --tinker            # prints TINKER_BASE_URL and TINKER_API_KEY: export them
    python examples/tinker/digits.py

The loop is the one of Tinker's own guides: save weights, sample groups, center rewards, importance-sampling loss, step.
Beside the reward it prints the KL divergence from the base model, estimated on the samples by `compute_logprobs`.
"""

import sys

import tinker
from tinker import types

MODEL = "treadle/tiny-calculator"
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
GROUP = 8


def reward_of(text: str) -> float:
    """The share of digits among the letters of an answer."""
    letters = text.strip()
    return sum(letter.isdigit() for letter in letters) / max(len(letters), 8)


def datum_of(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    before = len(prompt) - 1  # positions that predict the prompt's own tokens: no loss there
    assert sequence.logprobs is not None
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *sequence.tokens],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
base = service.create_sampling_client(base_model=MODEL).result()
tokenizer = client.get_tokenizer()
prompts = [tokenizer.encode(f"<|im_start|>user\n{a}+{a + 1}<|im_end|>\n<|im_start|>assistant\n") for a in range(4)]
params = types.SamplingParams(max_tokens=24)

for step in range(STEPS):
    sampler = client.save_weights_and_get_sampling_client().result()
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
    data, rewards, distances = [], [], []
    for prompt, future in zip(prompts, futures, strict=True):
        sequences = future.result().sequences
        scores = [reward_of(tokenizer.decode(sequence.tokens, skip_special_tokens=True)) for sequence in sequences]
        mean = sum(scores) / GROUP
        rewards += scores
        data += [datum_of(prompt, item, score - mean) for item, score in zip(sequences, scores, strict=True)]
        whole = types.ModelInput.from_ints([*prompt, *sequences[0].tokens])
        reference = base.compute_logprobs(whole).result()[len(prompt) :]
        distances.append(sum(sequences[0].logprobs or ()) - sum(value or 0.0 for value in reference))
    computed = client.forward_backward(data, "importance_sampling")
    stepped = client.optim_step(types.AdamParams(learning_rate=5e-3))
    computed.result()
    norm = (stepped.result().metrics or {})["grad_norm"]
    kl = sum(distances) / len(distances)
    print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}, KL from the base {kl:.2f}, gradient {norm:.1f}")

path = client.save_weights_for_sampler(f"digits-{STEPS}").result().path
print(f"saved {path}")
