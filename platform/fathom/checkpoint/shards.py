"""The one format of training state: flat ranges of flattened tensors, a pair of files per rank, no pickle.

``rank-00000.safetensors`` holds 1-D tensors, ``rank-00000.json`` which range of which tensor each of them is. A range
of any tensor can be read back whatever the ranks that wrote it, so every strategy on every world size loads every
checkpoint. Ranges may overlap (replicated parts); they must not leave a gap.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fathom.errors import CheckpointError
from fathom.storage.local import saving_tensors

if TYPE_CHECKING:
    from torch import Tensor

USE_ANOTHER = "use an older checkpoint"


class FlatShard(NamedTuple):
    """A rank's contiguous range of one flattened tensor.

    Attributes:
        values: [stop - start], any dtype.
        shape: of the whole tensor.
        start: first element of the range in the flattened tensor.
    """

    values: "Tensor"
    shape: tuple[int, ...]
    start: int


class Piece(NamedTuple):
    """Where elements ``start:stop`` of a flattened tensor are."""

    start: int
    stop: int
    file: Path


def write_shards(folder: Path, rank: int, world: int, shards: Mapping[str, FlatShard]) -> None:
    """Write one rank's state; the index comes last.

    Args:
        folder: made if missing; each rank may have its own.
        rank: of this process, 0 <= rank < world.
        world: how many ranks write.
        shards: by key, such as ``param/NAME``, ``exp_avg/NAME``, ``exp_avg_sq/NAME``.

    Raises:
        ValueError: a shard is not 1-D or reaches beyond its tensor.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for key, shard in shards.items():
        stop = shard.start + shard.values.numel()
        if shard.values.dim() != 1 or shard.start < 0 or stop > math.prod(shard.shape):
            raise ValueError(
                f"{key}: shard of shape {tuple(shard.values.shape)} at {shard.start} does not lie in a tensor of "
                f"shape {shard.shape}"
            )
        tensors[key] = {"shape": list(shard.shape), "start": shard.start, "stop": stop}
    folder.mkdir(parents=True, exist_ok=True)
    # a copy per tensor only where it is not a plain CPU one: shards are often views of one flat buffer
    values = {key: shard.values.detach().cpu().contiguous() for key, shard in shards.items()}
    path = folder / f"rank-{rank:05d}.safetensors"
    with saving_tensors(path):
        save_file(_unshared(values), path)
    index = {"world": world, "tensors": tensors}
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps(index, sort_keys=True), encoding="utf-8")


def _unshared(values: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """safetensors refuses tensors that share memory (tied weights, views of one buffer): copy the later ones."""
    seen: set[int] = set()
    result = {}
    for key, tensor in values.items():
        storage = tensor.untyped_storage().data_ptr()
        result[key] = tensor.clone() if storage in seen and tensor.numel() else tensor
        seen.add(storage)
    return result


class ShardReader:
    """Reads ranges of tensors from a folder with the files of all ranks.

    Raises:
        CheckpointError: a rank's file is missing or not readable, or ranks contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pieces: dict[str, list[Piece]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, Any] = {}
        worlds = {self._add(index) for index in sorted(folder.glob("rank-*.json"))}
        if len(worlds) != 1:
            raise CheckpointError(f"{folder}: index files of {len(worlds)} world sizes, not of one", USE_ANOTHER)
        expected = {f"rank-{rank:05d}.json" for rank in range(worlds.pop())}
        missing = sorted(expected - {path.name for path in folder.glob("rank-*.json")})
        if missing:
            raise CheckpointError(f"{folder}: {', '.join(missing)} is missing", USE_ANOTHER)
        for pieces in self._pieces.values():
            pieces.sort()

    def _add(self, index: Path) -> int:
        try:
            body = json.loads(index.read_text(encoding="utf-8"))
            for key, entry in body["tensors"].items():
                shape = tuple(int(side) for side in entry["shape"])
                if self._shapes.setdefault(key, shape) != shape:
                    raise CheckpointError(
                        f"{index}: {key} has shape {shape}, another rank says {self._shapes[key]}", USE_ANOTHER
                    )
                piece = Piece(int(entry["start"]), int(entry["stop"]), index.with_suffix(".safetensors"))
                self._pieces.setdefault(key, []).append(piece)
            return int(body["world"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a readable index ({error})", USE_ANOTHER) from error

    def keys(self) -> list[str]:
        """All tensor keys, sorted."""
        return sorted(self._shapes)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        if key not in self._shapes:
            raise CheckpointError(f"{self.folder}: no tensor {key!r}", "resume with the model that was trained")
        return self._shapes[key]

    def read(self, key: str, start: int, stop: int) -> "Tensor":
        """Elements ``start:stop`` of a flattened tensor, [stop - start], from whichever ranks hold them.

        Raises:
            CheckpointError: no such tensor or range, a gap between the ranks, or a file that is not readable.
        """
        import torch

        if not 0 <= start <= stop <= math.prod(self.shape(key)):
            raise CheckpointError(f"{self.folder}: {key} has no elements {start}:{stop}", USE_ANOTHER)
        parts = [self._slice(key, piece, first, last) for piece, first, last in self._cover(key, start, stop)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def read_all(self, key: str) -> "Tensor":
        """The whole tensor in its shape."""
        shape = self.shape(key)
        return self.read(key, 0, math.prod(shape)).reshape(shape)

    def _cover(self, key: str, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        """Pieces with the ranges to take from each, in order, that make up ``start:stop``."""
        at = start
        pieces = self._pieces[key]
        if start == stop:
            yield pieces[0], pieces[0].start, pieces[0].start
        for piece in pieces:
            if piece.start <= at < min(piece.stop, stop):
                yield piece, at, min(piece.stop, stop)
                at = min(piece.stop, stop)
        if at < stop:
            raise CheckpointError(f"{self.folder}: no rank holds element {at} of {key}", USE_ANOTHER)

    def _slice(self, key: str, piece: Piece, first: int, last: int) -> "Tensor":
        from safetensors import SafetensorError, safe_open

        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(str(piece.file), framework="pt")
            stored = self._open[piece.file].get_slice(key)
            if stored.get_shape() != [piece.stop - piece.start]:
                raise CheckpointError(f"{piece.file}: {key} has another length than its index says", USE_ANOTHER)
            return stored[first - piece.start : last - piece.start]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{piece.file}: not readable ({error})", USE_ANOTHER) from error
