"""The engine: core loop, frames between processes, launcher, and the two faces (AsyncEngine, Engine)."""
