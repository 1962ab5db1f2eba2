"""`data`: the same section here; lengths and chat templates moved to the sections that use them."""

from typing import Any

from treadle.config.legacy.conversion import unless_null, words
from treadle.config.legacy.rule import (
    Answer,
    Look,
    Nothing,
    Refused,
    Rules,
    Said,
    asked,
    fixed,
    ignored,
    kept,
    none,
    nones,
    same,
    to,
    under,
)
from treadle.config.legacy.rules.rollout import TOOLS

VISION = "Tasks are text: there are no images, videos or sounds."
FINE_TUNING = "There is no supervised fine-tuning; train with rewards, or bring a model that is already tuned."
STORED = "Responses that are already written cannot be scored by a command: `treadle eval` samples and scores."
DATASET = "Write the tasks as JSONL or Parquet and list the files, or name a generator in data.train_files."

_cut = words(
    {
        "error": "error",
        "left": Said("truncate_left", "left is written truncate_left"),
        "right": Said("truncate_right", "right is written truncate_right"),
        "middle": Said("truncate_middle", "middle is written truncate_middle"),
    },
    "A prompt that is too long is an error, dropped, or cut at the left, right or middle.",
)


def _drop(value: Any, look: Look) -> Answer:
    if value is True:
        return Said("drop", "filtering is written drop")
    return Nothing("data.truncation says what happens")


def _cut_unless_dropped(value: Any, look: Look) -> Answer:
    if look("data.filter_overlong_prompts") is True:
        return Nothing("prompts that are too long are dropped before they could be cut")
    return _cut(value, look)


def _batch(value: Any, look: Look) -> Answer:
    if value == 0:
        return Nothing("0 means ppo_mini_batch_size × async_training.require_batches")
    return Said(value)


def _fetched_at_once(value: Any, look: Look) -> Answer:
    if value is None or value == 1 or value == look("data.train_batch_size"):
        return Nothing("tasks are taken as sessions become free")
    return Refused(
        "Tasks are taken as sessions become free; dynamic sampling is bounded by filter_groups: leave it out."
    )


RULES: Rules = kept("data", "train_max_samples val_max_samples prompt_key reward_fn_key shuffle") | under(
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
            convert=lambda value, look: Said(True) if value is True else Nothing("model.trust_remote_code counts"),
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
RULES |= nones("data", "image_key video_key audio_key image_patch_size return_multi_modal_inputs", VISION)
RULES |= nones(
    "data",
    "micro_batch_size_per_gpu max_token_len_per_gpu use_dynamic_bsz messages_key tools_key enable_thinking_key"
    " enable_thinking_default pad_mode max_length balance_dp_token num_workers ignore_input_ids_mismatch",
    FINE_TUNING,
)
RULES |= nones("data", "path response_key data_source_key reward_model_key", STORED)
