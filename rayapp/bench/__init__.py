"""Measurements of the serving layer: `python -m rayapp.bench`."""
