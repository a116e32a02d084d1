"""Options of a server that belongs to a router."""

from __future__ import annotations

from typing import Annotated

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Option, OptionGroup

_GROUP = "Fleet"


class FleetOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Fleet"."""

    router_url: Annotated[
        list[str] | None,
        Option(_GROUP, "Routers to register with once ready, and to leave at the end.", convert=values.words),
    ] = None
    router_api_key: Annotated[str | None, Option(_GROUP, "Key for POST and DELETE /workers of the routers.")] = None
    advertise_url: Annotated[
        str | None,
        Option(
            _GROUP,
            "Address at which the routers reach this server; default: that of --host, or of the interface towards "
            "the router.",
        ),
    ] = None
