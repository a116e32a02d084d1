"""The HTTP front: an aiohttp application over an asynchronous engine."""
