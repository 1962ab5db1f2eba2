"""The `reward` section: which functions and models score a trajectory, and the limits they run under."""

import re
from collections.abc import Mapping
from typing import Literal

from treadle.config.rollout import FailureConfig, LimitsConfig, ModelConfig, OpenAIConfig, RolloutConfig, ScriptedConfig
from treadle.config.sandbox import SandboxConfig
from treadle.config.section import REQUIRED, Options, Section, Strings, key
from treadle.config.validate import Clashes

REWARD_FUNCTIONS = (
    "exact_match",
    "number_match",
    "by_source",
    "code_tests",
    "math",
    "format",
    "reasoning_gym",
    "soft_overlong",
    "length_penalty",
)
"""The reward functions that come with treadle."""

GROUP_FUNCTIONS = ("length_penalty",)
"""Those of them that see all samples of a task at once."""

BOXED_FUNCTIONS = ("code_tests",)
"""Those of them that run what a model wrote, in boxes of their own."""

SESSION_PARTS = ("environment", "tools")
"""The parts of a score that a session brings with it: rewards for turns, from its environment or its agent loop, and
rewards for tool calls."""

SCORE_LINE = r"(?i)\bscore\**\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)\b"
"""A number after the word score and a colon, in bold or not."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class RewardFunctionConfig(Section):
    """One reward function and its share of the sum."""

    path: str = key(REQUIRED, "the function", names=REWARD_FUNCTIONS)
    weight: float = key(1.0, "factor of its score in the sum")
    kwargs: Options = key({}, "keyword arguments for the function")
    scope: Literal["sample", "group"] | None = key(
        None,
        "what it sees: a sample, or the group of all samples of a task at once, of which it returns a list of scores; "
        "null for what a built-in has, and sample for others",
    )
    sandbox: bool | None = key(
        None,
        "fence it off from files, network and other processes, each score in a process of its own: for a function that "
        "evaluates what a model wrote; null for one that reaches exec, eval, a shell, pickle or sympy in your modules; "
        "`math` and `reasoning_gym` always are",
    )
    env: Strings = key((), "environment variables it is given beside PATH, HOME and the like; keys and tokens are not")
    python: str | None = key(
        None,
        "interpreter of another virtual environment, in which the function is imported and called, without treadle; "
        "values are JSON; null for this one",
    )

    def effective_scope(self) -> Literal["sample", "group"]:
        return self.scope or ("group" if self.path in GROUP_FUNCTIONS else "sample")


class ClassifierConfig(Section):
    """A discriminative reward model: a decoder whose head gives a text one number, the score."""

    path: str = key(REQUIRED, "Hugging Face directory of the model; for an endpoint, of its tokenizer")
    weight: float = key(1.0, "factor of its score in the sum")
    prompt: str | None = key(None, "Jinja template of the text to score; null for the conversation, as the model chats")
    placement: Literal["process", "thread", "endpoint"] = key(
        "process", "where it computes: a process of its own, a thread of this one, or a server"
    )
    device: str = key("cpu", "cpu, cuda (the plan chooses which) or cuda:N, for a process or a thread")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "dtype of its weights")
    max_length: int = key(4096, "tokens one text may have", ge=1)
    overlong: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = key(
        "error", "what happens to a longer text: no score, or a cut"
    )
    max_num_batched_tokens: int = key(16384, "tokens of the texts that are computed at once", ge=1)
    max_concurrency: int = key(256, "texts that wait or compute at once", ge=1)
    timeout_s: float = key(60.0, "deadline of one score", gt=0)
    launch_timeout_s: float = key(300.0, "how long it may take to load", gt=0)
    memory_mb: int = key(16384, "memory of a process on the CPU", ge=256)
    gpu_memory_utilization: float = key(0.3, "fraction of a GPU's memory for a process there", gt=0, le=1)
    endpoint: OpenAIConfig = key(OpenAIConfig(), "the server, for placement: endpoint; it must answer /classify")


class JudgeEngineConfig(Section):
    """The engine a judge speaks through: what of a `rollout` section applies to one."""

    name: Literal["policy", "native", "vllm", "openai", "scripted"] = key(
        "native", "engine of its own, or policy for the rollout's, with the weights in training"
    )
    replicas: int = key(1, "engines that share the questions, where they use no GPU", ge=1)
    n_gpus: int = key(0, "GPUs it computes on: its own where the plan has some, else shared; 0 for CPU", ge=0)
    tensor_model_parallel_size: int = key(1, "GPUs that one engine is split over", ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "dtype of the engine's weights")
    gpu_memory_utilization: float = key(0.3, "fraction of a GPU's memory for weights and KV cache", gt=0, le=1)
    max_model_len: int = key(8192, "tokens of a question and its answer", ge=2)
    max_num_seqs: int = key(64, "questions one engine answers at once", ge=1)
    enforce_eager: bool = key(False, "do without CUDA graphs")
    launch_timeout_s: float = key(300.0, "how long an engine may take to start", gt=0)
    engine_kwargs: Options = key({}, "further arguments by engine name, handed on as they are")
    openai: OpenAIConfig = key(OpenAIConfig(), "the endpoint, for name: openai")
    scripted: ScriptedConfig = key(ScriptedConfig(), "the script, for name: scripted")


class JudgeConfig(Section):
    """A generative reward model: asked about a trajectory in words, its answer is read as a score."""

    path: str | None = key(None, "Hugging Face directory of the judge; an endpoint and a script do without")
    weight: float = key(1.0, "factor of its score in the sum")
    prompt: str = key(REQUIRED, "Jinja template of the question")
    scope: Literal["sample", "group"] = key(
        "sample", "what a question is about: a sample, or all samples of a task; its answer then has a score for each"
    )
    system: str | None = key(None, "system message before the question")
    pattern: str = key(SCORE_LINE, "regular expression whose last match in the answer holds the score")
    words: Mapping[str, float] = key({}, "score of each word the pattern may find; empty where it finds numbers")
    parser: str | None = key(
        None, "function that reads the answer instead of the pattern, in processes as reward functions are", names=()
    )
    bounds: tuple[float, float] | None = key(None, "lowest and highest score; what lies outside cannot be read")
    retries: int = key(2, "further answers drawn, with other seeds, when one cannot be read", ge=0)
    n: int = key(1, "answers that vote on the score", ge=1)
    vote: Literal["mean", "majority"] = key("mean", "what votes come to")
    temperature: float = key(0.6, "sampling temperature; 0 is greedy", ge=0)
    top_p: float = key(1.0, "keep the smallest set of tokens with this much probability", gt=0, le=1)
    seed: int = key(42, "seed of its sampling", ge=0)
    response_length: int = key(1024, "tokens of one answer", ge=1)
    apply_chat_template_kwargs: Options = key({}, "extra variables for its chat template, such as enable_thinking")
    max_concurrency: int = key(64, "trajectories it judges at once", ge=1)
    timeout_s: float = key(120.0, "deadline of one score, all its answers included", gt=0)
    engine: JudgeEngineConfig = key(JudgeEngineConfig(), "what it speaks through")

    def model(self) -> ModelConfig:
        """The `model` section of an engine that loads the judge."""
        assert self.path is not None, "a judge without a path has no model of its own"
        return ModelConfig(path=self.path, apply_chat_template_kwargs=self.apply_chat_template_kwargs)

    def parser_function(self) -> RewardFunctionConfig | None:
        """Its parser as a reward function, which takes `text` too."""
        if self.parser is None:
            return None
        return RewardFunctionConfig(path=self.parser, scope=self.scope)

    def limits(self) -> LimitsConfig:
        return LimitsConfig(request_timeout_s=self.timeout_s, launch_timeout_s=self.engine.launch_timeout_s)

    def rollout(self, failures: FailureConfig) -> RolloutConfig:
        """The `rollout` section of its engine."""
        engine = self.engine
        assert engine.name != "policy", "the rollout's engine has a section already"
        return RolloutConfig(
            name=engine.name,
            n_gpus_per_node=engine.n_gpus,
            replicas_per_node=engine.replicas,
            tensor_model_parallel_size=engine.tensor_model_parallel_size,
            seed=self.seed,
            prompt_length=engine.max_model_len - self.response_length,
            response_length=self.response_length,
            limits=self.limits(),
            failures=failures,
            dtype=engine.dtype,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            enforce_eager=engine.enforce_eager,
            engine_kwargs=engine.engine_kwargs,
            openai=engine.openai,
            scripted=engine.scripted,
        )


class RewardConfig(Section):
    """Scores are the weighted sum of functions, models and what a session gave; one that fails leaves no score."""

    functions: Mapping[str, RewardFunctionConfig] = key({}, "reward functions by name")
    classifiers: Mapping[str, ClassifierConfig] = key({}, "discriminative reward models by name")
    judges: Mapping[str, JudgeConfig] = key({}, "generative reward models by name")
    environment_weight: float | None = key(
        None,
        "factor of the rewards for turns, from an environment or an agent loop; null for 1 where there are any, a "
        "number where they are part of every score",
    )
    tools_weight: float | None = key(
        None,
        "factor of the rewards for tool calls; null for 1 where there are any, a number where they are part of every "
        "score",
    )
    bounds: tuple[float, float] = key(
        (-1e6, 1e6), "lowest and highest score of a function or model, and of the sum; one outside is a failure"
    )
    success_threshold: float = key(1.0, "reward from which a trajectory counts as solved, in pass@k and validation")
    num_workers: int = key(
        1,
        "processes that run functions of yours, and as many for sandboxed ones; 0 runs them in this process",
        ge=0,
    )
    max_gradings: int | None = key(
        None, "programs that code_tests grades at once, in this process; null for one on each core", ge=1
    )
    timeout_s: float = key(
        10.0, "deadline of the functions of one score; code_tests has kwargs.timeout_s for each test instead", gt=0
    )
    on_timeout: float | None = key(None, "score of a function that ran past its deadline; null for a failure")
    cpu_time_s: float = key(60.0, "CPU time of the functions of one score", gt=0)
    memory_mb: int = key(2048, "memory of one worker process", ge=64)
    retries: int = key(
        1, "further attempts after a crash, or a timeout spent waiting; one spent computing would come again", ge=0
    )
    rate_limit_per_s: float | None = key(
        None,
        "scores of functions and classifiers, and questions to judges, started per second; null for no limit",
        gt=0,
    )

    sandbox: SandboxConfig = key(SandboxConfig(), "the boxes of code_tests, fresh ones for each score")

    def uses_sandbox(self) -> bool:
        """Whether a function of the config runs programs in boxes."""
        return any(item.path in BOXED_FUNCTIONS for item in self.functions.values())

    def weights(self) -> dict[str, float]:
        """The share of each part of a score: functions first, then classifiers, then judges."""
        weights = {name: function.weight for name, function in self.functions.items()}
        weights |= {name: classifier.weight for name, classifier in self.classifiers.items()}
        return weights | {name: judge.weight for name, judge in self.judges.items()}

    def scores_groups(self) -> bool:
        """Whether any function or judge sees all samples of a task at once."""
        return bool(self.group_parts())

    def group_parts(self) -> tuple[str, ...]:
        """The functions and judges that see all samples of a task at once."""
        functions = (name for name, item in self.functions.items() if item.effective_scope() == "group")
        return (*functions, *(name for name, judge in self.judges.items() if judge.scope == "group"))

    def session_weights(self) -> dict[str, float]:
        """The share of each part that a session brings with it."""
        given = {"environment": self.environment_weight, "tools": self.tools_weight}
        return {name: 1.0 if weight is None else weight for name, weight in given.items()}

    def declared_parts(self) -> tuple[str, ...]:
        """The parts of sessions that every score has, 0 where a session was given nothing."""
        given = {"environment": self.environment_weight, "tools": self.tools_weight}
        return tuple(name for name, weight in given.items() if weight is not None)

    def gives_scores(self) -> bool:
        """Whether every trajectory has a score."""
        return bool(self.weights() or self.declared_parts())

    def api_key_variables(self) -> tuple[str, ...]:
        """The environment variables that may hold a key of an endpoint named here."""
        classifiers = [item.endpoint for item in self.classifiers.values() if item.placement == "endpoint"]
        judges = [item.engine.openai for item in self.judges.values() if item.engine.name == "openai"]
        return tuple(dict.fromkeys(openai.api_key_env for openai in (*classifiers, *judges)))


def scores_are_bounded(reward: RewardConfig) -> Clashes:
    """Names and numbers that must fit together, whatever gives the scores."""
    low, high = reward.bounds
    if low >= high:
        yield "reward.bounds", f"{low:g} is not below {high:g}", None
    if reward.on_timeout is not None and not low <= reward.on_timeout <= high:
        yield "reward.on_timeout", f"{reward.on_timeout:g} lies outside reward.bounds, {low:g} to {high:g}", None
    taken = {"functions": "path", "classifiers": "path", "judges": "prompt"}
    for kind, leaf in taken.items():
        for name in SESSION_PARTS:
            if name in getattr(reward, kind):
                problem = f"{name!r} is the name of what a session gives (reward.{name}_weight): names must differ"
                yield f"reward.{kind}.{name}.{leaf}", problem, None


def foreign_functions_can_run(reward: RewardConfig) -> Clashes:
    """What a function in another interpreter does without."""
    for name, function in reward.functions.items():
        place = f"reward.functions.{name}.python"
        if function.python is None:
            continue
        if function.path in REWARD_FUNCTIONS:
            yield place, f"is an interpreter for a function of yours, and {function.path} is a built-in", "leave it out"
        elif function.sandbox:
            problem = "runs a function outside of this interpreter's sandbox, and sandbox is true"
            yield (
                place,
                problem,
                "leave out one of them; a function with python has the limits of workers, and no fence",
            )
        if reward.num_workers == 0:
            yield place, "is started by a worker, and reward.num_workers is 0", "set reward.num_workers to 1 or more"


def group_rewards_are_whole(reward: RewardConfig) -> Clashes:
    """What scope group needs."""
    for name, function in reward.functions.items():
        place = f"reward.functions.{name}"
        if function.path in REWARD_FUNCTIONS:
            own = "group" if function.path in GROUP_FUNCTIONS else "sample"
            if function.effective_scope() != own:
                yield f"{place}.scope", f"{function.scope}, but {function.path} has scope {own}", "leave it out"
        if function.path == "length_penalty":
            yield from _penalty_knows_what_is_correct(f"{place}.kwargs", function, reward)


def _penalty_knows_what_is_correct(place: str, function: RewardFunctionConfig, reward: RewardConfig) -> Clashes:
    samples = [name for name in reward.weights() if name not in reward.group_parts()]
    samples += reward.declared_parts()
    part = function.kwargs.get("part")
    if not samples:
        problem = "length_penalty needs a function or model of scope sample that says which answers are correct"
        yield place.removesuffix("kwargs") + "path", problem, "add one, such as {path: math}"
    elif part is not None and part not in samples:
        yield f"{place}.part", f"{part!r} is no part of scope sample; there are {', '.join(samples)}", None


def reward_models_are_whole(reward: RewardConfig) -> Clashes:
    """What must hold between the keys of reward models."""
    for name in reward.classifiers:
        if name in reward.functions:
            yield f"reward.classifiers.{name}.path", f"a function is called {name!r} too: names must differ", None
        yield from _classifier_is_whole(f"reward.classifiers.{name}", reward.classifiers[name])
    for name in reward.judges:
        if name in reward.functions or name in reward.classifiers:
            problem = f"a function or a classifier is called {name!r} too: names must differ"
            yield f"reward.judges.{name}.prompt", problem, None
        yield from _judge_has_an_engine(f"reward.judges.{name}", reward.judges[name])
        yield from _judge_can_be_read(f"reward.judges.{name}", reward.judges[name])


def _classifier_is_whole(place: str, classifier: ClassifierConfig) -> Clashes:
    if not _DEVICE.fullmatch(str(classifier.device)):
        yield f"{place}.device", f"must be cpu, cuda or cuda:N, got {classifier.device!r}", None
    if classifier.placement == "endpoint" and not classifier.endpoint.base_url:
        fix = "give the server, as http://host:port without /v1"
        yield f"{place}.endpoint.base_url", "is needed by placement: endpoint", fix
    if classifier.max_length > classifier.max_num_batched_tokens:
        problem = f"{classifier.max_num_batched_tokens} holds no text of max_length {classifier.max_length} tokens"
        yield f"{place}.max_num_batched_tokens", problem, f"raise it to {classifier.max_length}"


def _judge_has_an_engine(place: str, judge: JudgeConfig) -> Clashes:
    engine = judge.engine
    if engine.name in ("native", "vllm") and judge.path is None:
        yield f"{place}.path", f"is needed by engine.name: {engine.name}", "give the directory of the judge's model"
    if engine.name == "policy" and judge.path is not None:
        yield f"{place}.path", "is given, but engine.name is policy, which has its own model", "remove one of them"
    if engine.name == "openai" and not engine.openai.base_url:
        fix = "give the endpoint, as http://host:port/v1"
        yield f"{place}.engine.openai.base_url", "is needed by engine.name: openai", fix
    if judge.apply_chat_template_kwargs and (judge.path is None or engine.name == "openai"):
        fix = "an endpoint takes them as engine.openai.extra_body.chat_template_kwargs; the policy's are in model"
        yield f"{place}.apply_chat_template_kwargs", "is given, but the judge renders no template of its own", fix
    if engine.n_gpus and engine.name not in ("native", "vllm"):
        yield f"{place}.engine.n_gpus", f"{engine.n_gpus}, but {engine.name} uses no GPU of its own", "leave it 0"
    if engine.n_gpus % engine.tensor_model_parallel_size:
        problem = f"{engine.tensor_model_parallel_size} does not divide n_gpus {engine.n_gpus}"
        yield f"{place}.engine.tensor_model_parallel_size", problem, None
    if judge.response_length >= engine.max_model_len:
        problem = (
            f"{judge.response_length} leaves no room for a question in engine.max_model_len {engine.max_model_len}"
        )
        yield f"{place}.response_length", problem, "lower it, or raise engine.max_model_len"


def _judge_can_be_read(place: str, judge: JudgeConfig) -> Clashes:
    if judge.parser is not None and judge.words:
        yield f"{place}.words", "is given, but parser reads the answer", "remove one of them"
    if judge.bounds is not None:
        low, high = judge.bounds
        if low >= high:
            yield f"{place}.bounds", f"{low:g} is not below {high:g}", None
    if judge.n > 1 and judge.temperature == 0:
        yield f"{place}.n", f"{judge.n}, but at temperature 0 every vote is the same", "raise temperature, or ask once"
