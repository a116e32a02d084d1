"""The gRPC services: the native one, and the one that SGLang's gateway speaks with its workers."""
