"""The `data` section: where tasks come from and in which order."""

from treadle.config.section import Options, Section, Strings, key


class DataConfig(Section):
    """Tasks for training and validation: JSONL or Parquet files, `reasoning_gym:NAME`, or `package.module:function`."""

    train_files: Strings = key((), "task files, generators or functions to train on or roll out, read in this order")
    val_files: Strings = key((), "task files, generators or functions to validate on")
    train_max_samples: int = key(-1, "use at most this many training tasks; -1 for all", ge=-1)
    val_max_samples: int = key(-1, "use at most this many validation tasks; -1 for all", ge=-1)
    train_batch_size: int = key(64, "tasks per training step", ge=1)
    prompt_key: str = key("prompt", "field of a row that holds the prompt, as text or as chat messages")
    answer_key: str = key("answer", "field of a row that holds the ground truth")
    reward_fn_key: str = key("data_source", "field of a row that says which data set it belongs to")
    shuffle: bool = key(True, "draw training tasks in a random order, fixed by the seed")
    max_n: int = key(1024, "most samples that a row may ask for by its own `n`", ge=1)
    seed: int = key(42, "seed of that order", ge=0)
    source_kwargs: Options = key({}, "arguments for task generators, by dataset or function name")
