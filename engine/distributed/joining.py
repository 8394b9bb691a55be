"""Joins the processes of one host that are to run one model, where no torchrun does it.

Called by whoever starts them, in each of them: first `declare`, before torch is loaded, then `join_processes`, before
the model is. They meet on the loopback address only. Knows nothing of models.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

LOOPBACK = "127.0.0.1"
# That processes wait for each other in the model's own operations; the first is the end of loading, with disks that
# may be shared and slow.
_LIMIT = timedelta(hours=2)
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def declare(rank: int, size: int, device: str) -> None:
    """Say in the environment which of `size` processes this one is, as torchrun would: transformers and NCCL look.

    Args:
        device: "cuda": the process `rank` takes the GPU of that number among those it sees; "cpu": none is seen.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    for name in _INTERFACES:
        os.environ.setdefault(name, "lo")
    if device == "cpu":  # transformers would take a GPU that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def listen() -> socket.socket:
    """Where the first process waits for the others. Its port may be told before anyone has loaded torch."""
    return socket.create_server((LOOPBACK, 0), backlog=128)


def join_processes(rank: int, size: int, device: str, port: int, listener: socket.socket | None = None) -> None:
    """Make this process one of torch.distributed's; returns when all have come.

    Args:
        device: "cuda" or "cpu".
        port: of `listener`.
        listener: of the first process, from `listen`; it is used up.
    """
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(
        LOOPBACK,
        port,
        size,
        is_master=listener is not None,
        timeout=_LIMIT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    own = None
    if device == "cuda":
        own = torch.device("cuda", rank)
        torch.cuda.set_device(own)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LIMIT, device_id=own)
