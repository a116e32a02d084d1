"""The options of ``ServerConfig``, one module a group of them: fields with flag, help, type and bounds."""
