"""Replicas of a server on the machines of a cluster, kept alive and registered with a router."""
