"""Policy by hand: `treadle.Policy`, a model with four verbs for training loops that a config does not describe.

    sample             answers to prompts, with the logprob of every token
    logprobs           of the tokens of given samples, with the current weights
    forward_backward   gradients of a loss that you write, added up
    step               the optimizer moves the weights, and the next `sample` uses them

Owns one model on one device, its optimizer, and an engine that samples from the very same weights. What `treadle.train`
is made of, without its rollout, rewards and journal: nothing is kept but what `save` writes.
Invariant: logprobs of `sample`, `logprobs` and `forward_backward` are of the same distribution, the model's at
`temperature`. The same seed and the same calls give the same tokens and weights, on a CPU bit for bit.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from treadle.checkpoint.atomic_directory import atomic_directory
from treadle.checkpoint.store import copy_tokenizer
from treadle.config import ModelConfig, OptimConfig, RolloutConfig
from treadle.data.renderer import Renderer
from treadle.engine.native.engine import NativeEngine
from treadle.engine.protocol import WeightUpdate
from treadle.errors import ConfigError, Mistake, MisuseError
from treadle.loop_thread import LoopThread
from treadle.model.load import load_causal_model
from treadle.policy.checkpoint_files import TRAINING, load_model, restore_training, save_model, save_training
from treadle.policy.network import DecoderNetwork
from treadle.policy.optimizer import MasterWeights, Optimizer
from treadle.policy.packed_inputs import PackedRows, Sequences
from treadle.policy.update import SINGLE_RANK, MicroBatcher, TokenBudget, compute_per_token
from treadle.types import Completion, Message, Request, Row, SamplingParams, StopReason

Prompt = str | Sequence[Message] | Sequence[int]
"""A text for the user's turn, chat messages, or token ids."""

Loss = Callable[[list[Tensor]], Tensor]
"""A scalar from the logprobs of each sample's tokens, one tensor for each sample, on the CPU."""

_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class PolicySample:
    """An answer of a policy."""

    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The tokens of the answer, the one that ended it included."""
    logprobs: tuple[float, ...]
    """Of each of them, as it was sampled; empty for an answer that was given."""
    stop: StopReason

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it."""
        return self.stop is not StopReason.STOP


class ResearchPolicy:
    """A model to sample from and to train by hand; `treadle.Policy`.

    >>> import treadle
    >>> with treadle.Policy("treadle/tiny-calculator", lr=1e-3) as policy:
    ...     (samples,) = policy.sample(["1+2="], n=4, max_tokens=16)
    ...     before = sum(values.sum() for values in policy.logprobs(samples))
    ...     loss = policy.forward_backward(samples, lambda logprobs: -torch.cat(logprobs).mean())
    ...     norm = policy.step()
    ...     bool(sum(values.sum() for values in policy.logprobs(samples)) > before)
    True
    """

    def __init__(
        self,
        model: "str | os.PathLike[str] | Mapping[str, Any]",
        *,
        lr: float = 1e-6,
        weight_decay: float = 0.01,
        grad_clip: float = 1.0,
        temperature: float = 1.0,
        max_length: int = 1024,
        seed: int = 42,
        device: str | None = None,
        max_tokens_per_forward: int = 16384,
    ) -> None:
        """Load a Hugging Face directory or name, or a dict of keys of the `model` section.

        `max_length`: tokens of a prompt and its answer. `device`: cpu or cuda; a GPU where there is one. On a GPU it
        computes in bf16, with weights in fp32. `max_tokens_per_forward` bounds the memory of `forward_backward`.
        """
        self._model = ModelConfig(**model) if isinstance(model, Mapping) else ModelConfig(path=os.fspath(model))
        self._rollout = RolloutConfig(temperature=temperature, max_model_len=max_length, seed=seed)
        place = _choose_device(device)
        self._renderer = Renderer.create(self._model)
        module = load_causal_model(self._model, dtype=torch.float32, device=place, longest=max_length)
        compute = torch.bfloat16 if place.type == "cuda" else torch.float32
        weights = MasterWeights(dict(module.named_parameters()), compute)
        optim = OptimConfig(lr=lr, weight_decay=weight_decay)
        self._optimizer = Optimizer("policy", weights, optim, grad_clip, total_steps=1)
        self._network = DecoderNetwork(module)
        budget = TokenBudget(max_tokens_per_forward, "max_tokens_per_forward")
        self._batcher = MicroBatcher(self._network, SINGLE_RANK, budget)
        self._has_gradients = False
        self._calls = 0
        self.version = 0
        """Steps taken."""
        self._thread = LoopThread("treadle-policy")
        start = NativeEngine.create(self._rollout, module, device=place, decode=self._renderer.decode)
        try:
            self._engine: NativeEngine | None = self._thread.run_blocking(start, "create")
        except BaseException:
            self._thread.stop(_CLOSE_S)
            raise

    def sample(
        self, prompts: Sequence[Prompt], n: int = 1, *, max_tokens: int = 256, temperature: float | None = None
    ) -> list[list[PolicySample]]:
        """Sample `n` answers to each prompt. Another `temperature` than the policy's, such as 0, is for evaluation."""
        self._require_open()
        return self._thread.run_blocking(self._sample(prompts, n, max_tokens, temperature), "sample")

    async def sample_async(
        self, prompts: Sequence[Prompt], n: int = 1, *, max_tokens: int = 256, temperature: float | None = None
    ) -> list[list[PolicySample]]:
        """`sample` as a coroutine."""
        self._require_open()
        return await self._thread.run(self._sample(prompts, n, max_tokens, temperature))

    def encode(self, prompt: Prompt, answer: str) -> PolicySample:
        """An answer that is given, as a sample: for losses on demonstrations."""
        ids = (*self._renderer.encode(answer), *self._renderer.stop_token_ids[:1])
        return PolicySample(answer, self._prompt_ids(prompt), ids, (), StopReason.STOP)

    def logprobs(self, samples: Sequence[PolicySample]) -> list[Tensor]:
        """The current weights' logprob of each token of each answer, without gradients."""
        sequences = Sequences(_rows(samples))
        return _split(compute_per_token(sequences, self._predict, self._batcher), sequences)

    def forward_backward(self, samples: Sequence[PolicySample], loss: Loss) -> float:
        """Add the gradients of a loss to those since the last `step`; its value.

        `loss` is given the logprobs of each sample's tokens, with gradients, and returns a scalar. It may be any
        function of all of them: where they do not fit into one forward, its derivatives by the logprobs are taken
        first, and the gradients of the weights forward by forward.
        """
        sequences = Sequences(_rows(samples))
        members = tuple(range(len(samples)))
        bins = self._batcher.plan(sequences, members).ranks[0]
        with self._network.recomputing(self._model.enable_gradient_checkpointing):
            if len(bins) == 1:
                (packed,) = self._batcher.micro_batches(sequences, members)
                values_M = self._predict(packed).float().cpu()  # in the order of the samples
                value = _call_loss(loss, _split(values_M, sequences))
                value.backward()  # type: ignore[no-untyped-call]
            else:
                values_M = compute_per_token(sequences, self._predict, self._batcher).requires_grad_()
                value = _call_loss(loss, _split(values_M, sequences))
                (slopes_M,) = torch.autograd.grad(value, values_M)
                for packed in self._batcher.micro_batches(sequences, members):
                    share = (self._predict(packed).float() * slopes_M[packed.places_M].to(self._network.device)).sum()
                    share.backward()  # type: ignore[no-untyped-call]
        self._has_gradients = True
        return float(value.detach())

    def step(self, lr: float | None = None) -> float:
        """Move the weights by the gradients, with another learning rate than the policy's where one is given.

        Returns the norm of the gradients before they were clipped. Where it is not finite, nothing was moved.
        """
        if not self._has_gradients:
            raise MisuseError("step has no gradients to follow: call forward_backward before it")
        norm = self._optimizer.step(self.version + 1, lr)
        self._has_gradients = False
        self._set_version(self.version + 1)
        return norm

    def save(self, directory: "str | os.PathLike[str]") -> Path:
        """Write a Hugging Face model with its tokenizer, and what `load` needs to go on, into a new directory."""
        path = Path(directory)
        if path.exists():
            raise MisuseError(f"{path} exists: save to a directory of its own")
        with atomic_directory(path) as draft:
            save_model(draft, self._network.module, self._optimizer.weights)
            save_training(draft, self._optimizer, self.version, self._network.device)
            copy_tokenizer(self._model, draft)
        return path

    def load(self, directory: "str | os.PathLike[str]") -> None:
        """Go on from what `save`, or a run of `treadle.train`, wrote: weights, moments and version."""
        path = Path(directory)
        if not (path / TRAINING).is_dir():
            raise MisuseError(
                f"{path} has no {TRAINING}/: to begin with its weights, use treadle.Policy({str(path)!r})"
            )
        load_model(path, self._model, self._optimizer.weights)
        self._optimizer.clear_gradients()
        self._has_gradients = False
        self._set_version(restore_training(path, self._optimizer, self._network.device))

    def close(self) -> None:
        """Free the engine. Closing twice is harmless."""
        if self._engine is not None:
            self._thread.run_blocking(self._engine.close(), "close")
            self._thread.stop(_CLOSE_S)
            self._engine = None

    def _require_open(self) -> None:
        if self._engine is None:
            raise MisuseError("this policy is closed and samples no more: make another with treadle.Policy(…)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"treadle.Policy({self._model.path!r}, version {self.version}, {self._network.device})"

    async def _sample(
        self, prompts: Sequence[Prompt], n: int, max_tokens: int, temperature: float | None
    ) -> list[list[PolicySample]]:
        one = _describe_one_prompt(prompts)
        if one is not None:
            raise ConfigError([Mistake("prompts", f"must be a list of prompts, got {one}", fix="write [prompt]")])
        _check_sampling(n, max_tokens, temperature)
        own = self._rollout.temperature
        sampling = SamplingParams(
            max_tokens,
            temperature=own if temperature is None else temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=self._rollout.seed,
            model_temperature=own,
        )
        number, self._calls = self._calls, self._calls + 1
        requests = [
            Request(f"{self.version}/{number}/{at}", sample, self._checked(prompt, max_tokens), sampling)
            for at, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._generate(request)) for request in requests]
        found = [task.result() for task in running]
        return [found[at : at + n] for at in range(0, len(found), n)]

    async def _generate(self, request: Request) -> PolicySample:
        assert self._engine is not None, "a closed policy has no loop to be here"
        done: Completion = await self._engine.generate(request)
        self._engine.forget(request.session)
        return PolicySample(done.text, request.ids, done.ids, done.logprobs, done.stop)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._renderer.prompt([{"role": "user", "content": prompt}])
        if prompt and all(isinstance(item, int) for item in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        return self._renderer.prompt(prompt)  # type: ignore[arg-type]

    def _checked(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        ids = self._prompt_ids(prompt)
        room = self._rollout.sequence_length()
        if len(ids) + max_tokens > room:
            problem = f"{room} tokens hold no prompt of {len(ids)} and an answer of {max_tokens}"
            fix = "raise it in treadle.Policy(max_length=…), or lower max_tokens"
            raise ConfigError([Mistake("max_length", problem, room, fix=fix)])
        return ids

    def _predict(self, packed: PackedRows) -> Tensor:
        return self._network.logprobs(packed, self._rollout.temperature).logprobs_T

    def _set_version(self, version: int) -> None:
        """Tell the engine that its weights, which are the policy's own, are others now."""
        assert self._engine is not None, "closed"
        self.version, self._calls = version, 0
        self._thread.run_blocking(self._engine.update_weights(WeightUpdate(version, "", {})), "step")


def _describe_one_prompt(prompts: Sequence[Prompt]) -> str | None:
    """What a single prompt is that was given in place of a list of them; None where it is a list."""
    if isinstance(prompts, str):
        return "a text"
    first = prompts[0] if prompts else None
    return "one conversation" if isinstance(first, Mapping) else "token ids" if isinstance(first, int) else None


def _check_sampling(n: int, max_tokens: int, temperature: float | None) -> None:
    mistakes = [
        Mistake(name, f"must be at least 1, got {value}", value, fix=f"give {name}=1 or more")
        for name, value in {"n": n, "max_tokens": max_tokens}.items()
        if value < 1
    ]
    if temperature is not None and not temperature >= 0:
        mistakes.append(Mistake("temperature", f"must be 0 or more, got {temperature}", temperature, fix="0 is greedy"))
    if mistakes:
        raise ConfigError(mistakes)


def _choose_device(device: str | None) -> torch.device:
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        fix = "leave device out, or give device='cpu'"
        raise ConfigError([Mistake("device", "torch sees no GPU on this machine", device, fix=fix, missing="GPU")])
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _rows(samples: Sequence[PolicySample]) -> list[Row]:
    if not samples:
        raise ConfigError([Mistake("samples", "there are none", fix="give what sample returned")])
    if not all(isinstance(sample, PolicySample) for sample in samples):
        fix = "sample returns a list for each prompt: join them, [s for group in groups for s in group]"
        raise ConfigError([Mistake("samples", f"must be samples, got {type(samples[0]).__name__}", fix=fix)])
    return [
        Row(item.prompt_ids, item.ids, (1,) * len(item.ids), item.logprobs or (0.0,) * len(item.ids), ())
        for item in samples
    ]


def _split(values_M: Tensor, sequences: Sequences) -> list[Tensor]:
    return list(torch.split(values_M, list(sequences.num_sampled)))


def _call_loss(loss: Loss, logprobs: list[Tensor]) -> Tensor:
    value = loss(logprobs)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"a tensor of {value.numel()} values" if isinstance(value, Tensor) else type(value).__name__
        raise MisuseError(f"the loss must return a scalar tensor that depends on the logprobs it is given, got {got}")
    return value
