"""The text side of a request: validation, chat template, tokens in, text out. No torch, sockets or event loop."""
