# mypy: ignore-errors
"""A program of the published `tinker` client: every verb once, and what came back as JSON in its last line."""

import json
import os
import pickle
import sys
import warnings

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")
MODEL = "treadle/tiny-calculator"


def error_of(call) -> list[str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the report
        return [type(error).__name__, str(error), str(getattr(error, "category", ""))]
    return ["none", "", ""]


def datum_of(ids: list[int]) -> types.Datum:
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def prompt_of(ids: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(ids)


report = {}
service = tinker.ServiceClient(display_name="a test")
rest = tinker.RestClient()
report["models"] = [item.model_name for item in rest.get_server_capabilities().result().supported_models]
client = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
tokenizer = client.get_tokenizer()
ids = tokenizer.encode("12+34=46")
report["ids"] = ids
report["info"] = [client.get_info().model_name, client.get_info().lora_rank]

# forward, gradients, steps
report["forward"] = client.forward([datum_of(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
losses = []
for _ in range(4):
    computed = client.forward_backward([datum_of(ids)] * 3, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=5e-3))
    losses.append(computed.result().metrics["loss:sum"])
    report["step"] = stepped.result().metrics
report["losses"] = losses

# a loss that the client computes
custom = []
for _ in range(3):
    result = client.forward_backward_custom(
        [datum_of(ids)], lambda data, logprobs: (-(torch.cat(logprobs).mean() ** 3), {"mine": 1.0})
    )
    client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    custom.append(result.result().metrics)
report["custom"] = custom

# sampling from what was trained; the same weights score what they sampled
sampler = client.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=12, temperature=1.0)
found = sampler.sample(prompt_of(ids[:3]), 4, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
report["samples"] = [[item.tokens, item.logprobs, item.stop_reason, item.sequence_id] for item in found.sequences]
report["prompt"] = [found.prompt_logprobs, found.topk_prompt_logprobs]
report["scored"] = [sampler.compute_logprobs(prompt_of(ids[:3] + item.tokens)).result() for item in found.sequences]
many = [sampler.sample(prompt_of(ids[:2]), 2, types.SamplingParams(max_tokens=4)) for _ in range(100)]
report["many"] = sum(len(item.result().sequences) for item in many)
copy = pickle.loads(pickle.dumps(sampler))
report["copy"] = copy.compute_logprobs(prompt_of(ids)).result()
report["original"] = sampler.compute_logprobs(prompt_of(ids)).result()

# a policy-gradient step on samples: importance ratios of 1 where nothing changed since
tokens, logprobs = found.sequences[0].tokens, found.sequences[0].logprobs
padding = [0.0] * 2
rl = types.Datum(
    model_input=prompt_of(ids[:3] + tokens[:-1]),
    loss_fn_inputs={
        "target_tokens": [0, 0, *tokens],
        "logprobs": padding + logprobs,
        "advantages": padding + [1.0] * len(tokens),
    },
)
report["rl"] = {
    loss: client.forward([rl], loss).result().metrics["loss:sum"] for loss in ("importance_sampling", "ppo", "cispo")
}

# checkpoints
state = client.save_state("state", user_metadata={"a": "b"}).result().path
weights = client.save_weights_for_sampler("named", ttl_seconds=3600).result().path
report["paths"] = [state, weights]
named = service.create_sampling_client(model_path=weights).result()
report["named"] = named.compute_logprobs(prompt_of(ids)).result()
client.forward_backward([datum_of(ids)], "cross_entropy").result()
client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
report["went_on"] = client.forward([datum_of(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
resumed = service.create_training_client_from_state_with_optimizer(state).result()
resumed.forward_backward([datum_of(ids)], "cross_entropy").result()
resumed.optim_step(types.AdamParams(learning_rate=1e-3)).result()
report["resumed"] = resumed.forward([datum_of(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
listed = rest.list_checkpoints(client.model_id).result().checkpoints
report["listed"] = [[item.checkpoint_id, item.checkpoint_type, item.expires_at is None] for item in listed]
report["weights_info"] = rest.get_weights_info_by_tinker_path(state).result().lora_rank
rest.delete_checkpoint_from_tinker_path(state).result()
report["left"] = len(rest.list_checkpoints(client.model_id).result().checkpoints)

# refusals, as the client raises them
other = service.create_lora_training_client(base_model=MODEL, rank=4).result()
report["errors"] = {
    "loss": error_of(lambda: other.forward_backward([rl], "stable_reinforce").result()),
    "step": error_of(lambda: other.optim_step(types.AdamParams()).result()),
    "model": error_of(lambda: service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()),
    "path": error_of(lambda: service.create_sampling_client(model_path="tinker://x/weights/none").result()),
    "state": error_of(lambda: service.create_training_client_from_state(state).result()),
    "long": error_of(lambda: sampler.sample(prompt_of([5] * 2000), 1, params).result()),
    "external": error_of(lambda: other.save_weights_external("x").result()),
    "key": error_of(lambda: tinker.ServiceClient(api_key="tml-no").create_lora_training_client(MODEL).result()),
}
print(json.dumps(report))
sys.stdout.flush()
os._exit(0)  # the client's threads report to the server for a while after the last line
