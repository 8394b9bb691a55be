"""What the terminal of `serve run` shows: start-up lines of the engines, and where the application can be reached.

Ray copies what its processes print to the terminal. Serve's own logger is for every request and may be turned down.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ray.serve.context import _get_global_client


def log_to_terminal(*names: str) -> None:
    """Print INFO and above of these loggers to standard output; for processes of this application alone."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False


def application_url(app_name: str) -> str:
    """URL of a running application. Blocks; a few calls to Serve's controller."""
    client: Any = _get_global_client()
    applications = client.get_serve_details()["applications"]
    prefix = applications.get(app_name, {}).get("route_prefix") or ""
    return str(client.root_url) + prefix.rstrip("/")
