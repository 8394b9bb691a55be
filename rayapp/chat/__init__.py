"""The terminal chat behind `convoy chat`: a client of any server with an OpenAI-compatible API.

Used by `rayapp.cli` alone. Nothing here is imported by the server, and nothing here imports the server, Ray or torch.
"""
