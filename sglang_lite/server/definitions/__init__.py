"""Request bodies as types: they validate what comes in, and ``/openapi.json`` is made from them."""
