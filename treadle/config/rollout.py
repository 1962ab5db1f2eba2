"""The `model` and `rollout` sections: weights and tokenizer; engines, sampling, agent loops, tools, limits, failures.

A rollout reads these sections and `reward`, and no other; so it runs with or without a trainer.
"""

from collections.abc import Mapping
from typing import Literal

from treadle.config.sandbox import SandboxConfig
from treadle.config.section import REQUIRED, Options, Section, Strings, key

OnWeightUpdate = Literal["continue", "recompute", "wait", "drop"]
"""What becomes of sessions that are open when new weights arrive."""


class ModelConfig(Section):
    """A Hugging Face model directory and everything that says how to read it."""

    path: str = key(REQUIRED, "Hugging Face model directory, or the name of a bundled model")
    adapter: str | None = key(
        None,
        "PEFT LoRA adapter directory: merged into the weights, or trained further where actor.lora.r is set",
    )
    tokenizer_path: str | None = key(None, "tokenizer directory, where it is not the model's own")
    custom_chat_template: str | None = key(None, "Jinja chat template that replaces the tokenizer's")
    apply_chat_template_kwargs: Options = key({}, "extra variables for the chat template, such as enable_thinking")
    allow_special_tokens: bool = key(
        False, "special tokens that the messages of a prompt spell out become special tokens; for data you trust"
    )
    describe_tools: bool = key(
        True, "write tools into the prompt where the chat template ignores them; false for a model that knows its tools"
    )
    trust_remote_code: bool = key(False, "run Python code that ships inside the model directory")
    override_config: Options = key({}, "values that replace those of the model's own config.json")
    parity_check: bool = key(
        True, "compare a small model of the same kind with its own forward first, and refuse one that differs"
    )
    enable_gradient_checkpointing: bool = key(True, "recompute activations in backward instead of storing them")
    shared_prefix: Literal["auto", "off"] = key(
        "auto",
        "auto computes a prefix that rows of a micro batch share, such as the prompt of a group, once; "
        "off computes every row by itself",
    )


AGENT_LOOPS = (
    *("single_turn_agent", "tool_agent", "environment_agent"),
    *("program_agent", "function_agent", "verifiers_agent"),
)
"""The agent loops that come with treadle."""

GATEWAY_LOOPS = ("program_agent", "function_agent", "verifiers_agent")
"""Those that run agents which talk to the gateway."""

BOX_TOOLS = ("python", "bash", "edit", "submit")
"""The tools that come with treadle: those of a session share one box."""

TOOL_FORMATS = (
    "hermes",
    "jamba",
    "granite",
    "internlm",
    "mistral",
    "kimi",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "minimax",
    "qwen3_coder",
    "seed_oss",
    "glm",
    "llama3_json",
    "gpt-oss",
)
"""The tool-call formats that come with treadle."""


ENVIRONMENT_SCHEMES = ("textarena", "gem", "skyrl_gym", "openenv", "gymnasium")
"""Packages whose environments come by scheme."""


class SamplingConfig(Section):
    """How validation samples, where it differs from training."""

    n: int = key(1, "samples per validation task", ge=1)
    temperature: float = key(0.0, "sampling temperature; 0 is greedy", ge=0)
    top_p: float = key(1.0, "keep the smallest set of tokens with this much probability", gt=0, le=1)
    top_k: int = key(-1, "keep this many most likely tokens; -1 for all", ge=-1)
    min_p: float = key(
        0.0, "keep tokens with at least this fraction of the most likely one's probability; 0 for all", ge=0, le=1
    )
    repetition_penalty: float = key(1.0, "divides the logits of tokens that prompt or answer have; 1 for none", gt=0)
    presence_penalty: float = key(0.0, "lowers the logits of tokens that the answer has", ge=-2, le=2)
    frequency_penalty: float = key(0.0, "lowers the logits of tokens by how often the answer has them", ge=-2, le=2)
    stop: Strings = key((), "texts that end an answer, beside the end-of-turn token")


class AgentLoopConfig(Section):
    """A named agent loop: a class, and the arguments it is built with."""

    path: str | None = key(
        None, "the class; null for the loop that comes with treadle by the name of this section", names=AGENT_LOOPS
    )
    kwargs: Options = key({}, "keyword arguments for the class")


class AgentConfig(Section):
    """Which agent loops exist, and where they run."""

    num_workers: int | None = key(
        None,
        "agent worker processes; 0 runs loops and tools inside the manager's own process. null: 1 where a loop, a "
        "tool, the environment or the parser is code of yours, which may hold the interpreter up and is killed past "
        "its deadline, and for program_agent and function_agent; else 0",
        ge=0,
    )
    max_concurrent_sessions: int | None = key(
        None,
        "sessions that may be open at once, over all workers; null for twice what the engines decode at once "
        "(replicas × rollout.max_num_seqs), so that those in tools and rewards leave no engine idle",
        ge=1,
    )
    default_agent_loop: str = key("single_turn_agent", "loop for tasks that name none: a name or an import path")
    loops: Mapping[str, AgentLoopConfig] = key({}, "further loops by name")
    allow_imports_from_data: bool = key(
        False, "let a task's `agent` be any import path, which runs the code it names: for data that you trust"
    )


class MCPServerConfig(Section):
    """One MCP server whose tools the model may call. Give `command` (stdio) or `url` (HTTP)."""

    command: Strings = key(
        (), "program and arguments of a server on standard input and output; python is the one that runs treadle"
    )
    url: str | None = key(None, "address of a server that speaks streamable HTTP")
    env: Mapping[str, str] = key({}, "environment variables for the program")
    tools: Strings = key((), "names of the tools to offer; empty for all")
    scope: Literal["run", "session"] = key(
        "run",
        "run: one server for all sessions of an agent worker; session: one for each session that calls it, closed with "
        "it, for servers that keep state, such as browsers and shells",
    )
    warm: int = key(2, "servers of scope session that are started ahead of the sessions that will need them", ge=0)
    startup_timeout_s: float = key(30.0, "how long the server may take to answer its first request", gt=0)


class MultiTurnConfig(Section):
    """Turns, tools and the environment of multi-turn loops."""

    max_assistant_turns: int | None = key(None, "assistant turns per trajectory; null for no limit", ge=1)
    max_user_turns: int | None = key(None, "turns an environment may add; null for no limit", ge=1)
    tools: Strings = key(
        (), "tools in the session's box, functions, or classes with one instance per session", names=BOX_TOOLS
    )
    mcp_servers: Mapping[str, MCPServerConfig] = key({}, "MCP servers by name, whose tools are offered too")
    environment: str | None = key(
        None,
        "the environment or user simulator of environment_agent; or one of another package, such as "
        "textarena:GuessTheNumber-v0",
        names=(),
        schemes=ENVIRONMENT_SCHEMES,
    )
    environment_python: str | None = key(
        None, "interpreter of another virtual environment, whose process the environment runs in; null for this one"
    )
    environment_kwargs: Options = key({}, "keyword arguments for the environment")
    environment_timeout_s: float = key(
        120.0,
        "deadline of one call of the environment; one that takes longer is abandoned, and its trajectory fails",
        gt=0,
    )
    opponents: Strings = key(
        (), "models, runs or checkpoints that play against the policy in episodes of several agents; none: self-play"
    )
    opponent_share: float = key(
        1.0, "share of tasks that are played against an opponent; the others are self-play", ge=0, le=1
    )
    format: str = key("hermes", "tool-call format the model writes", names=TOOL_FORMATS)
    max_parallel_calls: int = key(4, "tool calls of one turn that run at once", ge=1)
    max_invalid_calls: int = key(3, "malformed or unknown calls in a row that end a trajectory", ge=1)
    max_tool_response_length: int = key(4096, "characters of a tool's answer that are kept", ge=1)
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "which part of a longer answer is cut out"
    )
    tool_timeout_s: float = key(30.0, "deadline of one tool call", gt=0)
    tool_retries: int = key(2, "further attempts when a tool's infrastructure fails", ge=0)


class LimitsConfig(Section):
    """Deadlines. A limit that ends a trajectory is its stop reason; a limit on a wait is an error that names it."""

    session_timeout_s: float = key(600.0, "wall clock of one trajectory", gt=0)
    session_tool_time_s: float | None = key(None, "time one trajectory may spend in tools; null for no limit", gt=0)
    request_timeout_s: float = key(300.0, "deadline of one engine request", gt=0)
    launch_timeout_s: float = key(300.0, "how long an engine may take to start", gt=0)
    close_timeout_s: float = key(30.0, "how long running sessions may take to end when the manager closes", gt=0)
    stall_report_s: float = key(60.0, "report what is being waited for after this long", gt=0)


class FailureConfig(Section):
    """What happens when a trajectory fails for reasons that are not the model's."""

    request_retries: int = key(2, "further attempts of an engine request, on another replica where there is one", ge=0)
    session_retries: int = key(1, "further attempts of a whole trajectory that failed", ge=0)
    max_failed_fraction: float = key(
        0.2, "fraction of finished trajectories that may fail before the run ends", ge=0, le=1
    )
    min_finished: int = key(20, "finished trajectories before that fraction is looked at", ge=1)
    min_group_size: int = key(1, "survivors a group needs; a smaller group is sampled again", ge=1)


class OpenAIConfig(Section):
    """An OpenAI-compatible endpoint, for `rollout.name: openai`."""

    base_url: str | None = key(None, "address of the endpoint, such as http://localhost:8000/v1")
    model: str | None = key(None, "model name to ask for; null for the endpoint's first")
    api_key_env: str = key(
        "OPENAI_API_KEY", "environment variable that holds the key; it may be unset for local servers"
    )
    extra_body: Options = key({}, "further fields for every request")


class ScriptedConfig(Section):
    """The scripted engine, for `rollout.name: scripted`: answers, delays and faults drawn by seed; no model."""

    script: str | None = key(None, "the function that writes the answers; null echoes the prompt", names=())
    latency_s: float = key(0.0, "mean time of one request", ge=0)
    latency_tail: float = key(1.0, "longest request over the mean; 1 for no tail", ge=1)
    failure_rate: float = key(0.0, "fraction of requests that fail", ge=0, le=1)
    hang_rate: float = key(0.0, "fraction of requests that never answer", ge=0, le=1)


class GatewayConfig(Section):
    """The gateway of program_agent and function_agent: where agents reach it, and what of theirs trains."""

    host: str = key("127.0.0.1", "address to listen on; anything else lets other machines try keys")
    port: int = key(0, "port to listen on; 0 takes a free one, which several agent workers need", ge=0, le=65535)
    url: str = key("http://{host}:{port}", "address that agents are given, such as http://host.docker.internal:{port}")
    max_body_mb: int = key(64, "longest request, in MB", ge=1)
    train: Literal["main", "all"] = key(
        "main",
        "main: turns that the agent went on from, or read last, of the model that it asks for by the name policy; all: "
        "also those it asked for again, never received, or had from other models",
    )


class RolloutConfig(Section):
    """Everything a rollout needs to know."""

    name: Literal["native", "vllm", "openai", "scripted"] = key("native", "engine that turns tokens into completions")
    nnodes: int = key(0, "nodes of the rollout's own; 0 shares the trainer's devices", ge=0)
    n_gpus_per_node: int = key(0, "GPUs on each of those nodes, or of a stand-alone rollout; 0 for CPU", ge=0)
    tensor_model_parallel_size: int = key(1, "GPUs that one engine is split over", ge=1)
    replicas_per_node: int = key(1, "engines per node where they use no GPU; with GPUs the plan computes it", ge=1)

    n: int = key(1, "samples per task", ge=1)
    temperature: float = key(1.0, "sampling temperature; 0 is greedy", ge=0)
    top_p: float = key(1.0, "keep the smallest set of tokens with this much probability", gt=0, le=1)
    top_k: int = key(-1, "keep this many most likely tokens; -1 for all", ge=-1)
    min_p: float = key(
        0.0, "keep tokens with at least this fraction of the most likely one's probability; 0 for all", ge=0, le=1
    )
    repetition_penalty: float = key(1.0, "divides the logits of tokens that prompt or answer have; 1 for none", gt=0)
    presence_penalty: float = key(0.0, "lowers the logits of tokens that the answer has", ge=-2, le=2)
    frequency_penalty: float = key(0.0, "lowers the logits of tokens by how often the answer has them", ge=-2, le=2)
    stop: Strings = key((), "texts that end an answer, beside the end-of-turn token")
    seed: int = key(42, "seed of all sampling: same seed and weights, same tokens", ge=0)
    ignore_eos: bool = key(False, "go on after the end-of-turn token, up to the limits")
    prompt_length: int = key(512, "tokens a prompt may have", ge=1)
    response_length: int = key(512, "tokens of a trajectory after its prompt, over all turns", ge=1)
    overlong_prompts: Literal["error", "drop", "truncate_left", "truncate_right", "truncate_middle"] = key(
        "error", "what happens to a prompt over prompt_length; drops and cuts are counted"
    )
    val_kwargs: SamplingConfig = key(SamplingConfig(), "sampling for validation")

    agent: AgentConfig = key(AgentConfig(), "agent loops and workers")
    multi_turn: MultiTurnConfig = key(MultiTurnConfig(), "turns, tools and environments")
    gateway: GatewayConfig = key(GatewayConfig(), "the API that agent programs talk to")
    sandbox: SandboxConfig = key(SandboxConfig(), "the box of each session that runs what the model writes")
    limits: LimitsConfig = key(LimitsConfig(), "deadlines")
    failures: FailureConfig = key(FailureConfig(), "retries and failure budgets")

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "dtype of the engine's weights")
    gpu_memory_utilization: float = key(0.5, "fraction of a GPU's memory for weights and KV cache", gt=0, le=1)
    max_model_len: int | None = key(None, "longest sequence; null for prompt_length + response_length", ge=1)
    max_num_seqs: int = key(256, "sequences one engine decodes at once", ge=1)
    max_num_batched_tokens: int = key(8192, "tokens one engine step may process", ge=1)
    enforce_eager: bool = key(False, "do without CUDA graphs")
    enable_prefix_caching: bool = key(True, "reuse the KV cache of shared prefixes")
    enable_chunked_prefill: bool = key(
        True, "split long prompts over several engine steps; native splits those over max_num_batched_tokens alone"
    )
    overlap_weight_updates: bool = key(
        True, "native in a process of its own: go on sampling while new weights arrive; takes room for them twice"
    )
    free_cache_engine: bool = key(
        False, "give the engine's memory back while the policy trains on the same devices: slower, and room for more"
    )
    engine_kwargs: Options = key({}, "further arguments by engine name, handed on as they are")
    openai: OpenAIConfig = key(OpenAIConfig(), "the endpoint, for name: openai")
    scripted: ScriptedConfig = key(ScriptedConfig(), "the script, for name: scripted")

    def trajectory_length(self) -> int:
        """The longest a prompt and its response can be together."""
        return self.prompt_length + self.response_length

    def sequence_length(self) -> int:
        """The longest sequence an engine must hold."""
        return self.max_model_len or self.trajectory_length()

    def num_places(self, replicas: int) -> int:
        """Sessions that may be open at once over this many engines: as told, or as many as keep them full."""
        agent = self.agent
        return agent.max_concurrent_sessions or max(agent.num_workers or 1, 2 * replicas * self.max_num_seqs)

    def uses_gateway(self) -> bool:
        """Whether a loop of the config talks to the gateway."""
        agent = self.agent
        names = {agent.default_agent_loop, *(loop.path or name for name, loop in agent.loops.items())}
        return not names.isdisjoint(GATEWAY_LOOPS)

    def uses_sandbox(self) -> bool:
        """Whether a tool or an agent program of the config runs in a box."""
        return not set(BOX_TOOLS).isdisjoint(self.multi_turn.tools) or self.boxes_agents()

    def boxes_agents(self) -> bool:
        """Whether an agent program runs in a box, out of which it reaches the gateway."""
        return any(loop.kwargs.get("sandbox") for loop in self.agent.loops.values())

    def uses_gpus(self) -> bool:
        """Whether the engine runs on the rollout's devices, where it has any; the others compute elsewhere."""
        return self.name in ("native", "vllm")
