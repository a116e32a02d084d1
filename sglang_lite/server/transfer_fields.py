"""Fields that pair the requests of a prefill and a decode server: where the prefill side is, and the pair's room."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation.base import FAKE_HOST, MAX_ROOM
from sglang_lite.frontend.fields import read_int, read_object, read_str, shorten
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import RequestError, TransferParams

FLAT_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
NESTED_FIELD = "disaggregated_params"
_HOST = re.compile(r"[A-Za-z0-9._:%\-]{1,253}")
_CHOICE_STEP = 0x1E3779B97F4A7C15
"""Added to a prompt's room for each further choice: odd and large, so that rooms in sequence do not meet."""


def add_transfers(
    requests: Sequence[GenerateRequest], body: Mapping[str, Any], config: ServerConfig, choices: int
) -> None:
    """Give every sequence of a request its pair, on a prefill or decode server.

    Args:
        requests: prompt-major.
        choices: sequences of each prompt.

    Raises:
        RequestError: a field is missing, wrong, or of another length than there are prompts.
    """
    if not config.is_disaggregated or not requests:
        return
    fields = _fields_of(body)
    prompts = len(requests) // choices
    rooms = _rooms(fields, prompts)
    if rooms is None:
        if config.disaggregation_fallback == "local":
            return
        raise RequestError(
            "Invalid request: Disaggregated request received without bootstrap room id. A server with "
            f"--disaggregation-mode {config.disaggregation_mode} takes requests from a router, which sends the same "
            "bootstrap_host, bootstrap_port and bootstrap_room to a prefill and to a decode server",
            field="bootstrap_room",
        )
    hosts = [_host(value, config) for value in _column(fields, "bootstrap_host", prompts)]
    ports = [_port(value, config) for value in _column(fields, "bootstrap_port", prompts)]
    rank = body.get("disagg_prefill_dp_rank")
    if rank is not None and read_int("disagg_prefill_dp_rank", rank) < 0:
        raise RequestError(f"disagg_prefill_dp_rank must be at least 0, got {rank}.", field="disagg_prefill_dp_rank")
    for index, request in enumerate(requests):
        prompt, choice = divmod(index, choices)
        room = (rooms[prompt] + choice * _CHOICE_STEP) & MAX_ROOM
        request.transfer = TransferParams(hosts[prompt], ports[prompt], room, rank, request.request_id)


def _fields_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = body.get(NESTED_FIELD)
    if nested is None:
        return body
    if any(body.get(name) is not None for name in FLAT_FIELDS):
        raise RequestError(f"{NESTED_FIELD} and bootstrap_* are both set; send one of them", field=NESTED_FIELD)
    return read_object(NESTED_FIELD, nested)


def _column(fields: Mapping[str, Any], name: str, prompts: int) -> list[Any]:
    """One value for every prompt; a list has one for each, anything else is for all."""
    value = fields.get(name)
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        raise RequestError(f"{name} has {len(value)} entries for {prompts} prompts", field=name)
    return value


def _rooms(fields: Mapping[str, Any], prompts: int) -> list[int] | None:
    """The room of every prompt: a single one counts up from prompt to prompt. None when there is none."""
    name = "bootstrap_room"
    is_list = isinstance(fields.get(name), list)
    values = _column(fields, name, prompts)
    if all(value is None for value in values):
        return None
    rooms = [_room(value) for value in values]
    if not is_list:
        rooms = [(room + index) & MAX_ROOM for index, room in enumerate(rooms)]
    if len(set(rooms)) < len(rooms):
        raise RequestError(f"{name}: two prompts have the same room; each needs its own", field=name)
    return rooms


def _room(value: Any) -> int:
    name = "bootstrap_room"
    room = value if isinstance(value, int) and not isinstance(value, bool) else read_int(name, value)
    if not 0 <= room <= MAX_ROOM:
        raise RequestError(f"{name} must be in [0, {MAX_ROOM}], got {shorten(room)}", field=name)
    return room


def _port(value: Any, config: ServerConfig) -> int:
    if value is None:
        return config.disaggregation_bootstrap_port
    port = read_int("bootstrap_port", value)
    if not 0 < port < 1 << 16:
        raise RequestError(f"bootstrap_port must be in [1, 65535], got {shorten(port)}", field="bootstrap_port")
    return port


def _host(value: Any, config: ServerConfig) -> str:
    """The address of the prefill side's bootstrap server. Pages of nobody are for the server's own probes."""
    name = "bootstrap_host"
    if value is None:
        if config.disaggregation_mode == "prefill":
            return config.host  # this server itself: nobody asks
        raise RequestError(f"{name} is missing: a decode server must know where the prefill server is", field=name)
    host = read_str(name, value)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]  # as an address of IPv6 stands in a URL
    if _HOST.fullmatch(host) is None or host == FAKE_HOST:
        raise RequestError(f"{name} must be a host name or an address, got {shorten(host)!r}", field=name)
    return host
