"""SGLang options that this release knows but does not act on, by what is done when one is given.

*Ignored* options change speed, logging or an internal choice, never an answer: the server starts, warns once and
shows them in ``/server_info``. *Refused* options would change what is served or how safely, so that ignoring them
would be a lie; giving one ends the start, unless the value is SGLang's own default. Options in neither list nor in
``ServerConfig`` are unknown to both programs and are kept as they are.

An entry is ``name[/alias...][=default[|default...]]``, grouped by the kind of value it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_lite.configuration import values

_IGNORED = {
    "flag": """
        collect-tokens-histogram disable-chunked-prefix-cache
        disable-custom-all-reduce disable-hybrid-swa-memory
        disable-outlines-disk-cache disable-prefill-cuda-graph disable-priority-preemption enable-dp-attention
        enable-dp-lm-head enable-dynamic-chunking enable-hierarchical-cache/enable-hicache
        enable-metrics-for-all-schedulers enable-mfu-metrics enable-mixed-chunk enable-prefill-delayer
        enable-request-time-stats-logging enable-streaming-session enable-torch-compile
        flashinfer-mla-disable-ragged log-requests show-time-cost sleep-on-idle speculative-adaptive
        speculative-dspark-align-verify-tokens-to-graph-tier
        speculative-use-block-verification speculative-use-rejection-sampling trust-remote-code
    """,
    "pair": """
        speculative-enable-w4a4-mxfp4-megamoe/no-speculative-enable-w4a4-mxfp4-megamoe
    """,
    "integer": """
        batch-notify-size cuda-graph-max-bs-prefill decode-log-interval
        detokenizer-worker-num disaggregation-decode-extra-slots dist-timeout ep-num-redundant-experts
        grpc-response-timeout-secs hicache-size load-snapshot-publish-interval log-requests-level
        min-free-slots-delay moe-dense-tp-size nccl-port num-continuous-decode-steps pp-async-batch-depth
        pp-max-micro-batch-size priority-scheduling-preemption-threshold sampling-mask-max-tokens
        scheduler-recv-interval speculative-dflash-block-size speculative-domino-candidate-pool-size
        speculative-draft-sink-size speculative-draft-window-size speculative-dspark-block-size
        speculative-eagle-topk speculative-ngram-capacity speculative-ngram-external-corpus-max-tokens
        speculative-ngram-external-sam-budget speculative-ngram-max-bfs-breadth speculative-ngram-max-trie-depth
        speculative-ngram-min-bfs-breadth
        torch-compile-max-bs triton-attention-num-kv-splits
    """,
    "number": """
        disaggregation-decode-host-receive-threshold gc-warning-threshold-secs hicache-ratio
        schedule-conservativeness soft-watchdog-timeout swa-full-tokens-ratio
    """,
    "text": """
        attention-backend bf16-gemm-backend crash-dump-folder cuda-graph-backend-decode
        cuda-graph-backend-prefill decode-attention-backend deepep-mode
        disaggregation-decode-allocation-policy disaggregation-decode-retraction-backup fp4-gemm-backend
        fp8-gemm-backend hicache-host-memory-mode hicache-io-backend hicache-mem-layout
        hicache-storage-backend-extra-config hicache-storage-prefetch-policy hicache-write-policy log-level-http
        log-requests-format mm-attention-backend moe-a2a-backend moe-runner-backend
        nsa-decode-backend nsa-prefill-backend prefill-attention-backend
        sampling-backend speculative-adaptive-config speculative-attention-mode
        speculative-draft-attention-backend speculative-draft-kv-cache-dtype speculative-draft-load-format
        speculative-draft-model-quantization
        speculative-draft-model-revision speculative-dsa-topk-backend speculative-dspark-confidence-sts-path
        speculative-dspark-sps-table-path speculative-moe-a2a-backend speculative-moe-runner-backend
        speculative-ngram-match-type
        tokenizer-metrics-custom-labels-header
    """,
    "json": """
        cuda-graph-config deepep-config model-loader-extra-config
    """,
    "words": """
        bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token
        cuda-graph-bs-prefill generation-tokens-buckets log-requests-target prompt-tokens-buckets
        uvicorn-access-log-exclude-prefixes
    """,
}

_REFUSED = {
    "flag": """
        abort-on-priority-when-disabled checkpoint-engine-wait-weights-before-ready
        constrained-json-disable-any-whitespace debug-cuda-graph delete-ckpt-after-loading
        disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill
        disable-attn-tp-gather disable-fast-image-processor disable-flashinfer-autotune
        disable-flashinfer-cutlass-moe-fp4-allgather disable-shared-experts-fusion
        disable-tokenizer-batch-decode enable-adaptive-dispatch-to-encoder
        enable-aiter-allreduce-fusion enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process
        enable-cp-decode-attn-tp enable-cudagraph-gc enable-custom-logit-processor
        enable-deepseek-v4-fp4-indexer enable-dense-mlp-attn-tp enable-deterministic-inference
        enable-dp-attention-local-control-broadcast enable-draft-weights-cpu-backup enable-dsa-cache-layer-split
        enable-dynamic-batch-tokenizer enable-elastic-expert-backup enable-encoder-swa-bounded-replay
        enable-eplb enable-flashinfer-allreduce-fusion enable-flexkv enable-forward-pass-metrics
        enable-fp32-lm-head enable-fused-moe-sum-all-reduce enable-hisparse enable-http-worker-reuseport
        enable-http2 enable-int8-mamba-checkpoint enable-kv-cache-sharding enable-layernorm-sp
        enable-layerwise-nvtx-marker enable-lean-attention enable-linear-replayssm enable-linear-replayssm-spec
        enable-linker-mla-dedup enable-lmcache enable-lora-overlap-loading
        enable-mamba-cache-stochastic-rounding enable-megamoe-for-layernorm-sp enable-mis
        enable-mm-global-cache enable-mscclpp enable-multi-layer-eagle enable-multimodal enable-nccl-nvls
        enable-nvidia-megakernel enable-p2p-check enable-page-major-kv-layout enable-paged-experts
        enable-pd-role-switch enable-precise-embedding-interpolation enable-prefill-cp
        enable-prefix-mm-cache enable-profile-cuda-graph enable-quant-communications
        enable-return-aux-hidden-states enable-return-indexer-topk
        enable-return-routed-experts enable-scattered-sconv enable-session-radix-cache
        enable-shared-experts-attn-tp enable-single-batch-overlap
        enable-strict-thinking enable-symm-mem enable-tokenizer-batch-encode enable-torch-compile-debug-mode
        enable-torch-symm-mem enable-two-batch-overlap enable-unified-cache-external-linker
        enable-unified-memory enable-w4a4-mxfp4-megamoe enable-waterfill enable-watermark
        enable-weights-cpu-backup encoder-only enforce-disable-flashinfer-allreduce-fusion
        enforce-shared-experts-fusion export-metrics-to-file is-embedding language-model-only language-only
        lora-use-virtual-experts mlx-enable-sampling pre-warm-nccl prefill-only-disable-kv-cache
        quantize-and-serve remote-instance-weight-loader-start-seed-via-transfer-engine return-input-ids
        return-output-ids stream-response-default-include-usage strip-thinking-cache
        triton-attention-reduce-in-fp32 trust-mm-content-hashes trust-request-chat-template use-ray
        weight-loader-disable-mmap weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints
    """,
    "pair": """
        dcp-replicate-q-proj/no-dcp-replicate-q-proj dllm-fdfo/no-dllm-fdfo
        enable-decoder-swa-bounded-replay/no-enable-decoder-swa-bounded-replay
        enable-dsa-fused-indexer/no-enable-dsa-fused-indexer
        enable-fused-qk-norm-rope/no-enable-fused-qk-norm-rope enable-tf32-matmul/no-enable-tf32-matmul
        enable-tp-lm-head-all-to-all/no-enable-tp-lm-head-all-to-all
        experts-shared-outer-loras/no-experts-shared-outer-loras lora-strict-loading/no-lora-strict-loading
        mm-enable-dp-encoder/no-mm-enable-dp-encoder ple-offload-embedding/no-ple-offload-embedding
    """,
    "integer": """
        asr-max-buffer-seconds=60 asr-max-concurrent-sessions=32 attn-cp-size/attention-context-parallel-size=1
        attn-dp-size/attention-data-parallel-size=1 c128-page-size=16 constrained-json-max-whitespace-cnt
        cpu-offload-gb=0 cuda-graph-max-seq-len-prefill dcp-size/decode-context-parallel-size=1
        decoupled-spec-rank default-priority-value dsa-triton-union=0 dwdp-size=1
        dynamic-batch-tokenizer-batch-size=32 elastic-ep-initial-size elastic-ep-join-rank-offset=0
        encoder-bootstrap-port=8997 eplb-rebalance-layers-per-chunk
        eplb-rebalance-num-iterations=1000 expert-distribution-recorder-buffer-size fuseep-mode=2
        gated-launch-port grpc-port hicache-storage-prefetch-retry-max-attempts=8
        hicache-storage-prefetch-retry-poll-interval=8 http2-initial-connection-window-size=1048576
        http2-max-concurrent-streams=200 int8-mamba-ckpt-size kt-cpuinfer kt-max-deferred-experts-per-token
        kt-num-gpu-experts kt-threadpool-count=2 kv-canary-sweep-interval=0 linear-replayssm-cache-len=16
        mamba-cache-philox-rounds=0 mamba-max-states-per-path=-1 mamba-track-interval=256 max-ep-size
        max-lora-chunk-size=16 max-mamba-cache-size
        media-url-max-file-size-mb=64 mm-io-worker-num=0 mm-preprocess-cache-size-mb mm-processor-worker-num=0
        moe-dp-size/moe-data-parallel-size=1 offload-group-size=-1 offload-num-in-group=1
        offload-prefetch-step=1 optimistic-prefill-attempts=0 paged-experts-num-resident
        pp-size/pipeline-parallel-size=1 prefill-decode-interval prefill-decode-interval-min-bs=0
        prefill-delayer-max-delay-passes=30 remote-instance-weight-loader-seed-instance-service-port
        shared-experts-tp-size sm-group-num=8 swa-prefix-tails triton-attention-split-tile-size
        weight-cache-timeout=1800 weight-loader-prefetch-num-threads=4
    """,
    "human": """
        cuda-graph-prefill-max-context/context-bucket
    """,
    "number": """
        dynamic-batch-tokenizer-batch-timeout=0.002 elastic-ep-scale-timeout=600
        eplb-min-rebalancing-utilization-threshold=1.0 hicache-host-memory-fraction=0.8
        lora-drain-wait-threshold=0.0 mamba-full-memory-ratio prefill-delayer-max-delay-ms
        prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark
        speculative-accept-threshold-acc=1.0 speculative-accept-threshold-single=1.0
        tbo-token-distribution-threshold=0.48
    """,
    "text": """
        boundary-reduction=auto completion-template constrained-json-whitespace-pattern cp-strategy
        dcp-comm-backend debug-tensor-dump-input-file debug-tensor-dump-output-folder
        decoupled-spec-bind-endpoint decoupled-spec-role=null decrypted-config-file decrypted-draft-config-file
        deepep-dispatcher-output-dtype=auto deepep-v2-mode=direct dllm-algorithm dllm-algorithm-config
        download-dir dsa-decode-backend dsa-paged-mqa-logits-backend=auto dsa-prefill-backend
        dsa-topk-backend=sgl-kernel dsv4-attn-backend=auto dsv4-prefill-backend=auto elastic-ep-backend
        elastic-ep-join-mode encoder-transfer-backend=auto ep-dispatch-algorithm eplb-algorithm=auto
        expert-balancedness-report-mode=off expert-distribution-recorder-mode export-metrics-to-file-dir
        fastapi-root-path file-storage-path flashinfer-a2a-dispatch-type flashinfer-allreduce-fusion-backend
        flashinfer-mxfp4-moe-precision=default flexkv-config-file forward-pass-metrics-ipc-name
        forward-pass-metrics-worker-id hf-chat-template-name hicache-storage-backend
        hisparse-config/hierarchical-sparse-attention-extra-config image-processor-backend=auto
        init-expert-location=trivial kt-method=AMXINT4 kt-weight-path
        kv-canary-real-data=none kv-canary=none linear-attn-backend=triton
        linear-attn-decode-backend linear-attn-prefill-backend linear-attn-verify-backend lmcache-config-file
        load-format=auto|safetensors load-publish-endpoint lora-backend=csgmv lora-eviction-policy=lru
        mamba-backend=triton
        mamba-radix-cache-strategy=auto mamba-ssm-dtype mm-feature-transport mm-global-cache-backend=mooncake
        model-checksum model-config-parser=auto model-impl=auto modelexpress-config
        modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path modelopt-quant
        monokernel-backend mooncake-ib-device msprobe-dump-config offload-mode=cpu otlp-service-name
        pdmux-config-path ple-offload-backend=pinned ple-offload-dir prefill-kv-cache-dequant-dtype=auto
        qsa-indexer-dtype=auto quantization=unquant quantization-param-path radix-cache-backend
        remote-instance-weight-loader-backend=nccl remote-instance-weight-loader-seed-instance-ip
        retraction-policy=length return-hidden-states-mode rl-on-policy-target rl-quant-profile sidecar
        spec-trace-dir speculative-ngram-external-corpus-path speculative-token-map
        startup-weight-load-mode=serial tokenizer-backend=huggingface tokenizer-mode=auto tool-server
        trace-modules=request unified-cache-external-linker-backend=mooncake uno-lora-path warmups
        watermark-config weight-cache-mode=off weight-cache-socket
    """,
    "json": """
        decoupled-spec-connect-endpoints extra-metric-labels forward-hooks limit-mm-data-per-request
        mm-process-config radix-eviction-policy-config remote-instance-weight-loader-send-weights-group-ports
        sidecar-args unified-cache-external-linker-config
    """,
    "words": """
        allowed-media-domains custom-weight-loader debug-tensor-dump-layers encoder-register-urls encoder-urls
        flashinfer-autotune-skip-ops gc-threshold numa-node
        prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets
        return-aux-hidden-state-layer-ids tokenizer-metrics-allowed-custom-labels
    """,
}

POINTERS = {
    "runtime-backend": "use --device",
    "kv-cache-num-layers": "the KV geometry comes from the model definition",
    "kv-cache-kv-heads": "the KV geometry comes from the model definition",
    "kv-cache-head-dim": "the KV geometry comes from the model definition",
}
"""Options of an earlier runtime that are rejected, with what to do instead."""

_CONVERTERS: dict[str, values.Converter] = {
    "integer": values.integer,
    "human": values.human_integer,
    "number": values.number,
    "text": values.text,
    "json": values.json_value,
    "words": values.text,
}


@dataclass(frozen=True, slots=True)
class KnownOption:
    """An option of SGLang without an implementation here.

    Attributes:
        name: main name, with dashes and without the leading ones.
        aliases: further names.
        kind: flag, pair (also has a ``no-`` form), integer, human, number, text, json or words (several values).
        refused: True when giving it ends the start.
        default: SGLang's default as text, or None; several values are
            separated by ``|``. A refused option with exactly this value is accepted.
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    refused: bool
    default: str | None

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names as they are written on a command line."""
        return tuple(f"--{name}" for name in (self.name, *self.aliases))

    def convert(self, value: str) -> Any:
        """Check the text of a value; raises ValueError like the options that are implemented."""
        return _CONVERTERS[self.kind](value)

    def is_default(self, value: Any) -> bool:
        """True when ``value`` asks for what happens anyway."""
        if value is False:
            return True
        return self.default is not None and str(value) in self.default.split("|")


def known_options() -> list[KnownOption]:
    """All of them, ignored ones first."""
    return [*_parse(_IGNORED, refused=False), *_parse(_REFUSED, refused=True)]


def _parse(groups: dict[str, str], *, refused: bool) -> list[KnownOption]:
    result = []
    for kind, entries in groups.items():
        for entry in entries.split():
            names, _, default = entry.partition("=")
            name, *aliases = names.split("/")
            result.append(KnownOption(name, tuple(aliases), kind, refused, default or None))
    return result
