"""How KV pages travel between servers: one interface (``base``), one module per transport.

``tcp`` is plain Python over sockets: the reference, and what works without a native library. ``mooncake``
drives the engine of that name. ``factory`` opens one by name.
"""
