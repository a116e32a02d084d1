"""The router: one address for a fleet of workers."""
