#!/usr/bin/env bash
# A tool agent in the style of verl's recipes: arithmetic, arrays, a Ray job.
set -xeuo pipefail

project_name='agents'
exp_name="tools-$(date +%m%d)"
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
sp_size=1
infer_tokens=$(((max_prompt_length + max_response_length) * 2 / sp_size))
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
CKPTS_DIR=${CKPTS_DIR:-"${DATA_HOME}/ckpts/${project_name}"}
NNODES=${NNODES:-2}

DATA=(
    data.train_files="['$DATA_HOME/a.parquet', '$DATA_HOME/b.parquet']"  # two files
    data.val_files="$VAL_FILE"
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.return_raw_chat=True
    +data.apply_chat_template_kwargs.enable_thinking=False
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
    actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8
    actor_rollout_ref.rollout.multi_turn.tool_config_path=config/tools.yaml
    actor_rollout_ref.rollout.val_kwargs.do_sample=False
    actor_rollout_ref.rollout.response_length='${data.max_response_length}'
    +actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=1
)

ray job submit --no-wait -- python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" "${ROLLOUT[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.kl_ctrl.kl_coef=0.0 \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${infer_tokens} \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    custom_reward_function.path=recipe/agents/reward.py \
    custom_reward_function.name=score \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="${exp_name}" \
    trainer.default_local_dir="${CKPTS_DIR}" \
    trainer.nnodes="${NNODES}" \
    trainer.logger="['console','swanlab']" \
    trainer.total_training_steps=200 2>&1 | tee run.log
