"""How KV pages travel between servers: one interface, one module per transport.

Empty so far: prefill and decode run in one server, and asking for another mode is a start-up error.
"""
