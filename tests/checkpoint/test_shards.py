"""Any split of the state over ranks reads back as any other."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from fathom.checkpoint.shards import FlatShard, ShardReader, write_shards
from fathom.errors import CheckpointError, StorageError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def split(values: torch.Tensor, cuts: list[int]) -> list[tuple[int, torch.Tensor]]:
    edges = [0, *sorted(cuts), values.numel()]
    flat = values.reshape(-1)
    return [(a, flat[a:b]) for a, b in itertools.pairwise(edges)]


@st.composite
def states(draw):
    world = draw(st.integers(1, 5))
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        size = math.prod(shape)
        cuts = draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1))
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.arange(number * 1000, number * 1000 + size).to(dtype).reshape(shape)
        tensors[f"param/layers.{number}.weight"] = (values, cuts)
    return world, tensors


@settings(max_examples=60, deadline=None)
@given(state=states(), data=st.data())
def test_any_range_of_any_split(state, data, tmp_path_factory):
    world, tensors = state
    folder = tmp_path_factory.mktemp("shards")
    for rank in range(world):
        mine = {}
        for key, (values, cuts) in tensors.items():
            start, part = split(values, cuts)[rank]
            mine[key] = FlatShard(part, tuple(values.shape), start)
        write_shards(folder, rank, world, mine)
    reader = ShardReader(folder)
    assert reader.keys() == sorted(tensors)
    for key, (values, _) in tensors.items():
        assert reader.shape(key) == tuple(values.shape)
        whole = reader.read_all(key)
        assert whole.dtype == values.dtype and torch.equal(whole, values)
        start = data.draw(st.integers(0, values.numel()))
        stop = data.draw(st.integers(start, values.numel()))
        got = reader.read(key, start, stop)
        assert got.dtype == values.dtype and torch.equal(got, values.reshape(-1)[start:stop])


def test_replicated_and_overlapping_ranges(tmp_path):
    values = torch.arange(10.0)
    write_shards(tmp_path, 0, 2, {"a": FlatShard(values[:7], (10,), 0), "b": FlatShard(values, (2, 5), 0)})
    write_shards(tmp_path, 1, 2, {"a": FlatShard(values[3:], (10,), 3), "b": FlatShard(values, (2, 5), 0)})
    reader = ShardReader(tmp_path)
    assert torch.equal(reader.read("a", 2, 9), values[2:9])
    assert torch.equal(reader.read_all("b"), values.reshape(2, 5))


def test_a_gap_is_an_error(tmp_path):
    write_shards(tmp_path, 0, 1, {"a": FlatShard(torch.ones(4), (10,), 0)})
    reader = ShardReader(tmp_path)
    assert reader.read("a", 0, 4).tolist() == [1.0] * 4
    with pytest.raises(CheckpointError, match="no rank holds element 4 of a"):
        reader.read("a", 0, 5)
    with pytest.raises(CheckpointError, match="no elements 0:11"):
        reader.read("a", 0, 11)
    with pytest.raises(CheckpointError, match="no tensor 'c'"):
        reader.read("c", 0, 1)


def test_a_missing_rank_is_an_error(tmp_path):
    write_shards(tmp_path, 1, 2, {"a": FlatShard(torch.ones(4), (4,), 0)})
    with pytest.raises(CheckpointError, match=r"rank-00000\.json is missing"):
        ShardReader(tmp_path)
    with pytest.raises(CheckpointError, match="0 world sizes"):
        ShardReader(tmp_path / "empty")


def test_ranks_that_contradict_each_other(tmp_path):
    write_shards(tmp_path, 0, 2, {"a": FlatShard(torch.ones(4), (4,), 0)})
    write_shards(tmp_path, 1, 2, {"a": FlatShard(torch.ones(4), (2, 2), 0)})
    with pytest.raises(CheckpointError, match="shape"):
        ShardReader(tmp_path)
    write_shards(tmp_path, 1, 3, {"a": FlatShard(torch.ones(4), (4,), 0)})
    with pytest.raises(CheckpointError, match="2 world sizes"):
        ShardReader(tmp_path)


@pytest.mark.parametrize("body", ["", "{", "[]", '{"world": 1}', '{"world": 1, "tensors": {"a": {}}}'])
def test_a_broken_index(tmp_path, body):
    write_shards(tmp_path, 0, 1, {"a": FlatShard(torch.ones(4), (4,), 0)})
    (tmp_path / "rank-00000.json").write_text(body)
    with pytest.raises(CheckpointError, match="rank-00000"):
        ShardReader(tmp_path)


def test_values_that_do_not_match_their_index(tmp_path):
    write_shards(tmp_path, 0, 1, {"a": FlatShard(torch.ones(4), (4,), 0)})
    index = json.loads((tmp_path / "rank-00000.json").read_text())
    index["tensors"]["a"]["stop"] = 3
    (tmp_path / "rank-00000.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="another length"):
        ShardReader(tmp_path).read("a", 0, 3)
    (tmp_path / "rank-00000.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="not readable"):
        ShardReader(tmp_path).read("a", 0, 3)


@pytest.mark.parametrize(
    "shard",
    [FlatShard(torch.ones(2, 2), (4,), 0), FlatShard(torch.ones(4), (4,), 1), FlatShard(torch.ones(4), (4,), -1)],
)
def test_shards_outside_their_tensor(tmp_path, shard):
    with pytest.raises(ValueError, match="a: shard"):
        write_shards(tmp_path, 0, 1, {"a": shard})


def test_views_of_one_buffer_and_parameters(tmp_path):
    buffer = torch.nn.Parameter(torch.arange(8.0))
    write_shards(
        tmp_path,
        0,
        1,
        {"a": FlatShard(buffer[:4], (4,), 0), "b": FlatShard(buffer[4:], (4,), 0), "c": FlatShard(buffer, (8,), 0)},
    )
    reader = ShardReader(tmp_path)
    assert torch.cat([reader.read_all("a"), reader.read_all("b")]).tolist() == reader.read_all("c").tolist()
    assert reader.read_all("c").tolist() == list(map(float, range(8)))


def test_a_full_disk_is_said_to_be_full(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(StorageError, match="no space left in"):
        write_shards(tmp_path, 0, 1, {"a": FlatShard(torch.zeros(4), (4,), 0)})
