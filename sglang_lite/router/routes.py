"""The routes that clients use. Every other one but health and metrics belongs to the control plane."""

from __future__ import annotations

PROXIED = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/encode",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/rerank",
)
"""Work of a model, chosen by a policy."""

PLAIN = {
    "/tokenize": "/tokenize",
    "/detokenize": "/detokenize",
    "/parse/function_call": "/parse_function_call",
    "/parse/reasoning": "/separate_reasoning",
    "/parse_function_call": "/parse_function_call",
    "/separate_reasoning": "/separate_reasoning",
    "/v1/messages/count_tokens": "/v1/messages/count_tokens",
}
"""Work that any worker does, in a pair too -> the worker's path."""

TOKENS = ("/v1/tokenize", "/v1/detokenize")

DATA = frozenset((*PROXIED, *PLAIN, *TOKENS, "/v1/models", "/model_info", "/get_model_info"))
