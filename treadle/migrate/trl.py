"""TRL scripts: the arguments of `GRPOConfig` and `GRPOTrainer` as our YAML, reward functions and tools as files.

Owns how the two calls become a config (the tables are in `trl_arguments`), and what is made of functions that the
script defines: a copy, and for rewards a function around each that calls it as TRL does. The script is read, not run.
Invariant: every argument of both calls is in the config, or is listed with the reason why not.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from treadle.config.parse import KeyPath
from treadle.errors import ConfigError, Mistake
from treadle.migrate.python_source import Computed, PythonCall, PythonScript
from treadle.migrate.report import MigratedKey, Migration, YamlLine, write_document
from treadle.migrate.trl_arguments import (
    AGGREGATIONS,
    ANSWER_COLUMNS,
    BATCHES,
    DEFAULTS,
    DIRECT,
    GIVEN,
    LOSSES,
    NOT_NEEDED,
    OTHER_TRAINERS,
    PEFT_DEFAULTS,
    PEFT_KEYS,
    REASONS,
    TABLES,
    TRL_REWARDS,
)
from treadle.migrate.trl_rewards import write_reward_test, write_rewards


@dataclass(frozen=True, slots=True)
class TrlMigration:
    """A TRL script in our spelling: config, report, and the files that the config names."""

    migration: Migration
    files: Mapping[str, str]
    columns: tuple[str, ...]
    """Columns that its reward functions read, the ground truth first."""
    functions: tuple[str, ...]
    """Reward functions of the script itself, by the names the config gives them."""


def migrate_trl(path: Path) -> TrlMigration:
    """Our YAML and files for a script that calls `GRPOTrainer`. Nothing is run."""
    script = PythonScript(path)
    trainers, configs = script.calls("GRPOTrainer"), script.calls("GRPOConfig")
    if not trainers and not configs:
        raise ConfigError([_describe_other(script)])
    draft = _TrlDraft(script)
    if len(trainers) > 1 or len(configs) > 1:
        draft.notes.append("several GRPOConfig or GRPOTrainer: the first of each is taken")
    draft.take_config(configs[0] if configs else None)
    draft.take_trainer(trainers[0] if trainers else None)
    if trainers and not configs and "args" in trainers[0].named:
        draft.notes.append("GRPOConfig comes from the command line: give such arguments as KEY=VALUE to treadle train")
    title = f"Migrated from {path.name} by `treadle init --from trl`."
    left = [f"{entry.old}: {entry.before}  # {entry.reason}" for entry in draft.entries if entry.kind == "none"]
    text = write_document(draft.lines, title, left)
    migration = Migration(text, tuple(draft.entries), tuple(draft.notes))
    return TrlMigration(migration, draft.files, tuple(draft.columns), tuple(draft.functions))


def _describe_other(script: PythonScript) -> Mistake:
    """What stands in for the trainer that a script calls instead of GRPOTrainer."""
    for name, fix in OTHER_TRAINERS.items():
        if calls := script.calls(name):
            return Mistake(
                f"{script.path}:{calls[0].line}", f"calls {name}, and only GRPOTrainer is translated", fix=fix
            )
    fix = "give the script that trains with TRL's GRPOTrainer"
    return Mistake(str(script.path), "calls neither GRPOTrainer nor GRPOConfig", fix=fix)


@dataclass(slots=True)
class _TrlDraft:
    """The migrated config while it is written, and the report on it."""

    script: PythonScript
    lines: dict[KeyPath, YamlLine] = field(default_factory=dict)
    entries: list[MigratedKey] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    weights: Sequence[float] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """All arguments of `GRPOConfig`, with TRL's defaults."""

    def put(self, key: str, value: Any, comment: str = "") -> None:
        self.lines[tuple(key.split("."))] = YamlLine(value, comment)

    def tell(
        self, name: str, kind: str, before: Any, line: int, new: str = "", after: Any = None, why: str = ""
    ) -> None:
        place = f"{self.script.path}:{line}" if line else "TRL's default"
        keys = (new,) if new else ()
        self.entries.append(MigratedKey(name, kind, keys, before, after, why, place))

    def take_config(self, call: PythonCall | None) -> None:
        line = call.line if call else 0
        given = {name: self.script.value(node) for name, node in (call.named if call else {}).items()}
        if call and call.positional:
            given.setdefault("output_dir", self.script.value(call.positional[0]))
        for text in call.spreads if call else ():
            self.tell("GRPOConfig", "none", text, line, why="only running the script would tell what is in it")
        for name in [name for name, value in given.items() if isinstance(value, Computed)]:
            self.tell(name, "none", given.pop(name).text, line, why="only running the script would tell its value")
        self.values = values = {**DEFAULTS, **given}
        self._take_batches(values, given, line)
        for name, value in values.items():
            if name not in BATCHES:
                self._take_argument(name, value, line if name in given else 0)

    def _take_argument(self, name: str, value: Any, line: int) -> None:
        comment = "" if line else "TRL's default"
        special = _SPECIAL.get(name)
        if special is not None:
            special(self, value, line)
        elif name in TABLES and _in_table(value, TABLES[name][1]):
            key, table = TABLES[name]
            self.put(key, table[value], comment)
            self.tell(name, "mapped", value, line, key, table[value])
        elif name in DIRECT or (name in TABLES and isinstance(value, int | float) and not isinstance(value, bool)):
            key = DIRECT.get(name) or TABLES[name][0]
            value = int(value) if key == "trainer.total_epochs" and value == int(value) else value
            self.put(key, value, comment)
            self.tell(name, "mapped", value, line, key, value)
        elif name in NOT_NEEDED:
            self.tell(name, "mapped", value, line, why=f"not needed: {NOT_NEEDED[name]}")
        else:
            self.tell(name, "none", value, line, why=REASONS.get(name, "there is no counterpart"))

    def _take_batches(self, values: dict[str, Any], given: Mapping[str, Any], line: int) -> None:
        """Tasks a step and a mini batch, of completions a device; and steps, which TRL counts by optimizer step."""
        n, device = values["num_generations"], values["per_device_train_batch_size"]
        accumulated = device * values["gradient_accumulation_steps"]
        generated = values.get("generation_batch_size") or device * (
            values.get("steps_per_generation") or values["gradient_accumulation_steps"]
        )
        mini, batch = max(1, accumulated // n), max(1, generated // n)
        batch = max(batch, mini)
        comment = f"{generated} completions of {n} a task, on one process; TRL's numbers are for each process"
        self.put("data.train_batch_size", batch, comment)
        self.put("actor.ppo_mini_batch_size", mini)
        for name in BATCHES[:4]:
            if name in given:
                key = "data.train_batch_size" if "generation" in name else "actor.ppo_mini_batch_size"
                self.tell(name, "mapped", given[name], line, key, batch if "generation" in name else mini)
        updates = ceil(batch / mini) * values.get("num_iterations", 1)
        steps = {"max_steps": "trainer.total_training_steps", "save_steps": "checkpoint.save_freq"}
        for name, key in {**steps, "eval_steps": "trainer.test_freq"}.items():
            value = given.get(name)
            if isinstance(value, int | float) and value >= 1:
                after = max(1, ceil(value / updates))
                note = f"{value:g} optimizer steps, {updates} in a step here" if updates > 1 else ""
                self.put(key, after, note)
                self.tell(name, "mapped", value, line, key, after, note)
            elif name in given:
                self.tell(name, "mapped", value, line, why="not needed: it asks for nothing")

    def take_trainer(self, call: PythonCall | None) -> None:
        if call is None:
            self.put("model.path", "???", "the script has no GRPOTrainer")
            return
        named = dict(call.named)
        for name, node in zip(("model", "reward_funcs", "args", "train_dataset"), call.positional, strict=False):
            named.setdefault(name, node)
        named.pop("args", None)
        for text in call.spreads:
            self.tell("GRPOTrainer", "none", text, call.line, why="only running the script would tell what is in it")
        self.put("trainer.n_gpus_per_node", 1, "as many as `accelerate launch` has processes; 0 for CPUs")
        self._take_model(named.pop("model", None), call.line)
        self._take_rewards(named.pop("reward_funcs", None), call.line)
        self._take_data(named.pop("train_dataset", None), "train_dataset", "data.train_files", call.line)
        if "eval_dataset" in named:
            self._take_data(named.pop("eval_dataset"), "eval_dataset", "data.val_files", call.line)
        if "tools" in named:
            self._take_tools(named.pop("tools"), call.line)
        if "peft_config" in named:
            self._take_adapters(named, call.line)
        for name, node in named.items():
            self.tell(name, "none", ast.unparse(node), call.line, why=REASONS.get(name, "there is no counterpart"))

    def _take_adapters(self, named: dict[str, ast.expr], line: int) -> None:
        """`LoraConfig(...)` as keys of `actor.lora`; left to be reported where it is anything else."""
        node = self.script.expression(named["peft_config"])
        if isinstance(node, ast.Constant) and node.value is None:
            del named["peft_config"]
            self.tell("peft_config", "mapped", None, line, why="not needed: all parameters train")
            return
        is_plain = isinstance(node, ast.Call) and not node.args and all(item.arg for item in node.keywords)
        if not isinstance(node, ast.Call) or not is_plain or ast.unparse(node.func).rpartition(".")[2] != "LoraConfig":
            return
        del named["peft_config"]
        given = {str(item.arg): self.script.value(item.value) for item in node.keywords}
        for name, default in PEFT_DEFAULTS.items():
            value = given.pop(name, default)
            key, comment = PEFT_KEYS[name], "" if value is not default else "peft's default"
            if isinstance(value, Computed):
                self.tell(f"peft_config.{name}", "none", value.text, line, why="only running the script would tell it")
                continue
            value = [value] if isinstance(value, str) else value
            self.put(key, value, comment)
            self.tell(f"peft_config.{name}", "mapped", value, line, key, value)
        for name, value in given.items():
            if name in ("task_type", "inference_mode", "base_model_name_or_path") or value in (False, None, 0, "none"):
                self.tell(f"peft_config.{name}", "mapped", value, line, why="not needed: it changes nothing here")
            else:
                text = value.text if isinstance(value, Computed) else value
                why = REASONS.get(name, "adapters are plain LoRA")
                self.tell(f"peft_config.{name}", "none", text, line, why=why)

    def _take_model(self, node: ast.expr | None, line: int) -> None:
        value = None if node is None else self.script.value(node)
        comment = ""
        if node is not None and isinstance(value, Computed):
            loaded = self._loaded_from(node)
            value = value if loaded is None else self.script.value(loaded)
            if (found := self.script.environment_default(loaded or node)) is not None:
                variable, value = found
                comment = f"the default: the script reads the variable {variable}"
                self.notes.append(f"model.path is {value}, which the script takes where {variable} is not set")
        if isinstance(value, str):
            self.put("model.path", value, comment)
            self.tell("model", "mapped", value, line, "model.path", value)
        else:
            self.put("model.path", "???", "the script computes it")
            text = value.text if isinstance(value, Computed) else value
            self.tell("model", "none", text, line, why="only running the script would tell its value: set model.path")

    def _loaded_from(self, node: ast.expr) -> ast.expr | None:
        """The first argument of `….from_pretrained(…)`; None for any other expression."""
        call = self.script.expression(node)
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "from_pretrained":
            return None
        named = {item.arg: item.value for item in call.keywords}
        return call.args[0] if call.args else named.get("pretrained_model_name_or_path")

    def _take_rewards(self, node: ast.expr | None, line: int) -> None:
        node = None if node is None else self.script.expression(node)
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]
        own: list[str] = []
        for at, item in enumerate(nodes):
            weight = self.weights[at] if self.weights is not None and at < len(self.weights) else None
            own += self._take_reward(item, weight, line)
        if own:
            self.files["reward.py"] = write_rewards(self.script, own, self.columns)
            self.files["test_reward.py"] = write_reward_test(self.script, own, self.columns)
        if self.columns and self.columns[0] != "answer":
            self.put("data.answer_key", self.columns[0])

    def _take_reward(self, node: ast.expr, weight: float | None, line: int) -> list[str]:
        """Put one reward into the config; its name, where the script defines it."""
        text = ast.unparse(node)
        name = text.rpartition(".")[2]
        function = self.script.function(name) if isinstance(node, ast.Name) else None
        model = self.script.value(node)
        if weight is not None and (function or name in TRL_REWARDS):
            self.put(f"reward.functions.{name}.weight", weight)
        if function is not None and not isinstance(function, ast.AsyncFunctionDef):
            self.put(f"reward.functions.{name}.path", f"reward:{name}_score", "a copy, called as TRL calls it")
            self.tell("reward_funcs", "mapped", name, line, f"reward.functions.{name}.path", f"reward:{name}_score")
            self.columns += [column for column in _columns(function) if column not in self.columns]
            self.columns.sort(key=lambda column: column not in ANSWER_COLUMNS)
            self.functions.append(name)
            return [name]
        if name in TRL_REWARDS:
            self.put(f"reward.functions.{name}.path", TRL_REWARDS[name])
            self.tell("reward_funcs", "mapped", name, line, f"reward.functions.{name}.path", TRL_REWARDS[name])
            self.columns = self.columns or ["solution"]
        elif isinstance(model, str):
            label = model.rpartition("/")[2]
            self.put(f"reward.classifiers.{label}.path", model)
            self.tell("reward_funcs", "mapped", model, line, f"reward.classifiers.{label}.path", model)
        else:
            module = self.script.imported_from(name)
            why = f"it is imported from {module}" if module else "it is no plain function of the script"
            self.tell("reward_funcs", "none", text, line, why=f"{why}: call it from a function in reward.py")
        return []

    def _take_data(self, node: ast.expr | None, name: str, key: str, line: int) -> None:
        assigned = self.script.assignments(node.id) if isinstance(node, ast.Name) else []
        sources = assigned or ([] if node is None else [node])
        calls = [item for source in sources for item in ast.walk(source) if isinstance(item, ast.Call)]
        found = next((item for item in calls if ast.unparse(item.func).endswith("load_dataset")), None)
        text = "; ".join(map(ast.unparse, sources)) or "nothing"
        if found is None:
            self.put(key, "???", "give files, hub:OWNER/NAME/PREFIX, or package.module:function; see docs/data.md")
            self.tell(name, "none", text, line, why=f"set {key}: files, or a function that yields rows")
            return
        words = [self.script.value(item) for item in found.args]
        named = {item.arg: self.script.value(item.value) for item in found.keywords}
        split = named.get("split", "train")
        folder = words[1] if len(words) > 1 else named.get("name") or "data"
        source = f"hub:{words[0]}/{folder}/{split}" if words and "/" in str(words[0]) else "???"
        self.put(key, source, "guessed from load_dataset: treadle check names the files there are")
        self.tell(name, "mapped", text, line, key, source)
        if len(calls) > 1:
            self.notes.append(
                f"{name} is changed after it is loaded ({text}): see data.prompt_template, or save_to_disk"
            )

    def _take_tools(self, node: ast.expr, line: int) -> None:
        expression = self.script.expression(node)
        names = [item.id for item in getattr(expression, "elts", []) if isinstance(item, ast.Name)]
        own = [name for name in names if self.script.function(name)]
        if own and len(own) == len(getattr(expression, "elts", [])):
            self.put("rollout.multi_turn.tools", [f"tools:{name}" for name in own])
            self.put("rollout.agent.default_agent_loop", "tool_agent")
            self.files["tools.py"] = f'"""Tools of {self.script.path.name}."""\n\n{self.script.copy_definitions(own)}\n'
            self.tell("tools", "mapped", own, line, "rollout.multi_turn.tools", own)
        else:
            why = "tools are typed functions by import path: set rollout.multi_turn.tools"
            self.tell("tools", "none", ast.unparse(node), line, why=why)


def _in_table(value: Any, table: Mapping[Any, Any]) -> bool:
    """Whether a table has a value; True is not 1."""
    return isinstance(value, str | int | float | None) and any(
        value == known and type(value) is type(known) for known in table
    )


def _columns(function: ast.FunctionDef) -> list[str]:
    """Columns of the data set that a reward function takes by name."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return [item.arg for item in arguments if item.arg not in GIVEN]


def _take_beta(draft: _TrlDraft, value: Any, line: int) -> None:
    comment = "" if line else "TRL's default"
    draft.put("actor.use_kl_loss", bool(value), comment)
    if value:
        draft.put("actor.kl_loss_coef", value)
        draft.put("actor.kl_loss_type", "k3")
    draft.tell("beta", "mapped", value, line, "actor.kl_loss_coef", value)


def _take_loss(draft: _TrlDraft, value: Any, line: int) -> None:
    comment = "" if line else "TRL's default"
    if value in AGGREGATIONS:
        draft.put("actor.loss_agg_mode", AGGREGATIONS[value], comment)
        draft.tell("loss_type", "mapped", value, line, "actor.loss_agg_mode", AGGREGATIONS[value])
    elif value in LOSSES:
        draft.put("actor.policy_loss.loss_mode", value)
        draft.tell("loss_type", "mapped", value, line, "actor.policy_loss.loss_mode", value)
    else:
        draft.tell("loss_type", "none", value, line, why="see actor.policy_loss.loss_mode and actor.loss_agg_mode")


def _take_level(draft: _TrlDraft, value: Any, line: int) -> None:
    if value == "token":
        draft.tell("importance_sampling_level", "mapped", value, line, why="not needed: a ratio for each token")
        return
    if value != "sequence":
        draft.tell("importance_sampling_level", "none", value, line, why="see actor.policy_loss.loss_mode")
        return
    draft.put("actor.policy_loss.loss_mode", "gspo")
    draft.tell("importance_sampling_level", "mapped", value, line, "actor.policy_loss.loss_mode", "gspo")
    if (loss := draft.values["loss_type"]) != "grpo":
        draft.notes.append(
            f"gspo is a mean over sequences; with loss_type={loss}, TRL weighs sequences by their tokens"
        )


def _take_weights(draft: _TrlDraft, value: Any, line: int) -> None:
    draft.weights = value if isinstance(value, list) else None
    draft.tell("reward_weights", "mapped", value, line, why="the weights of reward.functions")


def _take_prompt_length(draft: _TrlDraft, value: Any, line: int) -> None:
    if value is not None:
        draft.put("rollout.prompt_length", value)
        draft.put("rollout.overlong_prompts", "truncate_left", "as TRL cuts prompts")
    draft.tell("max_prompt_length", "mapped", value, line, "rollout.prompt_length", value)


def _take_tool_turns(draft: _TrlDraft, value: Any, line: int) -> None:
    if value is not None:
        draft.put("rollout.multi_turn.max_assistant_turns", value + 1, "calls, and the answer")
    draft.tell("max_tool_calling_iterations", "mapped", value, line, "rollout.multi_turn.max_assistant_turns", value)


def _take_trackers(draft: _TrlDraft, value: Any, line: int) -> None:
    wanted = [value] if isinstance(value, str) else list(value or ())
    known = [name for name in wanted if name in ("tensorboard", "wandb", "mlflow", "trackio")]
    draft.put("logging.logger", ["console", *known])
    if strange := [name for name in wanted if name not in (*known, "none", "all")]:
        draft.tell("report_to", "none", strange, line, why="there is no such tracker")
    else:
        draft.tell("report_to", "mapped", value, line, "logging.logger", ["console", *known])


def _take_reference(key: str, name: str) -> Callable[[_TrlDraft, Any, int], None]:
    def take(draft: _TrlDraft, value: Any, line: int) -> None:
        follows = draft.values.get("sync_ref_model")
        if name == "sync_ref_model":
            value_here, told = draft.values.get("ref_model_sync_steps", 512), value
        else:
            value_here = told = value
        if follows:
            draft.put(key, value_here)
        draft.tell(name, "mapped", told, line, key if follows else "", value_here if follows else None)

    return take


def _take_adam(at: int) -> Callable[[_TrlDraft, Any, int], None]:
    def take(draft: _TrlDraft, value: Any, line: int) -> None:
        before = draft.lines.get(("actor", "optim", "betas"), YamlLine([0.9, 0.999])).value
        betas = [value if at == index else old for index, old in enumerate(before)]
        draft.put("actor.optim.betas", betas)
        draft.tell(f"adam_beta{at + 1}", "mapped", value, line, "actor.optim.betas", betas)

    return take


_SPECIAL: Mapping[str, Callable[[_TrlDraft, Any, int], None]] = {
    "beta": _take_beta,
    "loss_type": _take_loss,
    "importance_sampling_level": _take_level,
    "reward_weights": _take_weights,
    "max_prompt_length": _take_prompt_length,
    "max_tool_calling_iterations": _take_tool_turns,
    "report_to": _take_trackers,
    "sync_ref_model": _take_reference("ref.sync_freq", "sync_ref_model"),
    "ref_model_sync_steps": _take_reference("ref.sync_freq", "ref_model_sync_steps"),
    "ref_model_mixup_alpha": _take_reference("ref.sync_mix", "ref_model_mixup_alpha"),
    "adam_beta1": _take_adam(0),
    "adam_beta2": _take_adam(1),
}
"""Arguments that become several keys, or a key with another meaning."""
