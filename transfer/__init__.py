"""How KV pages travel between servers: one interface (``base``), one module per transport.

``tcp`` is plain Python over sockets: the reference, and what works without a native library. ``mooncake`` and ``nixl``
drive the engines of those names. ``factory`` opens one by name.
"""
