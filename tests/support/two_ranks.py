"""Two gloo ranks for tests: started once, everything they find is added up and read back by name."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

Check = Callable[[int], dict[str, Tensor]]
"""What a rank finds, by name; a top-level function, since ranks are processes."""


def summed_over_two_ranks(check: Check, folder: Path) -> dict[str, Tensor]:
    """Run ``check`` on both ranks of a group; each finding is the sum of the ranks'."""
    out = folder / "results.safetensors"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port, check, str(out)), nprocs=2)
    return load_file(out)


def _rank(rank: int, port: int, check: Check, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = check(rank)
    for tensor in found.values():
        dist.all_reduce(tensor)
    if rank == 0:
        save_file(found, out)
    dist.barrier()
    # Not through the interpreter's end: there gloo's thread may free the last work's tensors, and the process aborts.
    os._exit(0)
