"""Tool calls and reasoning out of a model's text: one incremental framework, one small description a format."""
