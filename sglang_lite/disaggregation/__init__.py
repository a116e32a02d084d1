"""Prefill and decode on different servers: sessions, their protocol, and what is sent when."""
