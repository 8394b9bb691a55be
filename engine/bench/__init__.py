"""Measurements of the engine and its parts; nothing of the engine depends on them."""
