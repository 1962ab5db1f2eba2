"""Migration rules of `actor_rollout_ref.rollout`, now `rollout`, and of `data`.

`data` is the same section here; lengths and chat templates moved to the sections that use them.
"""

from typing import Any

from treadle.migrate.rule import (
    Conversion,
    Converted,
    LookUp,
    NotNeeded,
    Refused,
    Rules,
    asked,
    by_table,
    classes,
    equal_to,
    fixed,
    greedy,
    ignored,
    kept,
    moved,
    none,
    nones,
    same,
    to,
    under,
    unless_null,
)
from treadle.migrate.rules.networks import ACTOR, PROFILER, QUANTIZED, TOKENS

ROLLOUT = "actor_rollout_ref.rollout"
NO_SGLANG = "There is no SGLang engine: use vllm or native."
NO_TRTLLM = "There is no TensorRT-LLM engine: use vllm or native."
VLLM = "Give it to vLLM in rollout.engine_kwargs.vllm."
LOGPROBS = "The policy's own logprobs are computed in micro batches of actor.ppo_max_token_len_per_gpu: leave it out."
TOOLS = "List the tools by import path in rollout.multi_turn.tools (and MCP servers in mcp_servers)."
LOOPS = "Name each agent loop in rollout.agent.loops, with its path and kwargs."
TRACES = "Every trajectory is in the run directory's journal: leave it out."

_engines = by_table(
    {
        "vllm": "vllm",
        "hf": Converted("native", "Hugging Face generation is the native engine"),
        "sglang": Refused(NO_SGLANG),
        "trtllm": Refused(NO_TRTLLM),
        "naive": Converted("native", "the naive rollout is the native engine"),
    },
    "The engines are native, vllm, openai and scripted.",
)
_formats = by_table(
    {
        "auto": "auto",
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
        "float16": "float16",
        "half": "float16",
        "float32": "float32",
        "float": "float32",
        "fp32": "float32",
    },
    "Engines compute in auto, bfloat16, float16 or float32.",
)


def _own_gpus(value: Any, look: LookUp) -> Conversion:
    nodes = look("rollout.nnodes", look(f"{ROLLOUT}.nnodes", 0))
    if not nodes:
        return NotNeeded("rollout.nnodes is 0, so the rollout shares the trainer's devices")
    return Converted(value)


def _all_tokens(value: Any, look: LookUp) -> Conversion:
    return Converted(-1, "0 is written -1") if value == 0 else Converted(value)


def _no_arguments(reason: str) -> Rules:
    rule = asked(lambda value, look: NotNeeded("no arguments") if value in ({}, None) else Refused(reason))
    return {"**": rule}


_PLAIN = (
    "nnodes temperature top_p seed ignore_eos prompt_length response_length gpu_memory_utilization enforce_eager"
    " free_cache_engine tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs"
    " enable_chunked_prefill enable_prefix_caching n"
)

ALWAYS_ASYNC = fixed(
    "async", note="the rollout is always asynchronous", otherwise="The rollout is always asynchronous: leave it out."
)

_ENGINE: Rules = {
    "name": to("rollout.name", convert=_engines),
    "mode": ALWAYS_ASYNC,
    "n_gpus_per_node": to("rollout.n_gpus_per_node", convert=_own_gpus),
    "dtype": to("rollout.dtype", convert=_formats),
    "top_k": to("rollout.top_k", convert=_all_tokens),
    "do_sample": to("rollout.temperature", convert=greedy(f"{ROLLOUT}.temperature")),
    "full_determinism": fixed(True, False, note="the same seed and weights always draw the same tokens"),
    "cudagraph_capture_sizes": fixed(None, note="the engine's own", otherwise=VLLM),
    "data_parallel_size": fixed(
        1, note="every replica is one engine", otherwise="Replicas follow from the GPU counts."
    ),
    "expert_parallel_size": fixed(1, note="no expert parallelism", otherwise=VLLM),
    "pipeline_model_parallel_size": fixed(1, note="no pipeline parallelism", otherwise=VLLM),
    "logprobs_mode": fixed("processed_logprobs", None, note="logprobs are those of the distribution sampled from"),
    "scheduling_policy": fixed("fcfs", None, note="first come, first served", otherwise=VLLM),
    "load_format": ignored("an engine gets its weights from the policy before it serves"),
    "layered_summon": ignored("weights are pushed in bounded memory"),
    "log_prob_micro_batch_size": fixed(None, note="not given", otherwise=LOGPROBS),
    "log_prob_micro_batch_size_per_gpu": fixed(None, note="not given", otherwise=LOGPROBS),
    "log_prob_use_dynamic_bsz": fixed(True, False, note=TOKENS),
    "log_prob_max_token_len_per_gpu": asked(
        equal_to(f"{ACTOR}.ppo_max_token_len_per_gpu", "the actor's token budget is used", LOGPROBS, default=16384)
    ),
    "disable_log_stats": fixed(True, note="engines report through the run's metrics", otherwise=VLLM),
    "over_sample_rate": fixed(0, note="no request is cut short", otherwise="Use rollout.limits.session_timeout_s."),
    "multi_stage_wake_up": fixed(False, note="an option of SGLang", otherwise=NO_SGLANG),
    "router_config_path": fixed(None, note="the built-in router", otherwise="Only the built-in router exists."),
    "calculate_log_probs": fixed(True, False, note="every sampled token has its logprob"),
    "skip_tokenizer_init": fixed(True, False, note="engines take and return token ids"),
    "enable_rollout_routing_replay": fixed(False, note="no routing replay", otherwise="There is no routing replay."),
    "moe_load_balance_metrics_interval": fixed(0, note="no routing metrics", otherwise="There are no routing metrics."),
    "standalone_gpu_memory_utilization": fixed(
        None, note="rollout.gpu_memory_utilization counts", otherwise="Give rollout.gpu_memory_utilization instead."
    ),
    "quantization": fixed(None, note="weights keep their dtype", otherwise="Weights are not quantized."),
    "quantization_config_file": fixed(None, note="weights keep their dtype", otherwise="Weights are not quantized."),
    "mtp.**": none("There is no multi-token prediction."),
    "qat.**": none(QUANTIZED),
    "disaggregation.enabled": fixed(False, note="prefill and decode share an engine", otherwise=VLLM),
    "disaggregation.**": none("Prefill and decode share an engine: leave it out."),
    "profiler.**": none(PROFILER),
    "prometheus.enable": fixed(False, note="no Prometheus", otherwise="Metrics go to logging.logger."),
    "prometheus.**": none("Metrics go to logging.logger: leave Prometheus out."),
    "trace.backend": fixed(None, note="trajectories are in the journal", otherwise=TRACES),
    "trace.**": none(TRACES),
    "checkpoint_engine.backend": ignored("how weights travel follows from where engine and policy run"),
    "checkpoint_engine.update_weights_bucket_megabytes": none("Weights are pushed in bounded memory: leave it out."),
    "checkpoint_engine.engine_kwargs": fixed({}, None, note="no arguments", otherwise="There is nothing to configure."),
    "checkpoint_engine.custom_backend_module": fixed(None, note="none", otherwise="Weight transport is not pluggable."),
}

_AGENTS: Rules = {
    "agent.agent_loop_config_path": fixed(None, note="no further loops", otherwise=LOOPS),
    "agent.custom_async_server.path": fixed(None, note="none", otherwise="Engines are not pluggable by path."),
    "agent.custom_async_server.name": fixed(None, note="none", otherwise="Engines are not pluggable by path."),
    "multi_turn.enable": fixed(True, False, note="rollout.agent.default_agent_loop says which loop runs"),
    "multi_turn.tool_config_path": fixed(None, note="no tools", otherwise=TOOLS),
    "multi_turn.function_tool_path": fixed(None, note="no tools", otherwise=TOOLS),
    "multi_turn.use_inference_chat_template": fixed(
        False, note="history keeps its token ids", otherwise="History keeps its token ids; it is never rendered again."
    ),
    "multi_turn.tokenization_sanity_check_mode": ignored("history keeps its token ids, so there is nothing to compare"),
    "multi_turn.num_repeat_rollouts": fixed(None, note="rollout.n counts", otherwise="Give rollout.n instead."),
}

ROLLOUT_RULES: Rules = (
    moved(ROLLOUT, "rollout", _PLAIN)
    | moved(ROLLOUT, "rollout", "val_kwargs.n val_kwargs.temperature val_kwargs.top_p")
    | moved(ROLLOUT, "rollout", "val_kwargs.top_k", convert=_all_tokens)
    | moved(ROLLOUT, "rollout", "agent.num_workers agent.default_agent_loop engine_kwargs.vllm.**")
    | moved(
        ROLLOUT,
        "rollout",
        "multi_turn.max_parallel_calls multi_turn.max_tool_response_length multi_turn.tool_response_truncate_side"
        " multi_turn.format",
    )
    | moved(
        ROLLOUT,
        "rollout",
        "multi_turn.max_assistant_turns multi_turn.max_user_turns",
        convert=unless_null("null is no limit, as by default"),
    )
    | classes(ROLLOUT, ". val_kwargs multi_turn agent agent.custom_async_server checkpoint_engine")
    | under(ROLLOUT, _ENGINE)
    | under(ROLLOUT, _AGENTS)
    | under(f"{ROLLOUT}.engine_kwargs.sglang", _no_arguments(NO_SGLANG))
    | under(f"{ROLLOUT}.engine_kwargs.trtllm", _no_arguments(NO_TRTLLM))
    | under(
        ROLLOUT,
        {
            "val_kwargs.do_sample": to(
                "rollout.val_kwargs.temperature", convert=greedy(f"{ROLLOUT}.val_kwargs.temperature")
            )
        },
    )
    | nones(ROLLOUT, "agent.agent_loop_manager_class", "The manager is not pluggable; a loop is: rollout.agent.loops.")
)


VISION = "Tasks are text: there are no images, videos or sounds."
FINE_TUNING = "There is no supervised fine-tuning; train with rewards, or bring a model that is already tuned."
STORED = "Responses that are already written cannot be scored by a command: `treadle eval` samples and scores."
DATASET = "Write the tasks as JSONL or Parquet and list the files, or name a generator in data.train_files."

_cut = by_table(
    {
        "error": "error",
        "left": Converted("truncate_left", "left is written truncate_left"),
        "right": Converted("truncate_right", "right is written truncate_right"),
        "middle": Converted("truncate_middle", "middle is written truncate_middle"),
    },
    "A prompt that is too long is an error, dropped, or cut at the left, right or middle.",
)


def _drop(value: Any, look: LookUp) -> Conversion:
    if value is True:
        return Converted("drop", "filtering is written drop")
    return NotNeeded("data.truncation says what happens")


def _cut_unless_dropped(value: Any, look: LookUp) -> Conversion:
    if look("data.filter_overlong_prompts") is True:
        return NotNeeded("prompts that are too long are dropped before they could be cut")
    return _cut(value, look)


def _batch(value: Any, look: LookUp) -> Conversion:
    if value == 0:
        return NotNeeded("0 means ppo_mini_batch_size × async_training.require_batches")
    return Converted(value)


def _fetched_at_once(value: Any, look: LookUp) -> Conversion:
    if value is None or value == 1 or value == look("data.train_batch_size"):
        return NotNeeded("tasks are taken as sessions become free")
    return Refused(
        "Tasks are taken as sessions become free; dynamic sampling is bounded by filter_groups: leave it out."
    )


DATA_RULES: Rules = kept("data", "train_max_samples val_max_samples prompt_key reward_fn_key shuffle") | under(
    "data",
    {
        "train_files": same(unless_null("no files")),
        "val_files": same(unless_null("no files")),
        "train_batch_size": same(_batch),
        "seed": same(unless_null("null is a fixed order of verl's; here the order follows data.seed")),
        "max_prompt_length": to("rollout.prompt_length"),
        "max_response_length": to("rollout.response_length"),
        "filter_overlong_prompts": to("rollout.overlong_prompts", convert=_drop),
        "truncation": to("rollout.overlong_prompts", convert=_cut_unless_dropped),
        "filter_overlong_prompts_workers": ignored("prompts are measured as they are rendered"),
        "tokenizer": to("model.tokenizer_path", convert=unless_null("the model's own")),
        "trust_remote_code": to(
            "model.trust_remote_code",
            convert=lambda value, look: (
                Converted(True) if value is True else NotNeeded("model.trust_remote_code counts")
            ),
        ),
        "apply_chat_template_kwargs.**": to("model.apply_chat_template_kwargs.**"),
        "gen_batch_size": asked(_fetched_at_once),
        "val_batch_size": ignored("validation tasks go to the rollout as one stream"),
        "tool_config_path": fixed(None, note="no tools", otherwise=TOOLS),
        "function_tool_path": fixed(None, note="no tools", otherwise=TOOLS),
        "return_raw_input_ids": fixed(False, note="rewards read messages and text", otherwise="Rewards read messages."),
        "return_raw_chat": fixed(True, False, note="a task always keeps its messages"),
        "return_full_prompt": fixed(False, note="the journal has the rendered prompt", otherwise="Read the journal."),
        "validation_shuffle": fixed(False, note="validation keeps the order of its files"),
        "use_shm": fixed(False, note="files are read from where they are"),
        "dataloader_num_workers": none("Tasks are read by the rollout itself, without worker processes: leave it out."),
        "custom_cls.path": fixed(None, note="none", otherwise=DATASET),
        "custom_cls.name": fixed(None, note="none", otherwise=DATASET),
        "mm_processor_kwargs": fixed({}, None, note="tasks are text", otherwise=VISION),
        "mm_processor_kwargs.**": none(VISION),
    },
)
DATA_RULES |= nones("data", "image_key video_key audio_key image_patch_size return_multi_modal_inputs", VISION)
DATA_RULES |= nones(
    "data",
    "micro_batch_size_per_gpu max_token_len_per_gpu use_dynamic_bsz messages_key tools_key enable_thinking_key"
    " enable_thinking_default pad_mode max_length balance_dp_token num_workers ignore_input_ids_mismatch",
    FINE_TUNING,
)
DATA_RULES |= nones("data", "path response_key data_source_key reward_model_key", STORED)
