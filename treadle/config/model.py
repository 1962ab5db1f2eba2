"""The `model` section: which weights and tokenizer, and how the chat template is applied."""

from treadle.config.section import REQUIRED, Options, Section, key


class ModelConfig(Section):
    """A Hugging Face model directory and everything that says how to read it."""

    path: str = key(REQUIRED, "Hugging Face model directory, or the name of a bundled model")
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
    prove: bool = key(
        True, "compare a small model of the same kind with its own forward first, and refuse one that differs"
    )
    enable_gradient_checkpointing: bool = key(True, "recompute activations in backward instead of storing them")
