#!/usr/bin/env bash
# verl's fully asynchronous recipe.
NNODES=1; NGPUS=4
rollout_gpus=$((8 - NGPUS))
train_bsz=0
mini=32

PYTHONUNBUFFERED=1 python -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path=config --config-name='fully_async_ppo_trainer.yaml' \
    data.train_files=data/train.jsonl data.val_files=data/val.jsonl \
    data.train_batch_size=${train_bsz} data.gen_batch_size=1 \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token \
    rollout.nnodes=$NNODES rollout.n_gpus_per_node=$rollout_gpus \
    rollout.total_rollout_steps=$((512 * 100)) \
    async_training.staleness_threshold=0.5 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=2 \
    async_training.partial_rollout=True \
    trainer.nnodes=$NNODES trainer.n_gpus_per_node=$NGPUS
