"""Options of the model, its tokenizer and its texts."""

from __future__ import annotations

from typing import Annotated, Any

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Integer, Option, OptionGroup, Text

KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")

_GROUP = "Model and tokenizer"


class ModelOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Model and tokenizer"."""

    model_path: Annotated[
        Text, Option(_GROUP, "Model directory, Hugging Face repository id, or 'demo'.", aliases=("model",))
    ] = None
    tokenizer_path: Annotated[Text, Option(_GROUP, "Tokenizer directory; default: the model path.")] = None
    skip_tokenizer_init: Annotated[
        bool, Option(_GROUP, "Load no tokenizer: requests carry input_ids and get output_ids.")
    ] = False
    served_model_name: Annotated[Text, Option(_GROUP, "Name in /v1/models; default: the model path.")] = None
    revision: Annotated[Text, Option(_GROUP, "Revision of a Hugging Face repository.")] = None
    weight_version: Annotated[str, Option(_GROUP, "Version text of the weights, reported in replies.")] = "default"
    json_model_override_args: Annotated[
        dict[str, Any] | None,
        Option(_GROUP, "JSON object whose keys replace those of the model's config.json.", convert=values.json_object),
    ] = None
    context_length: Annotated[
        Integer,
        Option(
            _GROUP, "Longest sequence; default: the model's.", convert=values.human_integer, minimum=1, maximum=2**24
        ),
    ] = None
    dtype: Annotated[str, Option(_GROUP, "Weights and activations; auto is float32 on CPU.", choices=DTYPES)] = "auto"
    kv_cache_dtype: Annotated[
        str, Option(_GROUP, "Elements of the KV pool.", choices=KV_CACHE_DTYPES, convert=values.lower_text)
    ] = "auto"
    chat_template: Annotated[
        Text, Option(_GROUP, "File with a jinja2 chat template (or its text) to use instead of the model's.")
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None, Option(_GROUP, "JSON object of chat template variables.", convert=values.json_object)
    ] = None
    grammar_backend: Annotated[
        Text,
        Option(
            _GROUP,
            "Library of constrained outputs (pip install sglang-lite[grammar]); default: the first one installed.",
            choices=("xgrammar", "llguidance", "none"),
        ),
    ] = None
    tool_call_parser: Annotated[
        Text,
        Option(_GROUP, "Format of the model's tool calls: hermes, qwen3_coder, llama3, ...; auto: by the template."),
    ] = None
    reasoning_parser: Annotated[
        Text, Option(_GROUP, "Format of the model's reasoning: deepseek-r1, qwen3, ...; auto: by the template.")
    ] = None
    sampling_defaults: Annotated[
        str,
        Option(_GROUP, "Default sampling: from generation_config.json or OpenAI's.", choices=("model", "openai")),
    ] = "model"
    preferred_sampling_params: Annotated[
        dict[str, Any] | None,
        Option(_GROUP, "JSON object merged under every request's sampling parameters.", convert=values.json_object),
    ] = None

    @property
    def public_name(self) -> str:
        """Name of the model in the API: ``served_model_name``, else the model path."""
        return self.served_model_name or self.model_path or ""

    @property
    def effective_tokenizer_path(self) -> str:
        """Where the tokenizer lies: ``tokenizer_path``, else the model path."""
        return self.tokenizer_path or self.model_path or ""
