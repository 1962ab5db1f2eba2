"""Rules between keys: what cannot work is refused before anything starts, with the two values that clash."""

import warnings

import pytest

from tests.configs import ROLLOUT, TRAINING, mistake, mistakes, rollout_config, training_config
from treadle.config import ConfigWarning, ModelConfig, RolloutConfig, TrainConfig, loads, rules
from treadle.config.rules import ROLLOUT_RULES, UNKNOWN, UnknownValueRead, check_rules
from treadle.config.training_rules import TRAINING_CAUTIONS, TRAINING_RULES

ASYNC = ["rollout.nnodes=1", "algorithm.rollout_correction.rollout_is=token"]

ROLLOUT_CLASHES = [
    (["rollout.sandbox.provider=podman"], "rollout.sandbox.image", "is needed by provider: podman"),
    (["rollout.sandbox.image=debian"], "rollout.sandbox.image", "is given, but provider is auto, which has none"),
    (["reward.sandbox.read_only=[data]"], "reward.sandbox.read_only", "'data' is no absolute path"),
    (["model.adapter=a", "rollout.name=vllm"], "model.adapter", "vLLM reads the weights of model.path by itself"),
    (["model.adapter=a", "rollout.name=scripted"], "model.adapter", "has no effect: rollout.name scripted"),
    (["reward.bounds=[1, 0]"], "reward.bounds", "1 is not below 0"),
    (["reward={on_timeout: 2, bounds: [0, 1]}"], "reward.on_timeout", "2 lies outside reward.bounds, 0 to 1"),
    (
        ["reward.functions.tools.path=exact_match"],
        "reward.functions.tools.path",
        "'tools' is the name of what a session gives (reward.tools_weight): names must differ",
    ),
    (
        ["reward.judges.fair={prompt: 'Rate {{ response }}'}"],
        "reward.judges.fair.path",
        "is needed by engine.name: native",
    ),
    (
        ["rollout.max_model_len=1000"],
        "rollout.max_model_len",
        "1000 is less than prompt_length + response_length = 1024",
    ),
    (
        ["rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=512"],
        "rollout.max_num_batched_tokens",
        "512 holds no sequence of 1024 tokens",
    ),
    (
        ["rollout.engine_kwargs={native: {page_size: 16}}"],
        "rollout.engine_kwargs",
        "native takes no further arguments: vllm alone does",
    ),
    (
        ["rollout.name=openai", "rollout.openai.base_url=http://a/v1", "rollout.n_gpus_per_node=2"],
        "rollout.n_gpus_per_node",
        "2, but openai uses no GPU",
    ),
    (["rollout.name=openai"], "rollout.openai.base_url", "is needed by rollout.name: openai"),
    (
        ["data.train_files=[a.jsonl,b.jsonl]", "data.train_weights=[1]"],
        "data.train_weights",
        "1 weights for 2 entries of data.train_files",
    ),
    (["data.sampler_kwargs={a: 1}"], "data.sampler_kwargs", "are not used by data.sampler null"),
    (
        ["data.sampler=success_band", "data.hard_replay.share=0.5"],
        "data.hard_replay.share",
        "is not used by data.sampler success_band",
    ),
    (
        ["data.sampler=success_band", "data.success_band.low=0.95"],
        "data.success_band.low",
        "0.95 is more than data.success_band.high 0.9",
    ),
    (
        ["rollout.name=vllm", "rollout.n_gpus_per_node=6", "rollout.tensor_model_parallel_size=4"],
        "rollout.tensor_model_parallel_size",
        "4 does not divide rollout.n_gpus_per_node 6",
    ),
    (
        ["rollout.name=vllm", "rollout.tensor_model_parallel_size=2"],
        "rollout.tensor_model_parallel_size",
        "2 does not divide rollout.n_gpus_per_node 0",
    ),
    (
        [
            "rollout.name=vllm",
            "rollout.n_gpus_per_node=4",
            "rollout.tensor_model_parallel_size=2",
            "rollout.replicas_per_node=3",
        ],
        "rollout.replicas_per_node",
        "3, but with 4 GPUs a node has 2",
    ),
    (
        ["rollout.scripted.failure_rate=0.6", "rollout.scripted.hang_rate=0.5"],
        "rollout.scripted.hang_rate",
        "0.5, and failure_rate 0.6, are together more than 1",
    ),
    (["rollout.agent.default_agent_loop=tool_agnt"], "rollout.agent.default_agent_loop", "no agent loop is called"),
    (
        ["rollout.agent.default_agent_loop=environment_agent"],
        "rollout.multi_turn.environment",
        "is needed by the agent loop environment_agent",
    ),
    (
        ["rollout.agent.default_agent_loop=program_agent"],
        "rollout.agent.default_agent_loop",
        "program_agent needs to know what to run",
    ),
    (["rollout.agent.loops.mine.kwargs={a: 1}"], "rollout.agent.loops.mine.path", "is needed: no loop called 'mine'"),
    (
        ["rollout.multi_turn.opponents=[treadle/tiny-calculator]"],
        "rollout.multi_turn.opponents",
        "play in an environment of several agents, and there is no environment",
    ),
    (
        ["rollout.multi_turn.opponent_share=0.5"],
        "rollout.multi_turn.opponent_share",
        "0.5, but there are no rollout.multi_turn.opponents",
    ),
    (["rollout.gateway.host=0.0.0.0"], "rollout.gateway.host", "'0.0.0.0' listens on every address of this machine"),
    (["rollout.gateway.url=http://{name}"], "rollout.gateway.url", "is a template of {host} and {port}"),
    (
        ["rollout.agent.num_workers=8", "rollout.agent.max_concurrent_sessions=4"],
        "rollout.agent.max_concurrent_sessions",
        "4 is less than rollout.agent.num_workers 8",
    ),
    (
        ["rollout.multi_turn.mcp_servers.files={}"],
        "rollout.multi_turn.mcp_servers.files.url",
        "give command or url: neither is set",
    ),
    (
        ["rollout.multi_turn.mcp_servers.files={command: [a], url: b}"],
        "rollout.multi_turn.mcp_servers.files.url",
        "give command or url: both are set",
    ),
    (
        ["rollout.n=4", "rollout.failures.min_group_size=5"],
        "rollout.failures.min_group_size",
        "5 is more than rollout.n 4",
    ),
    (
        ["rollout.n_gpus_per_node=2", "rollout.tensor_model_parallel_size=2"],
        "rollout.tensor_model_parallel_size",
        "2, but an engine of rollout.name native runs on one GPU",
    ),
    (["rollout.nnodes=2"], "rollout.nnodes", "2, but cluster.backend local is this machine alone"),
    (["cluster.address=10.0.0.1:6379"], "cluster.address", "is given, but cluster.backend is local"),
    (["cluster.ray_init={num_cpus: 2}"], "cluster.ray_init", "is given, but cluster.backend is local"),
]

APART = "rollout.nnodes=1"
SHARDED = "actor._target_=treadle.config.FSDPActorConfig"
RAY = "cluster.backend=ray"

KL_COV = "actor.policy_loss.loss_mode=kl_cov"
GEOMETRIC = "algorithm.rollout_correction.rollout_rs=geometric"
BOUND = "algorithm.rollout_correction.rollout_rs_threshold"

NO_REWARD = "~reward.functions"
ENVIRONMENT = ["rollout.agent.default_agent_loop=environment_agent", "rollout.multi_turn.environment=a:B"]
TOOLS = ["rollout.agent.default_agent_loop=tool_agent", "rollout.multi_turn.tools=a:b"]

TRAINING_CLASHES = [
    (["actor.lora.alpha=8"], "actor.lora.alpha", "is given, but actor.lora.r is null"),
    (["actor.lora.r=8", "actor.model_dtype=bf16"], "actor.model_dtype", "bf16, but adapters"),
    ([NO_REWARD], "reward.functions", "is empty: without a reward nothing trains"),
    ([NO_REWARD, *ENVIRONMENT], "reward.functions", "is empty: without a reward nothing trains"),
    ([NO_REWARD, *TOOLS], "reward.functions", "is empty: without a reward nothing trains"),
    (["reward.functions.answer.weight=0"], "reward.functions", "every weight is 0: without a reward nothing trains"),
    (
        [NO_REWARD, *ENVIRONMENT, "reward.environment_weight=0"],
        "reward.functions",
        "every weight is 0: without a reward nothing trains",
    ),
    (
        [NO_REWARD, "reward.environment_weight=1"],
        "reward.environment_weight",
        "is the only reward, but rollout.agent.default_agent_loop single_turn_agent has nothing that rewards a turn",
    ),
    (
        [NO_REWARD, "reward.tools_weight=1", "rollout.agent.default_agent_loop=tool_agent"],
        "reward.tools_weight",
        "is the only reward, but rollout.agent.default_agent_loop tool_agent has no tool that could give one",
    ),
    ([KL_COV], "actor.policy_loss.loss_mode", "kl_cov, but a step has one update"),
    ([GEOMETRIC, f"{BOUND}=2"], BOUND, "2 bounds the mean ratio per token of a sequence"),
    ([GEOMETRIC, f"{BOUND}_lower=0.5"], f"{BOUND}_lower", "0.5 bounds the mean ratio per token of a sequence"),
    (["actor.clip_ratio_high=4"], "actor.clip_ratio_c", "3 is below 1 + clip_ratio_high = 5"),
    (["ref.sync_freq=10"], "ref.sync_freq", "10, but nothing reads a reference policy"),
    (
        ["rollout.replicas_per_node=3"],
        "rollout.replicas_per_node",
        "3, but one engine shares the trainer's devices (rollout.nnodes is 0)",
    ),
    (["trainer.nnodes=2", SHARDED], "trainer.nnodes", "2, but cluster.backend local is this machine alone"),
    (
        ["trainer.processes_per_node=2"],
        "actor._target_",
        "ActorConfig holds a network on one device, but 2 ranks train",
    ),
    (
        ["trainer.processes_per_node=2", SHARDED, RAY],
        "trainer.processes_per_node",
        "2, but on Ray a node without GPUs has one",
    ),
    (
        ["algorithm.advantage_level=turn", "algorithm.adv_estimator=opo"],
        "algorithm.advantage_level",
        "turn, but opo does not compare turns",
    ),
    (
        ["algorithm.norm_adv_scope=batch", "algorithm.adv_estimator=rloo"],
        "algorithm.norm_adv_scope",
        "batch, but only grpo with norm_adv_by_std_in_grpo divides by it",
    ),
    (
        ["algorithm.use_kl_in_reward=true", "algorithm.adv_estimator=gdpo"],
        "algorithm.use_kl_in_reward",
        "gdpo compares the parts of the reward, and KL is none of them",
    ),
    (["rollout.name=scripted"], "rollout.name", "scripted answers come from no weights"),
    (
        ["trainer.weights.transport=disk"],
        "trainer.weights.transport",
        "disk, but the engine is in the policy's own process: nothing travels",
    ),
    (
        ["trainer.weights.transport=store", APART],
        "trainer.weights.transport",
        "store is Ray's, but cluster.backend is local",
    ),
    (
        ["trainer.weights.transport=shared", RAY],
        "trainer.weights.transport",
        "shared stays within one machine, but cluster.backend is ray",
    ),
    (
        ["trainer.weights.transport=collective", RAY, "trainer.n_gpus_per_node=1"],
        "trainer.weights.transport",
        "collective, but NCCL joins no two processes on one GPU, and rollout.nnodes is 0",
    ),
    (
        ["trainer.weights.directory=/somewhere", APART],
        "trainer.weights.directory",
        "is given, but weights take another way: shared",
    ),
    (
        ["trainer.weights.bucket_mb=8", RAY],
        "trainer.weights.bucket_mb",
        "is given, but weights do not travel in buckets: store",
    ),
    (
        [SHARDED, "trainer.n_gpus_per_node=2", "trainer.processes_per_node=2"],
        "trainer.processes_per_node",
        "2, but with 2 GPUs there is one for each",
    ),
    (
        ["trainer.mode=fully_async", "trainer.max_staleness=1", "trainer.parameter_sync_steps=3", *ASYNC],
        "trainer.parameter_sync_steps",
        "3, but with trainer.max_staleness 1 no sample of the same weights may train more than 2 steps",
    ),
    (
        ["trainer.mode=one_step_off", ASYNC[1]],
        "rollout.nnodes",
        "0, but trainer.mode one_step_off needs a rollout server of its own",
    ),
    (
        ["trainer.mode=fully_async", ASYNC[0]],
        "algorithm.rollout_correction.rollout_is",
        "trainer.mode fully_async trains on samples of older weights",
    ),
    (
        ["rollout.n_gpus_per_node=4"],
        "rollout.n_gpus_per_node",
        "4, but rollout.nnodes is 0, so the rollout shares the trainer's devices",
    ),
    (
        ["rollout.name=vllm", SHARDED, "trainer.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=8"],
        "rollout.tensor_model_parallel_size",
        "8 does not divide trainer.n_gpus_per_node 4",
    ),
    (["rollout.name=openai", "rollout.openai.base_url=http://a/v1"], "rollout.name", "an external endpoint cannot"),
    (["rollout.temperature=0"], "rollout.temperature", "0 samples greedily"),
    (["data.train_files=[]"], "data.train_files", "is empty: there is nothing to train on"),
    (
        ["data.val_files=[]", "trainer.test_freq=5"],
        "data.val_files",
        "is empty, but trainer.test_freq 5 asks for validation",
    ),
    (["data.val_files=[]", "trainer.val_only=true"], "data.val_files", "is empty, but trainer.val_only"),
    (["actor.ppo_mini_batch_size=128"], "actor.ppo_mini_batch_size", "128 is more than data.train_batch_size 64"),
    (
        ["actor.ppo_mini_batch_size=48"],
        "actor.ppo_mini_batch_size",
        "48 does not divide data.train_batch_size 64: 16 would be left over",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=48"],
        "critic.ppo_mini_batch_size",
        "48 does not divide data.train_batch_size 64",
    ),
    (
        ["actor._target_=treadle.config.FSDPActorConfig", "actor.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=8"],
        "actor.fsdp_config.fsdp_size",
        "3 does not divide 8 ranks",
    ),
    (
        ["ref._target_=treadle.config.FSDPRefConfig", "ref.fsdp_config.fsdp_size=0"],
        "ref.fsdp_config.fsdp_size",
        "0 does not divide 1 ranks",
    ),
    (
        ["rollout.response_length=20000"],
        "actor.ppo_max_token_len_per_gpu",
        "16384 holds no sequence of 20512 tokens",
    ),
    (
        ["actor.use_kl_loss=true", "ref.log_prob_max_token_len_per_gpu=1000"],
        "ref.log_prob_max_token_len_per_gpu",
        "1000 holds no sequence of 1024 tokens",
    ),
    (
        ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=1000"],
        "critic.ppo_max_token_len_per_gpu",
        "1000 holds no sequence of 1024 tokens",
    ),
    (["rollout.n=1"], "rollout.n", "1, but grpo compares the samples of one task"),
    (
        ["algorithm.filter_groups={enable: true, metric: acc}"],
        "algorithm.filter_groups.metric",
        "'acc' is not measured; there are reward",
    ),
    (["trainer.critic_warmup=5"], "trainer.critic_warmup", "5, but grpo has no critic to warm up"),
    (["actor.policy_loss.clip_cov_lb=6"], "actor.policy_loss.clip_cov_lb", "6 is not below clip_cov_ub 5"),
    (["checkpoint.resume_mode=resume_path"], "checkpoint.resume_from_path", "is needed by"),
    (["checkpoint.resume_from_path=a"], "checkpoint.resume_from_path", "is given, but checkpoint.resume_mode is auto"),
]


@pytest.mark.parametrize(("words", "key", "problem"), ROLLOUT_CLASHES)
def test_a_rollout_that_cannot_work_is_refused(words, key, problem):
    found = mistake(*words, text=ROLLOUT)
    assert found.key == key
    assert found.problem.startswith(problem)


CAUTIONS = [
    (["rollout.top_p=0.9"], "rollout.top_p: tokens are drawn from another distribution"),
    (["rollout.min_p=0.1"], "rollout.min_p: tokens are drawn from another distribution"),
    (
        ["rollout.repetition_penalty=1.1", "algorithm.rollout_correction.rollout_is=token"],
        "rollout.repetition_penalty: tokens",
    ),
    (
        ["actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=token-mean"],
        "actor.loss_agg_mode: token-mean weighs the KL term and the entropy bonus only",
    ),
    (
        ["actor.policy_loss.loss_mode=sapo", "actor.loss_agg_mode=seq-mean-token-sum"],
        "actor.loss_agg_mode: seq-mean-token-sum weighs",
    ),
    (["algorithm.adv_estimator=dr_grpo"], "actor.loss_agg_mode: token-mean, but dr_grpo sums tokens"),
    (["algorithm.adv_estimator=dpo"], "actor.loss_agg_mode: token-mean, but dpo is a loss of whole answers"),
    (["actor.use_kl_loss=true", "actor.kl_loss_type=k1"], "actor.kl_loss_type: k1's gradient is zero"),
    (
        ["algorithm.adv_estimator=ipo", "actor.loss_agg_mode=seq-mean-token-sum", "actor.ppo_epochs=2"],
        "actor.ppo_epochs: 2 makes 2 updates a step, but ipo takes its margins once, before the first",
    ),
    (
        [
            *("algorithm.adv_estimator=dpo", "actor.loss_agg_mode=seq-mean-token-sum"),
            *("data.train_batch_size=64", "actor.ppo_mini_batch_size=16"),
        ],
        "actor.ppo_mini_batch_size: 16 makes 4 updates a step, but dpo takes its margins once",
    ),
    (
        ["actor.use_kl_loss=true", "ref.sync_freq=1", "ref.sync_mix=0.01"],
        "ref.sync_mix: 0.01 of a difference is mostly less than bf16",
    ),
    (["actor.lora.r=8"], "actor.optim.lr: 1e-06 is the default for all parameters"),
]


@pytest.mark.parametrize(("words", "message"), CAUTIONS)
def test_what_is_perhaps_not_meant_is_warned_of(words, message):
    with pytest.warns(ConfigWarning) as caught:
        training_config(*words)
    (only,) = caught
    assert str(only.message).startswith(message) and "\n    from " in str(only.message)


@pytest.mark.parametrize(
    "words",
    [
        ["actor.policy_loss.loss_mode=gspo"],
        ["actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"],
        ["algorithm.adv_estimator=dr_grpo", "actor.loss_agg_mode=seq-mean-token-sum-norm"],
        ["algorithm.adv_estimator=ipo", "actor.loss_agg_mode=seq-mean-token-sum"],
        ["actor.kl_loss_type=k1"],
        ["actor.lora.r=8", "actor.optim.lr=1e-4"],
        ["actor.use_kl_loss=true", "actor.kl_loss_type=k1+"],
        ["actor.use_kl_loss=true", "ref.sync_freq=1", "ref.sync_mix=0.01", "ref.dtype=fp32"],
    ],
)
def test_what_is_meant_is_not(words, recwarn):
    training_config(*words)
    assert list(recwarn) == []


def test_every_caution_is_shown(monkeypatch):
    silent = set(TRAINING_CAUTIONS)
    for caution in TRAINING_CAUTIONS:
        monkeypatch.setattr(rules, "TRAINING_CAUTIONS", (caution,))
        for words, _ in CAUTIONS:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                training_config(*words)
            silent -= {caution} if caught else set()
    assert silent == set()


@pytest.mark.parametrize(("words", "key", "problem"), TRAINING_CLASHES)
def test_training_that_cannot_work_is_refused(words, key, problem):
    found = mistake(*words, text=TRAINING)
    assert found.key == key
    assert found.problem.startswith(problem)
    assert found.origin is not None


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["rollout.max_model_len=2048", "rollout.enable_chunked_prefill=false"],
        ["rollout.name=vllm", "rollout.n_gpus_per_node=8", "rollout.tensor_model_parallel_size=4"],
        ["rollout.replicas_per_node=4"],
        ["rollout.agent.default_agent_loop=my.module:Loop"],
        ["rollout.agent.default_agent_loop=mine", "rollout.agent.loops.mine.path=my.module:Loop"],
        ["rollout.agent.default_agent_loop=environment_agent", "rollout.multi_turn.environment=a:B"],
        ["rollout.multi_turn.mcp_servers.files.command=[a, b]"],
        ["rollout.agent.default_agent_loop=program_agent", "rollout.agent.loops.program_agent.kwargs={argv: [a]}"],
        ["rollout.gateway={host: 0.0.0.0, url: 'http://172.17.0.1:{port}'}"],
        ["cluster={backend: ray, address: auto}"],
        ["rollout.temperature=0"],
    ],
)
def test_a_rollout_that_works_is_not(words):
    rollout_config(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.mode=one_step_off", *ASYNC],
        [
            "trainer.mode=fully_async",
            "trainer.max_staleness=0",
            "rollout.nnodes=2",
            RAY,
            ASYNC[1].replace("token", "none"),
        ],
        ["rollout.n=1", "algorithm.adv_estimator=remax"],
        ["rollout.n=1", "algorithm.adv_estimator=my.module:advantage"],
        ["algorithm.adv_estimator=gae", "trainer.critic_warmup=5"],
        ["algorithm.adv_estimator=my.module:advantage", "trainer.critic_warmup=5"],
        ["data.train_files=[]", "trainer.val_only=true"],
        ["data.val_files=[]"],
        ["critic.ppo_mini_batch_size=48"],
        ["ref.log_prob_max_token_len_per_gpu=1"],
        ["reward.functions.acc.path=math", "algorithm.filter_groups={enable: true, metric: acc}"],
        ["checkpoint={resume_mode: resume_path, resume_from_path: a}"],
        ["rollout.max_model_len=30000"],
        [SHARDED, "trainer.n_gpus_per_node=2"],
        [NO_REWARD, *ENVIRONMENT, "reward.environment_weight=1"],
        [NO_REWARD, *TOOLS, "reward.tools_weight=0.5"],
        [NO_REWARD, "rollout.agent.default_agent_loop=my.module:Loop", "reward.environment_weight=1"],
        [NO_REWARD, "trainer.val_only=true"],
        ["algorithm.filter_groups={enable: true, metric: environment}"],
        [KL_COV, "actor.ppo_epochs=2"],
        [KL_COV, "actor.ppo_mini_batch_size=32"],
        [KL_COV, "algorithm.rollout_correction.bypass_mode=true"],
        [GEOMETRIC],
        [GEOMETRIC, f"{BOUND}=1.01", f"{BOUND}_lower=0.98"],
        ["algorithm.rollout_correction.rollout_rs=sequence", f"{BOUND}=5"],
        ["actor.clip_ratio_high=4", "actor.clip_ratio_c=null"],
        ["actor.clip_ratio_high=4", "actor.policy_loss.loss_mode=cispo"],
        ["ref.sync_freq=10", "actor.use_kl_loss=true"],
    ],
)
def test_training_that_works_is_not(words):
    training_config(*words)


def test_every_rule_is_shown_by_a_clash(monkeypatch):
    fired = set()

    def recorded(rule):
        def ask(config):
            for clash in rule(config):
                fired.add(rule)
                yield clash

        return ask

    monkeypatch.setattr(rules, "ROLLOUT_RULES", tuple(map(recorded, ROLLOUT_RULES)))
    monkeypatch.setattr(rules, "TRAINING_RULES", tuple(map(recorded, TRAINING_RULES)))
    for text, cases in ((ROLLOUT, ROLLOUT_CLASHES), (TRAINING, TRAINING_CLASHES)):
        for words, _, _ in cases:
            mistakes(*words, text=text)
    assert fired == {*ROLLOUT_RULES, *TRAINING_RULES}


def test_a_config_built_in_code_is_held_to_the_same_rules():
    config = TrainConfig(model=ModelConfig(path="x"), rollout=RolloutConfig(n=1))
    assert {item.key for item in check_rules(config)} == {"rollout.n", "data.train_files", "reward.functions"}


def test_what_only_the_runtime_used_to_refuse_comes_together_and_at_load():
    words = ["trainer.nnodes=2", "actor.use_kl_loss=true", "algorithm.adv_estimator=gae", "rollout.replicas_per_node=3"]
    found = {item.key: item for item in mistakes(*words, text=TRAINING)}
    networks = {"actor._target_", "ref._target_", "critic._target_"}
    assert set(found) == {"trainer.nnodes", "rollout.replicas_per_node", *networks}
    assert found["ref._target_"].value == "RefConfig"
    assert found["ref._target_"].fix == "set ref._target_=treadle.config.FSDPRefConfig"


def test_several_clashes_come_together():
    keys = {item.key for item in mistakes("trainer.mode=fully_async", "rollout.n=1", text=TRAINING)}
    assert keys == {"rollout.nnodes", "algorithm.rollout_correction.rollout_is", "rollout.n"}


@pytest.mark.parametrize(
    "look",
    [
        lambda value: value == 1,
        lambda value: value < 1,
        lambda value: 8 % value,
        lambda value: value * 2,
        lambda value: max(1, value),
        lambda value: bool(value),
        lambda value: f"{value:g}",
        lambda value: value in {1},
        lambda value: list(value),
        lambda value: value.items(),
        lambda value: 1 in value,
    ],
)
def test_whoever_looks_at_an_unknown_value_stops(look):
    with pytest.raises(UnknownValueRead):
        look(UNKNOWN)


def test_the_least_a_training_run_needs_to_say():
    reward = "reward: {functions: {answer: {path: exact_match}}}"
    loads(f"model: {{path: x}}\ndata: {{train_files: a}}\nrollout: {{n: 2}}\n{reward}\ntrainer: {{}}\n")
