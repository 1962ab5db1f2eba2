"""Privileged prompt of a teacher: the reference policy reads more than the student was shown, such as the answer.

`ref.prompt_template` writes the last user's message anew for the reference, over the fields of a task; the sampled
tokens stay as they are, so that its logprobs are of the student's own tokens. With the model itself as the reference
that is self-distillation. Owns the rows that the reference reads. Refuses rows whose prompt is not the task's as
rendered: the prompt of an environment, or one that shows tools.
Invariant: a row and the one that the reference reads have the same tokens after their prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.config import TrainConfig
from treadle.data.renderer import Renderer
from treadle.data.task_files import compile_jinja
from treadle.errors import RunError
from treadle.types import Group, Row, Task

if TYPE_CHECKING:
    from jinja2 import Template

KEY = "ref.prompt_template"


class TeacherPrompt:
    """The prompts of a reference. Keeps nothing between steps but what the renderer keeps."""

    def __init__(self, template: "Template", renderer: Renderer, longest: int) -> None:
        """`longest`: tokens of the longest row that the reference was loaded for."""
        self._template = template
        self._renderer = renderer
        self._longest = longest

    @classmethod
    def of(cls, config: TrainConfig, renderer: Renderer | None = None) -> "TeacherPrompt | None":
        """As a config says; None where the reference reads what the student reads."""
        text = config.ref.prompt_template
        if text is None:
            return None
        template = compile_jinja(text, KEY, config.origin(KEY))
        return cls(template, renderer or Renderer.create(config.model), config.rollout.sequence_length())

    def rows(self, groups: Sequence[Group]) -> tuple[Row, ...]:
        """The rows of survivors, in the order of `rows_of`, as the reference reads them."""
        found = list[Row]()
        for group in groups:
            plain, privileged = self.prompts(group.task) if group.survivors else ((), ())
            for trajectory in group.survivors:
                found += [self._exchange(group.task, row, plain, privileged) for row in trajectory.rows]
        return tuple(found)

    def prompts(self, task: Task) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The task's prompt as the student reads it, and as the reference does."""
        last = {**task.messages[-1], "content": self.fill(task)}
        renderer = self._renderer
        return renderer.prompt(task.messages), renderer.prompt((*task.messages[:-1], last))

    def fill(self, task: Task) -> str:
        """The last user's message as the reference reads it; a RunError where the task lacks a field."""
        from jinja2 import TemplateError

        if not task.messages or task.messages[-1]["role"] != "user":
            raise RunError(f"{KEY}: task {task.uid} does not end with a user's message, which it would write anew")
        fields: Mapping[str, Any] = {
            **task.extra,
            "prompt": task.messages[-1]["content"],
            "answer": task.ground_truth,
            "data_source": task.data_source,
        }
        try:
            return str(self._template.render(fields))
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            present = ", ".join(fields)
            raise RunError(f"{KEY} cannot be filled for task {task.uid}: {error}; it has {present}") from error

    def _exchange(self, task: Task, row: Row, plain: tuple[int, ...], privileged: tuple[int, ...]) -> Row:
        size = len(plain)
        if row.prompt_ids[:size] != plain:
            raise RunError(
                f"{KEY}: a row of task {task.uid} does not begin with the task's prompt as it is rendered without "
                "tools, so there is no place for another one. Prompts that show tools (model.describe_tools) and those "
                "of environments and agents of their own cannot be exchanged"
            )
        prompt_ids = (*privileged, *row.prompt_ids[size:])
        if len(prompt_ids) + len(row.ids) > self._longest:
            raise RunError(
                f"{KEY}: a row of task {task.uid} has {len(prompt_ids) + len(row.ids):,} tokens with it, and the "
                f"reference is loaded for {self._longest:,}: raise rollout.max_model_len"
            )
        return replace(row, prompt_ids=prompt_ids)
