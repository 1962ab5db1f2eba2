"""Whole verl configs become configs of ours, with a report that leaves out no key."""

import json
from pathlib import Path

import pytest

from treadle.config import ConfigWarning, TrainConfig, loads
from treadle.config.training import SEQUENCE_MEAN_LOSSES
from treadle.errors import ConfigError
from treadle.migrate.migration import migrate
from treadle.migrate.report import MigratedKey, Migration

REWARD = "reward.functions.extra.path=exact_match"
"""A script that leaves scores to verl's table of data sources names no reward, and a run needs one."""

GOLDEN = Path(__file__).parent.parent / "golden"
START = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"


def migrate_text(folder: Path, text: str, name: str = "old.yaml") -> Migration:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return migrate(path)


def entry(migration: Migration, old: str) -> MigratedKey:
    (found,) = [item for item in migration.entries if item.old == old]
    return found


def load(migration: Migration, *words: str) -> TrainConfig:
    config = loads(migration.yaml, overrides=words if "\nreward:" in migration.yaml else (*words, REWARD))
    assert isinstance(config, TrainConfig)
    return config


def test_the_grpo_script_trains_as_it_did() -> None:
    migration = migrate(GOLDEN / "verl_grpo.sh")
    config = load(migration)
    assert config.model.path == "Qwen/Qwen3-8B"
    assert config.data.train_files == ("~/data/gsm8k/train.parquet",)
    assert (config.rollout.name, config.rollout.n, config.rollout.overlong_prompts) == ("vllm", 5, "drop")
    assert config.actor.ppo_max_token_len_per_gpu == 8 * (512 + 1024)
    assert (config.actor.kl_loss_type, config.algorithm.adv_estimator) == ("k3", "grpo")
    assert (config.trainer.mode, config.trainer.n_gpus_per_node, config.checkpoint.save_freq) == ("sync", 8, 20)
    assert [item.old for item in migration.entries if item.kind == "none"] == [
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ]
    assert migration.exit_status == 3


SCRIPT = """python3 -m verl.trainer.main_ppo \\
    data.train_files=a.parquet data.val_files=b.parquet \\
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 """


def migrated(tmp_path: Path, words: str) -> TrainConfig:
    (tmp_path / "run.sh").write_text(SCRIPT + words + "\n")
    return load(migrate(tmp_path / "run.sh"))


def test_the_kl_term_of_a_verl_run_keeps_its_gradient(tmp_path: Path) -> None:
    """verl assumes low_var_kl with its own gradient; here the default is k3+."""
    assert migrated(tmp_path, "actor_rollout_ref.actor.use_kl_loss=True").actor.kl_loss_type == "k3"


def test_gspo_of_a_verl_run_is_a_mean_over_sequences_and_warns_of_another_aggregation(tmp_path: Path) -> None:
    gspo = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    assert migrated(tmp_path, gspo).actor.policy_loss.loss_mode in SEQUENCE_MEAN_LOSSES
    with pytest.warns(ConfigWarning, match="gspo is a mean over sequences"):
        migrated(tmp_path, f"{gspo} actor_rollout_ref.actor.loss_agg_mode=token-mean")


def test_the_tool_script_says_what_it_cannot_tell() -> None:
    script = GOLDEN / "verl_tools.sh"
    with pytest.raises(ConfigError, match=r"data.val_files: is \?\?\?"):
        load(migrate(script))
    migration = migrate(script, {"VAL_FILE": "val.parquet"})
    assert "    tools: ???  # config/tools.yaml is not read: see below" in migration.yaml.splitlines()
    config = load(migration, "rollout.multi_turn.tools=[mine.tools:search]")
    assert config.rollout.prompt_length == 2048 and config.rollout.response_length == 8192
    assert config.actor.ppo_max_token_len_per_gpu == 20480
    assert config.reward.functions["custom"].path == "recipe/agents/reward.py:score"
    assert config.model.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.rollout.val_kwargs.temperature == 0.0
    assert config.data.val_files == ("val.parquet",)
    undecided = migrate(script)
    assert "$VAL_FILE has no value" in entry(undecided, "data.val_files").reason
    assert "  val_files: ???  # line 17: $VAL_FILE has no value in the script" in undecided.yaml.splitlines()
    assert "would have to be run" in entry(migration, "trainer.experiment_name").reason
    assert "swanlab" in entry(migration, "trainer.logger").reason
    assert config.logging.logger == ("console",), "a refused value is not replaced by verl's default"
    assert any("$NNODES is not set" in note and "'2'" in note for note in migration.notes)


def test_a_script_that_names_no_reward_is_scored_by_data_source(tmp_path: Path) -> None:
    script = f"{START} actor_rollout_ref.rollout.n=2 algorithm.adv_estimator=grpo"
    assert load(migrate_text(tmp_path, script, "run.sh")).reward.functions["by_source"].path == "by_source"
    own = f"{script} custom_reward_function.path=/data/score.py custom_reward_function.name=judge"
    functions = load(migrate_text(tmp_path, own, "own.sh")).reward.functions
    assert {name: function.path for name, function in functions.items()} == {"custom": "/data/score.py:judge"}


def test_an_engine_and_a_backend_that_are_not_here_have_stand_ins_that_the_report_names(tmp_path: Path) -> None:
    script = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.name=sglang"
        " actor_rollout_ref.actor.strategy=megatron"
    )
    migration = migrate_text(tmp_path, script, "run.sh")
    config = load(migration)
    assert config.rollout.name == "vllm" and type(config.actor).__name__ == "FSDPActorConfig"
    assert migration.exit_status == 3 and "no SGLang" in entry(migration, "actor_rollout_ref.rollout.name").reason


def test_a_path_to_resume_from_is_left_out_where_verl_would_not_read_it(tmp_path: Path) -> None:
    script = f"{START} actor_rollout_ref.rollout.n=2 trainer.resume_from_path=x"
    assert load(migrate_text(tmp_path, script, "run.sh")).checkpoint.resume_from_path is None
    config = load(migrate_text(tmp_path, f"{script} trainer.resume_mode=resume_path", "run.sh"))
    assert config.checkpoint.resume_from_path == "x"


def test_sequence_parallelism_leaves_micro_batches_as_large_as_they_were(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    script = (
        f"{START} {actor}.use_dynamic_bsz=True {actor}.ppo_max_token_len_per_gpu=1000"
        f" {actor}.ulysses_sequence_parallel_size=4 data.max_prompt_length=900 data.max_response_length=900"
    )
    assert load(migrate_text(tmp_path, script, "run.sh")).actor.ppo_max_token_len_per_gpu == 4000


def test_the_asynchronous_script_migrates_without_loss() -> None:
    migration = migrate(GOLDEN / "verl_fully_async.sh")
    config = load(migration)
    assert migration.exit_status == 0
    assert (config.trainer.mode, config.trainer.max_staleness, config.trainer.parameter_sync_steps) == (
        "fully_async",
        5,
        4,
    )
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (64, 800)
    assert (config.rollout.nnodes, config.rollout.n_gpus_per_node, config.trainer.n_gpus_per_node) == (1, 4, 4)
    assert config.algorithm.rollout_correction.bypass_mode is True


def test_what_a_script_leaves_to_verl_is_written_down(tmp_path: Path) -> None:
    migration = migrate_text(
        tmp_path, "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm\n", "run.sh"
    )
    config = load(migration)
    assert (config.algorithm.adv_estimator, config.data.train_batch_size) == ("gae", 1024)
    assert config.critic.path == "~/models/deepseek-llm-7b-chat"
    assert "  total_epochs: 30  # verl's default" in migration.yaml.splitlines()
    assert "ref:" not in migration.yaml.splitlines(), "nothing reads the reference policy in this run"
    assert migration.exit_status == 0


def test_verls_clip_bounds_win_over_a_clip_ratio_as_they_do_in_verl(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ratio=0.1"
    script += " actor_rollout_ref.rollout.name=vllm\n"
    config = load(migrate_text(tmp_path, script, "run.sh"))
    assert (config.actor.clip_ratio, config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.1, 0.2, 0.2)


def test_a_file_on_top_of_verls_defaults_gets_them_too(tmp_path: Path) -> None:
    migration = migrate_text(tmp_path, "defaults:\n  - ppo_trainer\n  - _self_\nalgorithm:\n  adv_estimator: grpo\n")
    assert load_grpo(migration).data.train_batch_size == 1024
    assert entry(migration, "defaults").kind == "mapped"


def test_a_copy_of_verls_own_file_gets_them_too(tmp_path: Path) -> None:
    groups = "defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n  - data@data: legacy_data\n  - _self_\n"
    migration = migrate_text(tmp_path, f"{groups}algorithm: {{adv_estimator: grpo}}\n")
    assert load_grpo(migration).trainer.n_gpus_per_node == 8
    mine = migrate_text(tmp_path, "defaults: [ppo_trainer, mine, _self_]\ntrainer: {nnodes: 2}\n")
    assert "mine" in entry(mine, "defaults").reason and mine.exit_status == 3


def load_grpo(migration: Migration) -> TrainConfig:
    config = loads(migration.yaml, overrides=["rollout.n=4", "rollout.name=vllm", REWARD])
    assert isinstance(config, TrainConfig)
    return config


def test_a_file_that_says_everything_gets_nothing_added(tmp_path: Path) -> None:
    migration = migrate_text(tmp_path, "actor_rollout_ref: {model: {path: m}}\ntrainer: {nnodes: 1}\n")
    assert migration.yaml.splitlines()[1:] == ["model:", "  path: m", "trainer:", "  nnodes: 1"]


def test_a_file_of_a_config_group_stands_where_verl_mounts_it(tmp_path: Path) -> None:
    migration = migrate_text(tmp_path, "ppo_epochs: 2\nkl_loss_type: mse\n", "actor/mine.yaml")
    assert migration.yaml.splitlines()[1:] == ["actor:", "  ppo_epochs: 2", "  kl_loss_type: k2"]


def test_the_file_a_script_chooses_is_read_where_it_can_be_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 32}\n")
    start = (
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name={} actor_rollout_ref.actor.ppo_epochs=2"
    )
    found = migrate_text(tmp_path, start.format("mine"), "run.sh")
    assert entry(found, "data.train_batch_size").place.endswith("mine.yaml:2")
    assert (
        load(
            migrate_text(
                tmp_path,
                start.format("mine") + " data.train_batch_size=512 actor_rollout_ref.rollout.name=vllm",
                "b.sh",
            )
        ).data.train_batch_size
        == 512
    )
    lost = migrate_text(tmp_path, start.format("elsewhere"), "run.sh")
    assert entry(lost, "--config-name").kind == "none" and lost.exit_status == 3


def test_later_words_of_a_script_win_and_tilde_takes_back(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo trainer.nnodes=2 trainer.nnodes=4 ~trainer.logger"
    script += " actor_rollout_ref.rollout.name=vllm\n"
    migration = migrate_text(tmp_path, script, "run.sh")
    assert load(migration).trainer.nnodes == 4
    assert load(migration).logging.logger == ("console",)
    assert "taken back" in entry(migration, "trainer.logger").reason


def test_values_our_keys_do_not_accept_are_reported_and_left_out(tmp_path: Path) -> None:
    migration = migrate_text(tmp_path, "actor_rollout_ref: {rollout: {n: 0, top_p: 2}}\ntrainer: {}\n")
    assert "rollout.n must be ≥ 1" in entry(migration, "actor_rollout_ref.rollout.n").reason
    assert "top_p must be" in entry(migration, "actor_rollout_ref.rollout.top_p").reason
    assert migration.yaml.splitlines()[1:3] == ["trainer: {}", ""]
    left_out = migration.yaml.splitlines()[3:]
    assert left_out[0] == "# Left out, and why:"
    assert left_out[1].startswith("#   actor_rollout_ref.rollout.n: 0  # rollout.n must be ≥ 1")


def test_keys_that_disagree_are_reported_and_the_first_is_kept(tmp_path: Path) -> None:
    text = "data: {max_prompt_length: 64}\nactor_rollout_ref: {rollout: {prompt_length: 65}}\n"
    migration = migrate_text(tmp_path, text)
    assert "  prompt_length: 64" in migration.yaml.splitlines()
    assert "another value already" in entry(migration, "actor_rollout_ref.rollout.prompt_length").reason


def test_every_key_of_the_source_has_exactly_one_entry(tmp_path: Path) -> None:
    text = (
        "trainer: {nnodes: 1, device: cuda, save_freq: 3}\nglobal_profiler: {tool: null, steps: null}\nmy: {own: 1}\n"
    )
    migration = migrate_text(tmp_path, text)
    kinds = {item.old: item.kind for item in migration.entries}
    assert kinds == {
        "trainer.nnodes": "same",
        "trainer.device": "mapped",
        "trainer.save_freq": "mapped",
        "global_profiler.tool": "mapped",
        "global_profiler.steps": "mapped",
        "my.own": "none",
    }
    assert len(migration.entries) == 6


def test_the_report_for_machines_has_everything(tmp_path: Path) -> None:
    migration = migrate_text(tmp_path, "actor_rollout_ref: {rollout: {n: 4, name: sglang}}\n")
    found = json.loads(migration.to_json())
    assert found["status"] == 3 and found["counts"] == {"mapped": 1, "same": 0, "none": 1}
    assert found["keys"][0] == {
        "old": "actor_rollout_ref.rollout.n",
        "kind": "mapped",
        "new": ["rollout.n"],
        "before": 4,
        "after": 4,
        "reason": "",
        "place": f"{tmp_path}/old.yaml:1",
    }


def test_the_report_for_people_starts_with_what_is_lost(tmp_path: Path) -> None:
    report = migrate_text(tmp_path, "actor_rollout_ref: {rollout: {n: 4, name: sglang}}\n").report()
    assert report.startswith("none    actor_rollout_ref.rollout.name = sglang")
    assert report.endswith("1 mapped, 0 same, 1 none")


def test_a_number_is_text_where_a_key_holds_text(tmp_path: Path) -> None:
    migration = migrate_text(tmp_path, "trainer: {project_name: 007, experiment_name: 20250101}\n")
    assert migration.yaml.splitlines()[2:] == ["  project_name: '007'", "  experiment_name: '20250101'"]


def test_strings_that_look_like_other_types_stay_strings(tmp_path: Path) -> None:
    migration = migrate_text(
        tmp_path, "actor_rollout_ref: {model: {path: '007'}}\ntrainer: {project_name: 'true', nnodes: 1}\n"
    )
    config = loads(migration.yaml, overrides=["data.train_files=a.jsonl", "rollout.n=2", REWARD])
    assert (config.model.path, config.logging.project_name) == ("007", "true")
    assert '"1e-3"' in migrate_text(tmp_path, "trainer: {project_name: '1e-3'}\n").yaml.replace("'", '"')


@pytest.mark.parametrize(
    ("name", "text"), [("run.sh", "echo nothing\n"), ("old.yaml", "a: [1\n"), ("old.yaml", "- 1\n")]
)
def test_a_source_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        migrate_text(tmp_path, text, name)


@pytest.mark.parametrize("name", ["none.yaml", "none.sh"])
def test_a_source_that_is_not_there_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate(tmp_path / name)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline_is_kept_and_its_differences_are_said(tmp_path: Path, name: str) -> None:
    words = f"algorithm.adv_estimator={name} actor_rollout_ref.actor.calculate_sum_pi_squared=true"
    script = tmp_path / "run.sh"
    script.write_text(f"{START} actor_rollout_ref.rollout.n=8 {words}\n", encoding="utf-8")
    migration = migrate(script)
    assert load(migration).algorithm.adv_estimator == "optimal_token_baseline"
    (entry,) = [item for item in migration.entries if item.old == "algorithm.adv_estimator"]
    assert "sampled tokens" in str(entry) or "longest sample" in str(entry)
