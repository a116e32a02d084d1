"""Checks before anything is started: options that exclude each other, device, model directory, tokenizer, port.

The checks run in the order of their cost and none loads torch, so that a wrong start ends within a second and before
weights are read, a process is started or a port is bound.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from pathlib import Path

from sglang_lite import demo_model
from sglang_lite.adapters.capability import resolve_device
from sglang_lite.config import ServerConfig
from sglang_lite.configuration import values
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.execution.placement import split_address
from sglang_lite.execution.recurrent_limits import check_recurrent_options, without_prefix_cache
from sglang_lite.models.adapter_settings import adapter_settings
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.draft_settings import check_draft_options, draft_head, settle_draft_model
from sglang_lite.models.registry import check_checkpoint
from sglang_lite.models.repository import resolve_model_path
from sglang_lite.models.share import check_expert_parallel, check_tensor_parallel
from sglang_lite.observability.progress import ProgressLine
from sglang_lite.transfer.base import TransferError
from sglang_lite.transfer.factory import NAMES as TRANSPORTS
from sglang_lite.transfer.factory import check_available
from sglang_lite.types import StartupError

_CPU_DTYPES = ("auto", "float", "float32", "bfloat16")
_CPU_KV_DTYPES = ("auto", "float32", "bf16", "bfloat16")

TEST_CPU_RANKS = "SGLANG_LITE_TEST_CPU_RANKS"
"""Environment variable that lets ranks share a host's processor, when 1. For tests: nothing is gained by it."""

logger = logging.getLogger(__name__)


def prepare(config: ServerConfig) -> ServerConfig:
    """Check a configuration and settle what is decided before the engine: local paths, the public name, the policy.

    The result has ``model_path`` as a local directory and ``served_model_name`` as the user named the model; preparing
    it again changes nothing. Makes the demo model and downloads repositories when they are asked for. Opens no socket.

    Raises:
        StartupError: the configuration cannot be served; says what, where, what is allowed and what to do.
    """
    check_options(config)
    check_device(config)
    directory = local_model_directory(config)
    description = read_description(directory, config.json_model_override_args)
    check_checkpoint(directory, description)
    if config.speculative_algorithm is not None and description.recurrent is not None:
        raise StartupError(
            f"--speculative-algorithm {config.speculative_algorithm.upper()}: {description.architecture} carries "
            f"recurrent state, from which a rejected token cannot be taken back; leave the option out"
        )
    check_tensor_parallel(description, config.tp_size)
    check_expert_parallel(description, config.ep_size)
    check_recurrent_options(config, description)
    _check_adapters(config)
    _check_transferable(config, description)
    config = without_prefix_cache(settle_draft_model(config, description), description)
    draft_head(config, description, directory)  # it is there and fits
    tokenizer_path = _tokenizer_directory(config, directory)
    return config.resolved(
        device=resolve_device(config.device),
        model_path=str(directory),
        served_model_name=config.public_name,
        tokenizer_path=tokenizer_path,
        # A guess is made of the tokens so far, which a plan made ahead does not know.
        disable_overlap_schedule=config.disable_overlap_schedule or config.speculative_algorithm is not None,
        load_balance_method=_load_balance_method(config),
        schedule_policy="priority" if config.enable_priority_scheduling else config.schedule_policy,
    )


def check_options(config: ServerConfig) -> None:
    """Options that are wrong whatever the machine and the model are.

    Raises:
        StartupError: names the options and their values.
    """
    _check_keys(config)
    _check_pool(config)
    _check_grpc(config)
    if config.tenants and not config.fair_scheduling:
        raise StartupError("--tenants has an effect with --fair-scheduling only; add it, or leave the tenants out")
    if config.fair_scheduling and config.schedule_policy == "lpm":
        raise StartupError(
            "--fair-scheduling with --schedule-policy lpm: the cached prefix would decide against the shares; "
            "use fcfs or priority"
        )
    if config.served_model_name is not None and ":" in config.served_model_name:
        raise StartupError(
            f"--served-model-name {config.served_model_name!r} must not contain ':' (it separates an adapter's name)"
        )
    _check_kv_events(config)
    _check_chat_template(config.chat_template)
    _check_grammar_backend(config.grammar_backend)
    _check_ranks(config)
    _check_memory_saver(config)
    check_draft_options(config)
    if config.is_disaggregated:
        _check_disaggregation(config)


def _check_kv_events(config: ServerConfig) -> None:
    try:
        events = KVEventsConfig.parse(config.kv_events_config)
        if events is not None:
            events.for_replica(config.dp_size - 1)
    except ValueError as error:
        raise StartupError(f"--kv-events-config: {error}") from None
    if events is not None and config.disable_radix_cache:
        raise StartupError("--kv-events-config with --disable-radix-cache: no event would ever come; drop one of them")


def _check_grammar_backend(name: str | None) -> None:
    if name not in (None, "none") and importlib.util.find_spec(name) is None:
        raise StartupError(
            f"--grammar-backend {name}: the {name} package is not installed; pip install 'sglang-lite[grammar]', or "
            f"--grammar-backend none"
        )


def check_device(config: ServerConfig) -> None:
    """The device must have a provider and take the types asked for.

    Raises:
        StartupError: names every device that was tried and why it cannot be used.
    """
    if resolve_device(config.device) == "cuda":
        return  # element types are checked with the model and the kernels at hand
    if config.enable_pdmux:
        raise StartupError("--enable-pdmux: there are no streams with --device cpu; remove it")
    if config.tp_size > 1 and os.environ.get(TEST_CPU_RANKS) != "1":
        raise StartupError(f"--device cpu: the CPU reference supports only tp_size=1, requested {config.tp_size}")
    if config.dtype not in _CPU_DTYPES:
        raise StartupError(f"--device cpu does not support --dtype {config.dtype}; use one of {', '.join(_CPU_DTYPES)}")
    if config.kv_cache_dtype not in _CPU_KV_DTYPES:
        raise StartupError(
            f"--device cpu does not support --kv-cache-dtype {config.kv_cache_dtype}; "
            f"use one of {', '.join(_CPU_KV_DTYPES)}"
        )


def local_model_directory(config: ServerConfig) -> Path:
    """The directory of the model; makes the demo model when its name is asked for.

    Raises:
        StartupError: there is no such model, or it cannot be made or fetched.
    """
    if not config.model_path:
        raise StartupError("no model: pass --model-path with a directory, a Hugging Face repository id, or 'demo'")
    if config.model_path == demo_model.DEMO_NAME:
        with ProgressLine("Converting the demo model") as progress:
            return demo_model.materialize_in_cache(progress.update)
    return resolve_model_path(config.model_path, revision=config.revision)


def _check_adapters(config: ServerConfig) -> None:
    """Low-rank adapters: their files, and what they cannot be combined with yet."""
    if adapter_settings(config) is None:
        return
    for flag, value in (("--tp-size", config.tp_size), ("--ep-size", config.ep_size)):
        if value > 1:
            raise StartupError(f"--enable-lora with {flag} {value} is not supported yet: adapters are not split")
    if config.is_disaggregated:
        raise StartupError(
            f"--enable-lora with --disaggregation-mode {config.disaggregation_mode} is not supported: "
            f"the two servers would have to agree on the adapters"
        )


def check_port(config: ServerConfig) -> None:
    """Fail early when the port is taken; the port is not kept. Port 0 means any free one.

    Raises:
        StartupError: names host, port and the cause.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose another --host or --port"
        ) from error


def _check_keys(config: ServerConfig) -> None:
    """An empty key is a variable that was not filled in: serving without any check is not what was meant."""
    for name, key in (("--api-key", config.api_key), ("--admin-api-key", config.admin_api_key)):
        if key is not None and not key.strip():
            raise StartupError(f"{name} is empty; give a key, or leave the option out to serve without one")


def _check_chat_template(option: str | None) -> None:
    """A file or Jinja text; whether the text is valid is found out before the engine starts."""
    if option is None or "{{" in option or "{%" in option:
        return
    try:
        is_file = Path(option).is_file()
    except OSError:
        is_file = False  # longer than any name
    if not is_file:
        raise StartupError(
            f"--chat-template: no such file: {option[:200]}; pass the path of a jinja2 template, or its text"
        )


def _check_ranks(config: ServerConfig) -> None:
    """How ranks, nodes and experts divide."""
    tp_size, nnodes = config.tp_size, config.nnodes
    if tp_size % nnodes or config.node_rank >= nnodes:
        raise StartupError(
            f"--nnodes {nnodes} must divide --tp-size {tp_size}, and --node-rank {config.node_rank} must be below it"
        )
    if nnodes > 1 and config.dp_size > 1:
        raise StartupError(
            f"--dp-size {config.dp_size} needs --nnodes 1, got {nnodes}: replicas run on the machine of their front; "
            f"start one server a replica instead"
        )
    if nnodes > 1:
        split_address(config.dist_init_addr)
    if tp_size % config.ep_size:
        raise StartupError(f"--ep-size {config.ep_size} must divide --tp-size {tp_size}: experts share its ranks")


def _check_memory_saver(config: ServerConfig) -> None:
    """Memory is given back by one rank on the host that nobody else reads or writes."""
    if not config.enable_memory_saver:
        return
    reasons = {
        f"--device {config.device}": config.device != "cpu",
        f"--tp-size {config.tp_size}": config.tp_size > 1,
        "--enable-lora": config.enable_lora,
        f"--speculative-algorithm {config.speculative_algorithm}": config.drafts_with_weights,
        f"--disaggregation-mode {config.disaggregation_mode}": config.is_disaggregated,
    }
    found = ", ".join(name for name, holds in reasons.items() if holds)
    if found:
        raise StartupError(f"--enable-memory-saver does not go together with {found}; leave one of them out")


def _check_pool(config: ServerConfig) -> None:
    page_size = config.page_size
    if page_size < 1:
        raise StartupError(f"--page-size {page_size}: must be at least 1")
    if config.max_total_tokens is not None and config.max_total_tokens < page_size:
        raise StartupError(
            f"--max-total-tokens {config.max_total_tokens} holds no page of --page-size {page_size}; give at least one"
        )
    chunk = config.chunked_prefill_size
    if chunk == 0 or (chunk is not None and chunk > 0 and chunk % page_size):
        raise StartupError(f"--chunked-prefill-size {chunk} must be -1 or a multiple of --page-size {page_size}")
    if config.is_disaggregated or (config.device == "cpu" and config.num_reserved_decode_tokens is not None):
        slots = config.reserved_slots
        if slots < 1 or slots % page_size:
            raise StartupError(
                f"--num-reserved-decode-tokens: {slots} token slots are not divisible by --page-size {page_size}; "
                f"choose a multiple"
            )


def _check_grpc(config: ServerConfig) -> None:
    if not config.grpc_mode:
        return
    sidecar = config.smg_http_sidecar_port
    if sidecar is None and config.port == 65535:
        raise StartupError(
            "--grpc-mode with --port 65535: the HTTP sidecar would be port 65536; pass --smg-http-sidecar-port"
        )
    if sidecar is not None and sidecar == config.port:
        raise StartupError(f"--smg-http-sidecar-port {sidecar} must differ from --port {config.port}")
    if config.tokenizer_worker_num > 1:
        raise StartupError("--grpc-mode serves from one front process: leave out --tokenizer-worker-num")
    for module in ("grpc", "google.protobuf", "grpc_health", "grpc_reflection"):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise StartupError(f"--grpc-mode: the module {module!r} is not installed: pip install 'sglang-lite[grpc]'")


def _check_disaggregation(config: ServerConfig) -> None:
    mode, backend = config.disaggregation_mode, config.disaggregation_transfer_backend
    if config.kv_cache_dtype == "fp4_e2m1":
        raise StartupError("--kv-cache-dtype fp4_e2m1: needs model metadata for its scales; use auto or bfloat16")
    ranks = config.dp_size * config.tp_size
    if mode == "prefill" and config.disaggregation_zmq_ports is not None:
        count = len(values.ports_of(config.disaggregation_zmq_ports))
        if count != ranks:
            raise StartupError(
                f"--disaggregation-zmq-ports {config.disaggregation_zmq_ports} names {count} ports, "
                f"expected {ranks} (dp_size {config.dp_size} x tp_size {config.tp_size})"
            )
    if backend not in TRANSPORTS:
        raise StartupError(
            f"--disaggregation-transfer-backend {backend} is not supported for --disaggregation-mode {mode}; "
            f"supported: {', '.join(TRANSPORTS)}"
        )
    try:
        check_available(backend)
    except TransferError as error:
        raise StartupError(
            f"--disaggregation-transfer-backend {backend}: transfer engine unavailable: {error}"
        ) from error
    _check_role(config)


def _check_transferable(config: ServerConfig, description: ModelDescription) -> None:
    """Raises StartupError: the state of a request is more than its pages."""
    if config.is_disaggregated and description.recurrent is not None:
        raise StartupError(
            f"--disaggregation-mode {config.disaggregation_mode}: {description.architecture} carries recurrent state, "
            f"which is not transferred; leave the option out"
        )


def _check_role(config: ServerConfig) -> None:
    """What a prefill or decode server cannot be combined with."""
    mode = config.disaggregation_mode
    excluded = {
        f"--speculative-algorithm {config.speculative_algorithm}": config.speculative_algorithm is not None,
        "--disaggregation-decode-enable-radix-cache": config.disaggregation_decode_enable_radix_cache,
        "--disaggregation-decode-enable-offload-kvcache": config.disaggregation_decode_enable_offload_kvcache,
        "--enable-return-hidden-states": config.enable_return_hidden_states,
        "--enable-pdmux": config.enable_pdmux,
    }
    for flag, is_set in excluded.items():
        if is_set:
            raise StartupError(
                f"{flag} with --disaggregation-mode {mode} is not supported yet; leave one of the two options out"
            )
    if config.disaggregation_fallback == "local" and mode != "decode":
        raise StartupError(
            f"--disaggregation-fallback local with --disaggregation-mode {mode}: it is the decode server that computes "
            f"prompts whose prefill server fails; leave the option out here"
        )


def _tokenizer_directory(config: ServerConfig, model_directory: Path) -> str | None:
    """The local tokenizer directory, or None when it is the model's or none is wanted."""
    directory = model_directory
    if config.tokenizer_path is not None:
        directory = resolve_model_path(config.tokenizer_path)
    if not config.skip_tokenizer_init and not (directory / "tokenizer.json").is_file():
        raise StartupError(
            f"tokenizer not found: there is no tokenizer.json in {directory}; pass --tokenizer-path with a directory "
            f"that has one, or --skip-tokenizer-init to serve token ids only"
        )
    return None if config.tokenizer_path is None else str(directory)


def _load_balance_method(config: ServerConfig) -> str:
    if config.load_balance_method != "auto":
        return config.load_balance_method
    return "follow_bootstrap_room" if config.disaggregation_mode == "prefill" else "round_robin"
