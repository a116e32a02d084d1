"""Metrics and logging shared by all layers. Nothing here imports another package of the project."""
