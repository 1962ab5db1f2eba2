"""On-policy distillation: the advantage of each token, a student that moves to its teacher, and teachers refused."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.configs import TRAINING, mistakes, training_config
from tests.policies import CPU, VOCABULARY, make_actor, make_groups, make_policy, save_tiny_model
from treadle.algorithm.advantage_inputs import rows_of
from treadle.algorithm.estimators import add_distillation
from treadle.config.rollout import ModelConfig
from treadle.config.training import AlgorithmConfig, OptimConfig, RefConfig, TrainerConfig
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError, RunError
from treadle.model.tokenizer import require_same_vocabulary, resolve_model_path
from treadle.policy.reference import SingleReference
from treadle.trainer.step import StepParts, train_step
from treadle.trainer.teacher_prompt import TeacherPrompt
from treadle.types import Group, Outcome, Row, Score, StopReason, Task, Trajectory


def make_parts(student: Path, teacher: Path, **keys: object) -> StepParts:
    ref = RefConfig(dtype="fp32", path=str(teacher))
    model = ModelConfig(path=str(student))
    algorithm = AlgorithmConfig(**{"adv_estimator": "on_policy_distill", "distill_coef": 1.0, **keys})
    reference = SingleReference.create(model=ref.model_of(model), ref=ref, temperature=1.0, device=CPU)
    policy = make_policy(student, optim=OptimConfig(lr=1e-2), total_steps=100)
    return StepParts(policy, make_actor(), algorithm, TrainerConfig(), reference)


def log_probabilities(module: torch.nn.Module, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)


def divergence(student: torch.nn.Module, teacher: torch.nn.Module, prompts: list[tuple[int, ...]]) -> float:
    """The reverse KL of the next token, over the whole vocabulary, mean over prompts."""
    found = []
    for prompt in prompts:
        here, there = log_probabilities(student, prompt), log_probabilities(teacher, prompt)
        found.append(float((here.exp() * (here - there)).sum()))
    return sum(found) / len(found)


def sample(module: torch.nn.Module, prompt: tuple[int, ...], count: int, seed: int) -> Group:
    logprobs = log_probabilities(module, prompt)
    drawn = torch.multinomial(
        logprobs.exp(), count, replacement=True, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    made = tuple(
        Trajectory(
            "it",
            number,
            (Row(prompt, (token,), (1,), (float(logprobs[token]),), (0,)),),
            Outcome.ended(StopReason.STOP),
            Score(0.0),
        )
        for number, token in enumerate(drawn)
    )
    return Group(Task("it", ()), made)


def test_the_advantage_is_the_log_ratio_of_teacher_and_policy(tmp_path):
    """Written out again with transformers' own forward, token by token; rewards are added with their own weight."""
    student, teacher = save_tiny_model(tmp_path / "student"), save_tiny_model(tmp_path / "teacher", num_hidden_layers=1)
    parts, groups = make_parts(student, teacher, distill_coef=0.5), make_groups(3)
    rows = rows_of(groups)
    policy_T, teacher_T = parts.policy.logprobs(rows), parts.reference.logprobs(rows)
    mask_T = torch.tensor([bool(at) for row in rows for at in row.mask])
    found_T = add_distillation(torch.ones(len(mask_T)), policy_T, teacher_T, mask_T, 0.5)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (student, teacher)]
    expected = []
    for row in rows:
        ids = (*row.prompt_ids, *row.ids)
        for at, sampled in enumerate(row.mask):
            before, token = ids[: len(row.prompt_ids) + at], row.ids[at]
            here, there = (float(log_probabilities(model, before)[token]) for model in models) if sampled else (0, 0)
            expected.append(1 + 0.5 * (there - here))
    torch.testing.assert_close(found_T, torch.tensor(expected), atol=1e-4, rtol=0)
    kl = train_step(parts, groups, step=1).metrics["distill/kl"]
    assert kl == pytest.approx(float((policy_T - teacher_T)[mask_T].mean()), abs=1e-6)


def test_a_student_moves_to_its_teacher(tmp_path):
    student, teacher = save_tiny_model(tmp_path / "student"), save_tiny_model(tmp_path / "teacher", num_hidden_layers=1)
    parts = make_parts(student, teacher)
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(3)) for _ in range(4)]
    goal = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    module = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    before = divergence(module, goal, prompts)
    for step in range(1, 41):
        module.load_state_dict(dict(parts.policy.tensors()), strict=False)
        groups = [sample(module, prompt, 16, step) for prompt in prompts]
        train_step(parts, groups, step=step)
    assert divergence(module, goal, prompts) < 0.5 * before


class Asking:
    """A reference that keeps the rows it was asked about."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def logprobs(self, rows):
        self.rows = list(rows)
        return torch.zeros(sum(len(row.ids) for row in rows))

    def follow(self, policy, step):
        return False


def privileged_groups(renderer: Renderer, turns: int = 1) -> list[Group]:
    task = Task("it", ({"role": "user", "content": "1+2="},), "3", extra={"hint": "three"})
    prompt = renderer.prompt(task.messages)
    rows = [Row((*prompt, *range(fork)), (7, 8), (1, 1), (-1.0, -1.0), (0, 0)) for fork in range(turns)]
    made = [Trajectory("it", at, tuple(rows), Outcome.ended(StopReason.STOP), Score(float(at))) for at in range(2)]
    return [Group(task, tuple(made))]


def test_a_privileged_teacher_reads_more_and_grades_the_same_tokens(tmp_path):
    model = "treadle/tiny-calculator"
    words = (
        f"model.path={model}",
        "algorithm.distill_coef=1",
        "ref.prompt_template='{{ prompt }} {{ answer }} {{ hint }}'",
    )
    config = training_config(*words)
    teacher = TeacherPrompt.of(config)
    assert teacher is not None
    renderer, reference = Renderer.create(ModelConfig(path=model)), Asking()
    groups = privileged_groups(renderer, turns=3)
    policy = make_policy(resolve_model_path(model))
    parts = StepParts(policy, make_actor(), config.algorithm, TrainerConfig(), reference, teacher_prompt=teacher)
    train_step(parts, groups, step=1)
    shown = renderer.prompt(({"role": "user", "content": "1+2= 3 three"},))
    plain = rows_of(groups)
    assert [row.prompt_ids for row in reference.rows] == [(*shown, *range(fork)) for fork in (0, 1, 2, 0, 1, 2)]
    assert [(row.ids, row.mask) for row in reference.rows] == [(row.ids, row.mask) for row in plain]


def test_what_a_privileged_prompt_cannot_be_is_refused():
    words = ("model.path=treadle/tiny-calculator", "algorithm.distill_coef=1")
    renderer = Renderer.create(ModelConfig(path="treadle/tiny-calculator"))
    groups = privileged_groups(renderer)

    def refuse(template: str, groups: list[Group], *more: str) -> str:
        teacher = TeacherPrompt.of(training_config(*words, f"ref.prompt_template='{template}'", *more))
        assert teacher is not None
        with pytest.raises(RunError) as raised:
            teacher.rows(groups)
        return str(raised.value)

    assert "'nothing' is undefined; it has hint, prompt, answer" in refuse("{{ nothing }}", groups)
    other = [replace(groups[0], task=replace(groups[0].task, messages=({"role": "user", "content": "9+9="},)))]
    assert "does not begin with the task's prompt" in refuse("{{ prompt }}", other)
    assert "raise rollout.max_model_len" in refuse("{{ prompt }}" + "1" * 9999, groups)
    with pytest.raises(ConfigError, match=r"ref\.prompt_template: is not a Jinja template"):
        TeacherPrompt.of(training_config(*words, "ref.prompt_template='{{ prompt'"))
    found = {item.key: item.problem for item in mistakes("ref.prompt_template=x", text=TRAINING)}
    assert "algorithm.distill_coef is 0" in found["ref.prompt_template"]


def test_teachers_of_other_tokenizers_are_refused_by_name(tmp_path):
    source = resolve_model_path("treadle/tiny-calculator")
    other = tmp_path / "other"
    other.mkdir()
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    model = ModelConfig(path=str(source))
    require_same_vocabulary(model, str(other), "ref.path")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != "<tool_response>"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"ref\.path: its tokenizer is not that of model\.path.*'<tool_response>'"):
        require_same_vocabulary(model, str(other), "ref.path")


def test_a_teacher_is_read_by_something():
    found = {item.key: item.problem for item in mistakes("ref.path=x", text=TRAINING)}
    assert "nothing reads a reference policy" in found["ref.path"]
    found = {item.key: item.problem for item in mistakes("algorithm.distill_coef=1", text=TRAINING)}
    assert "is needed by algorithm.distill_coef" in found["ref.path"]
    found = {item.key: item.problem for item in mistakes("algorithm.adv_estimator=on_policy_distill", text=TRAINING)}
    assert "has no other signal" in found["algorithm.distill_coef"]
    words = ("algorithm.distill_coef=1", "ref.path=x", "ref.sync_freq=2")
    found = {item.key: item.problem for item in mistakes(*words, text=TRAINING)}
    assert "cannot take the policy's weights" in found["ref.sync_freq"]
    assert training_config(*words[:2]).used_networks()[1] is not None
