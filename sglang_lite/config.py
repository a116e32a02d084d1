"""``ServerConfig``: every option of the server, typed, with its flag, default and meaning in one place.

The command line, the environment (``SGLANG_LITE_PORT``), a YAML file (``--config``), ``--help`` and
``/server_info`` are all made from this class, so they cannot drift apart. ``configuration.loading`` builds one from
those sources; a program builds one directly: ``ServerConfig(model_path="demo", device="cpu")``.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Option, OptionSpec

DEVICES = ("auto", "cpu", "cuda", "metal", "rocm", "musa", "xpu", "npu", "hpu")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
LOAD_BALANCE_METHODS = ("auto", "follow_bootstrap_room", "round_robin", "total_requests", "total_tokens")
TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp", "nixl", "ascend", "mori")
LORA_TARGET_MODULES = (
    "all",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

DEFAULT_RESERVED_SLOTS = 512
"""Token slots of the pool in a prefill/decode mode when ``--num-reserved-decode-tokens`` is not set."""

DEFAULT_DRAFT_TOKENS = 8
"""Tokens of a request verified in one step, its newest one included, when guesses cost nothing (NGRAM)."""

DEFAULT_DRAFT_STEPS = 3
"""Tokens that a draft model guesses for a request in one step."""

_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "tenants")

_MODEL = "Model and tokenizer"
_HTTP = "HTTP server"
_GRPC = "gRPC"
_MEMORY = "Memory and scheduling"
_DEVICE = "Devices and parallelism"
_LORA = "Low-rank adapters"
_PD = "Prefill/decode disaggregation"
_OBSERVE = "Observability"

Text = str | None
Integer = int | None
Number = float | None


class ServerConfig(BaseModel):
    """All options of a server. ``None`` means that the value is decided later (model, memory or mode).

    Frozen: ``resolved()`` returns a changed copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    # Model and tokenizer
    model_path: Annotated[
        Text, Option(_MODEL, "Model directory, Hugging Face repository id, or 'demo'.", aliases=("model",))
    ] = None
    tokenizer_path: Annotated[Text, Option(_MODEL, "Tokenizer directory; default: the model path.")] = None
    skip_tokenizer_init: Annotated[
        bool, Option(_MODEL, "Load no tokenizer: requests carry input_ids and get output_ids.")
    ] = False
    served_model_name: Annotated[Text, Option(_MODEL, "Name in /v1/models; default: the model path.")] = None
    revision: Annotated[Text, Option(_MODEL, "Revision of a Hugging Face repository.")] = None
    weight_version: Annotated[str, Option(_MODEL, "Version text of the weights, reported in replies.")] = "default"
    json_model_override_args: Annotated[
        dict[str, Any] | None,
        Option(_MODEL, "JSON object whose keys replace those of the model's config.json.", convert=values.json_object),
    ] = None
    context_length: Annotated[
        Integer,
        Option(
            _MODEL, "Longest sequence; default: the model's.", convert=values.human_integer, minimum=1, maximum=2**24
        ),
    ] = None
    dtype: Annotated[str, Option(_MODEL, "Weights and activations; auto is float32 on CPU.", choices=DTYPES)] = "auto"
    kv_cache_dtype: Annotated[
        str, Option(_MODEL, "Elements of the KV pool.", choices=KV_CACHE_DTYPES, convert=values.lower_text)
    ] = "auto"
    chat_template: Annotated[
        Text, Option(_MODEL, "File with a jinja2 chat template (or its text) to use instead of the model's.")
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None, Option(_MODEL, "JSON object of chat template variables.", convert=values.json_object)
    ] = None
    grammar_backend: Annotated[
        Text,
        Option(
            _MODEL,
            "Library of constrained outputs (pip install sglang-lite[grammar]); default: the first one installed.",
            choices=("xgrammar", "llguidance", "none"),
        ),
    ] = None
    tool_call_parser: Annotated[
        Text,
        Option(_MODEL, "Format of the model's tool calls: hermes, qwen3_coder, llama3, ...; auto: by the template."),
    ] = None
    reasoning_parser: Annotated[
        Text, Option(_MODEL, "Format of the model's reasoning: deepseek-r1, qwen3, ...; auto: by the template.")
    ] = None
    sampling_defaults: Annotated[
        str,
        Option(_MODEL, "Default sampling: from generation_config.json or OpenAI's.", choices=("model", "openai")),
    ] = "model"
    preferred_sampling_params: Annotated[
        dict[str, Any] | None,
        Option(_MODEL, "JSON object merged under every request's sampling parameters.", convert=values.json_object),
    ] = None

    # HTTP server
    host: Annotated[str, Option(_HTTP, "Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Option(_HTTP, "Port to bind.", convert=values.port, minimum=0, maximum=65535)] = 30000
    api_key: Annotated[Text, Option(_HTTP, "Bearer key of the normal endpoints.")] = None
    admin_api_key: Annotated[Text, Option(_HTTP, "Bearer key of the administration endpoints.")] = None
    ssl_keyfile: Annotated[Text, Option(_HTTP, "PEM file with the key of the certificate; serves HTTPS.")] = None
    ssl_certfile: Annotated[Text, Option(_HTTP, "PEM file with the certificate and its chain.")] = None
    ssl_ca_certs: Annotated[
        Text, Option(_HTTP, "PEM file with authorities; certificates that clients present are checked against them.")
    ] = None
    ssl_keyfile_password: Annotated[Text, Option(_HTTP, "Password of the key.")] = None
    enable_ssl_refresh: Annotated[
        bool, Option(_HTTP, "Read the TLS files again when they change; SIGHUP does it at any time.")
    ] = False
    enable_response_store: Annotated[
        bool, Option(_HTTP, "Keep responses of /v1/responses in memory, to be looked up, continued and cancelled.")
    ] = False
    max_concurrent_requests: Annotated[
        int,
        Option(
            _HTTP,
            "Most generation requests in the server at once; more are answered with 503 before their body is read.",
            convert=values.integer,
            minimum=1,
        ),
    ] = 16384
    tokenizer_worker_num: Annotated[
        int,
        Option(
            _HTTP,
            "Front processes that share the port; one serves some thousand streamed tokens a second.",
            convert=values.integer,
            minimum=1,
            maximum=64,
        ),
    ] = 1
    skip_server_warmup: Annotated[bool, Option(_HTTP, "Report ready without a generation of its own first.")] = False
    allow_auto_truncate: Annotated[bool, Option(_HTTP, "Cut over-long prompts instead of answering 400.")] = False
    stream_interval: Annotated[
        int, Option(_HTTP, "Send a stream chunk every N tokens.", convert=values.integer, minimum=1)
    ] = 1
    incremental_streaming_output: Annotated[
        bool, Option(_HTTP, "/generate chunks carry only the new text and ids.")
    ] = False
    enable_return_hidden_states: Annotated[
        bool, Option(_HTTP, "Let /generate return hidden states (return_hidden_states).")
    ] = False
    enable_cache_report: Annotated[bool, Option(_HTTP, "Accepted; OpenAI usage always reports cached tokens.")] = False
    drain_timeout: Annotated[
        float, Option(_HTTP, "Seconds that running requests get after SIGTERM.", convert=values.number, minimum=0)
    ] = 30.0
    watchdog_timeout: Annotated[
        float,
        Option(
            _HTTP, "Seconds after which a stuck step ends the server; 0 is never.", convert=values.number, minimum=0
        ),
    ] = 300.0
    request_waiting_timeout: Annotated[
        Number, Option(_HTTP, "Seconds a request may wait in the queue.", convert=values.number, more_than=0)
    ] = None
    request_running_timeout: Annotated[
        Number, Option(_HTTP, "Seconds a request may take in all.", convert=values.number, more_than=0)
    ] = None

    # gRPC
    grpc_mode: Annotated[bool, Option(_GRPC, "Serve gRPC instead of HTTP.", aliases=("smg-grpc-mode",))] = False
    smg_http_sidecar_port: Annotated[
        Integer,
        Option(
            _GRPC,
            "HTTP port beside the gRPC server; default: the gRPC port + 1.",
            aliases=("grpc-http-sidecar-port",),
            convert=values.port,
            minimum=0,
            maximum=65535,
        ),
    ] = None

    # Memory and scheduling
    page_size: Annotated[int, Option(_MEMORY, "Token slots of a KV page.", convert=values.integer, minimum=0)] = 16
    max_total_tokens: Annotated[
        Integer, Option(_MEMORY, "Token slots of the KV pool.", convert=values.human_integer, minimum=0)
    ] = None
    mem_fraction_static: Annotated[
        Number,
        Option(_MEMORY, "Share of memory for weights and KV pool.", convert=values.number, more_than=0, maximum=1),
    ] = None
    num_reserved_decode_tokens: Annotated[
        Integer,
        Option(
            _MEMORY,
            f"Token slots of the pool in a prefill/decode mode ({DEFAULT_RESERVED_SLOTS}) or, when set, on CPU.",
            convert=values.human_integer,
            minimum=0,
        ),
    ] = None
    max_running_requests: Annotated[
        Integer, Option(_MEMORY, "Most requests running at once.", convert=values.integer, minimum=1, maximum=2**20)
    ] = None
    max_queued_requests: Annotated[
        Integer, Option(_MEMORY, "Most requests waiting; more are refused.", convert=values.integer, minimum=0)
    ] = None
    max_prefill_tokens: Annotated[
        int, Option(_MEMORY, "Most uncached prompt tokens admitted at once.", convert=values.human_integer, minimum=1)
    ] = 16384
    chunked_prefill_size: Annotated[
        Integer,
        Option(
            _MEMORY,
            "Most prompt tokens of one step; -1 does not cut prompts.",
            convert=values.human_integer,
            minimum=-1,
        ),
    ] = None
    prefill_max_requests: Annotated[
        Integer, Option(_MEMORY, "Most prompts of one step.", convert=values.integer, minimum=1)
    ] = None
    schedule_policy: Annotated[
        str, Option(_MEMORY, "Order of waiting requests.", choices=("fcfs", "lpm", "priority"))
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool, Option(_MEMORY, "Order by request priority (same as --schedule-policy priority).")
    ] = False
    schedule_low_priority_values_first: Annotated[bool, Option(_MEMORY, "Smaller priority values go first.")] = False
    fair_scheduling: Annotated[
        bool, Option(_MEMORY, "Share the engine fairly between tenants, whom --tenants or the x-tenant header names.")
    ] = False
    tenants: Annotated[
        dict[str, Any] | None,
        Option(
            _MEMORY,
            'JSON object of tenants: NAME -> weight, or {"weight": W, "api_key": KEY}; the key proves who calls.',
            convert=values.json_object,
        ),
    ] = None
    max_wait_ms: Annotated[
        float,
        Option(
            _MEMORY,
            "Longest wait for more requests to batch with when idle.",
            convert=values.number,
            minimum=0,
            maximum=60_000,
        ),
    ] = 0.0
    disable_radix_cache: Annotated[bool, Option(_MEMORY, "No prefix caching.")] = False
    radix_eviction_policy: Annotated[
        str, Option(_MEMORY, "Eviction order of the prefix cache.", choices=("lru", "lfu", "fifo", "priority"))
    ] = "lru"
    disable_overlap_schedule: Annotated[bool, Option(_MEMORY, "Plan a step only after the one before it.")] = False
    cuda_graph_max_bs_decode: Annotated[
        Integer,
        Option(
            _MEMORY,
            "Largest captured decode batch; default: by device memory.",
            aliases=("cuda-graph-max-bs",),
            convert=values.integer,
            minimum=1,
        ),
    ] = None
    cuda_graph_bs_decode: Annotated[
        list[str],
        Option(_MEMORY, "Decode batches to capture.", aliases=("cuda-graph-bs",), convert=values.words),
    ] = []
    disable_cuda_graph: Annotated[bool, Option(_MEMORY, "Capture no graphs.")] = False
    disable_decode_cuda_graph: Annotated[bool, Option(_MEMORY, "Capture no decode graphs.")] = False
    disable_cuda_graph_padding: Annotated[bool, Option(_MEMORY, "Replay graphs for exactly their batch size only.")] = (
        False
    )
    enable_pdmux: Annotated[
        bool,
        Option(
            _MEMORY,
            "Run decode and prefill of a step on two streams of the device.",
            aliases=("enable-pd-multiplexing",),
        ),
    ] = False
    speculative_algorithm: Annotated[
        Text,
        Option(
            _MEMORY,
            "Guess tokens and verify several in one step: NGRAM guesses from the request's own tokens, STANDALONE with "
            "a draft model.",
            convert=values.lower_text,
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        Integer,
        Option(
            _MEMORY,
            f"Tokens of a request verified in one step; {DEFAULT_DRAFT_TOKENS} by default, with a draft model one more "
            f"than it guesses.",
            convert=values.integer,
            minimum=2,
            maximum=64,
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        Text,
        Option(
            _MEMORY,
            "Draft model of STANDALONE: as --model-path, with the served model's tokenizer.",
            aliases=("speculative-draft-model",),
        ),
    ] = None
    speculative_num_steps: Annotated[
        Integer,
        Option(
            _MEMORY,
            f"Tokens that the draft model guesses for a request in one step; {DEFAULT_DRAFT_STEPS} by default.",
            convert=values.integer,
            minimum=1,
            maximum=63,
        ),
    ] = None
    random_seed: Annotated[Integer, Option(_MEMORY, "Seed of sampling.", convert=values.integer)] = None

    # Devices and parallelism
    device: Annotated[
        str,
        Option(_DEVICE, "Device; auto never falls back to cpu.", choices=DEVICES, convert=values.device_name),
    ] = "auto"
    tp_size: Annotated[
        int,
        Option(
            _DEVICE,
            "Tensor parallel size.",
            aliases=("tensor-parallel-size", "tp"),
            convert=values.integer,
            minimum=1,
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Option(_DEVICE, "Replicas.", aliases=("data-parallel-size", "dp"), convert=values.integer, minimum=1),
    ] = 1
    ep_size: Annotated[
        int,
        Option(
            _DEVICE,
            "Parts that the experts are split into; divides the tensor parallel size.",
            aliases=("expert-parallel-size", "ep"),
            convert=values.integer,
            minimum=1,
        ),
    ] = 1
    load_balance_method: Annotated[str, Option(_DEVICE, "How replicas are chosen.", choices=LOAD_BALANCE_METHODS)] = (
        "auto"
    )
    nnodes: Annotated[int, Option(_DEVICE, "Nodes.", convert=values.integer, minimum=1)] = 1
    node_rank: Annotated[int, Option(_DEVICE, "Rank of this node.", convert=values.integer, minimum=0)] = 0
    dist_init_addr: Annotated[Text, Option(_DEVICE, "host:port of rank 0.", aliases=("nccl-init-addr",))] = None
    base_gpu_id: Annotated[int, Option(_DEVICE, "First device ordinal.", convert=values.integer, minimum=0)] = 0
    gpu_id_step: Annotated[int, Option(_DEVICE, "Step between device ordinals.", convert=values.integer, minimum=1)] = 1

    # Low-rank adapters
    enable_lora: Annotated[
        bool, Option(_LORA, "Serve low-rank adapters beside the model; implied by --lora-paths.")
    ] = False
    lora_paths: Annotated[
        list[str] | None,
        Option(
            _LORA,
            "Adapters to load at the start: PATH, NAME=PATH, or JSON with lora_name and lora_path.",
            convert=values.words,
        ),
    ] = None
    max_lora_rank: Annotated[
        Integer,
        Option(
            _LORA,
            "Largest rank of an adapter; default: that of --lora-paths.",
            convert=values.integer,
            minimum=1,
            maximum=4096,
        ),
    ] = None
    lora_target_modules: Annotated[
        list[str] | None,
        Option(
            _LORA,
            "Projections that adapters may change, or 'all'; default: those of --lora-paths.",
            choices=LORA_TARGET_MODULES,
            convert=values.words,
        ),
    ] = None
    max_loaded_loras: Annotated[
        Integer,
        Option(
            _LORA,
            "Adapters loaded at a time, all of which a batch may mix; default: --max-loras-per-batch.",
            convert=values.integer,
            minimum=1,
            maximum=1024,
        ),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        Option(_LORA, "Adapters that a batch can mix at least.", convert=values.integer, minimum=1, maximum=1024),
    ] = 8

    # Prefill/decode disaggregation
    disaggregation_mode: Annotated[str, Option(_PD, "Role.", choices=("null", "prefill", "decode"))] = "null"
    disaggregation_transfer_backend: Annotated[str, Option(_PD, "KV transport.", choices=TRANSFER_BACKENDS)] = (
        "mooncake"
    )
    disaggregation_bootstrap_port: Annotated[
        int, Option(_PD, "Port of the bootstrap server.", convert=values.port, minimum=0, maximum=65535)
    ] = 8998
    disaggregation_mooncake_rpc_port: Annotated[
        int, Option(_PD, "Port of the transfer engine; 0 is any.", convert=values.port, minimum=0, maximum=65535)
    ] = 0
    disaggregation_ib_device: Annotated[Text, Option(_PD, "InfiniBand devices.")] = None
    disaggregation_zmq_ports: Annotated[Text, Option(_PD, "Ports N or A-B.", convert=values.port_range)] = None
    disaggregation_decode_polling_interval: Annotated[
        int, Option(_PD, "Transfer polls per request.", convert=values.integer, minimum=1)
    ] = 1
    disaggregation_decode_enable_radix_cache: Annotated[bool, Option(_PD, "Prefix cache on decode.")] = False
    disaggregation_decode_enable_offload_kvcache: Annotated[bool, Option(_PD, "Offload KV on decode.")] = False
    engine_info_bootstrap_port: Annotated[
        int, Option(_PD, "Port of the engine information service.", convert=values.port, minimum=0, maximum=65535)
    ] = 6789

    # Observability
    log_level: Annotated[str, Option(_OBSERVE, "Log level.", choices=LOG_LEVELS, convert=values.lower_text)] = "info"
    enable_trace: Annotated[
        bool, Option(_OBSERVE, "Send OpenTelemetry spans of every request; needs the extra 'otel'.")
    ] = False
    otlp_traces_endpoint: Annotated[str, Option(_OBSERVE, "Collector of --enable-trace: host:port or URL.")] = (
        "localhost:4317"
    )
    enable_metrics: Annotated[bool, Option(_OBSERVE, "Serve /metrics and timings in meta_info.")] = False

    # Options of the command line that are no option of this class
    unknown_flags: dict[str, str | bool] = {}
    """Options that nobody knows, kept for /server_info: name with dashes -> its word, or True."""
    ignored_flags: dict[str, Any] = {}
    """Known SGLang options without effect here: name with dashes -> value."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_option(cls, value: Any, info: ValidationInfo) -> Any:
        option = _option_of(cls, info.field_name or "")
        return value if option is None else _checked(option, value, cls.model_fields[info.field_name or ""].annotation)

    @classmethod
    def option_specs(cls) -> list[OptionSpec]:
        """Every option with its name and default, in order of declaration."""
        specs = []
        for name, info in cls.model_fields.items():
            option = _option_of(cls, name)
            if option is not None:
                specs.append(OptionSpec(name, option, info.default, is_flag=info.annotation is bool))
        return specs

    def resolved(self, **changes: Any) -> Self:
        """A copy with ``changes`` applied and validated."""
        return self.model_validate({**self.model_dump(), **changes})

    def to_json(self) -> str:
        """The whole configuration as JSON text, secrets included: for the core process only."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, document: str | bytes) -> Self:
        """The inverse of ``to_json``; reads neither environment nor files."""
        return cls.model_validate_json(document)

    def public(self) -> dict[str, Any]:
        """The configuration as ``/server_info`` shows it: without keys, secrets blanked when set."""
        shown = self.model_dump(mode="json")
        for name in _SECRETS:
            if shown[name] is not None:
                shown[name] = "******"
        return shown

    @property
    def public_name(self) -> str:
        """Name of the model in the API: ``served_model_name``, else the model path."""
        return self.served_model_name or self.model_path or ""

    @property
    def effective_tokenizer_path(self) -> str:
        """Where the tokenizer lies: ``tokenizer_path``, else the model path."""
        return self.tokenizer_path or self.model_path or ""

    @property
    def reserved_slots(self) -> int:
        """Token slots that a prefill/decode mode gives the pool."""
        if self.num_reserved_decode_tokens is None:
            return DEFAULT_RESERVED_SLOTS
        return self.num_reserved_decode_tokens

    @property
    def guessed_tokens(self) -> int:
        """Tokens guessed for a request in one step; 0 without speculation. The newest token is verified with them."""
        if self.speculative_algorithm is None:
            return 0
        if self.speculative_algorithm == "standalone":
            limits = [self.speculative_num_steps, (self.speculative_num_draft_tokens or 1) - 1]
            return min([limit for limit in limits if limit], default=DEFAULT_DRAFT_STEPS)
        return (self.speculative_num_draft_tokens or DEFAULT_DRAFT_TOKENS) - 1

    @property
    def is_disaggregated(self) -> bool:
        """True in prefill and decode mode."""
        return self.disaggregation_mode != "null"


def _option_of(model: type[BaseModel], name: str) -> Option | None:
    info = model.model_fields.get(name)
    if info is None:
        return None
    return next((item for item in info.metadata if isinstance(item, Option)), None)


def _checked(option: Option, value: Any, annotation: Any) -> Any:
    """Convert text of any source; a boolean's text means the same everywhere."""
    if annotation is bool:
        return values.boolean(value) if isinstance(value, str) else value
    if isinstance(value, bool):
        raise ValueError(f"invalid value: {value} (the option takes a value, it is no switch)")
    return option.check(value)
