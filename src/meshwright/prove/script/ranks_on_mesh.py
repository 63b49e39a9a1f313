"""Axes of a script's layout, inferred from what its ranks recorded.

Ranks with different parameters are pipeline stages. Dims of the parameters' DeviceMesh are tensor parallel or data
parallel, by their name, or else by whether the ranks along them read the same samples. Everything else is data
parallel without a mesh, as under DDP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.mesh.axes import Axes
from meshwright.prove.script.rank_record import RankRecord

TENSOR_WORDS = ("tp", "tensor", "model", "sp")
DATA_WORDS = ("dp", "data", "fsdp", "shard", "replicate")


@dataclass(frozen=True)
class RanksOnMesh:
    """Axes, and the rank of the script at each position of the mesh (outermost axis first)."""

    axes: Axes
    order: tuple[int, ...]
    note: str = ""
    """Says which rank is which, where the script's order of axes is another."""


def ranks_on_mesh(records: Sequence[RankRecord]) -> RanksOnMesh:
    """Infer the axes of a layout; a layout that does not form a mesh counts as data parallel over all ranks."""
    num_ranks = len(records)
    stages = list(dict.fromkeys(tuple(record.parameters) for record in records))
    roles = {label: _role(label, records) for label in dict.fromkeys(label for r in records for label in r.lines)}
    shards = _indices(records, [label for label, role in roles.items() if role == "dp_shard"])
    tensors = _indices(records, [label for label, role in roles.items() if role == "tp"])
    seen: Counter[tuple[int, int, int]] = Counter()
    coordinates = []
    for record, shard, tensor in zip(records, shards, tensors, strict=True):
        stage = stages.index(tuple(record.parameters))
        coordinates.append({"pp": stage, "dp_replicate": seen[stage, shard, tensor], "dp_shard": shard, "tp": tensor})
        seen[stage, shard, tensor] += 1
    axes = Axes(**{axis: 1 + max(at[axis] for at in coordinates) for axis in coordinates[0]})
    by_position = {axes.rank(**at): rank for rank, at in enumerate(coordinates)}
    if axes.num_ranks() != num_ranks or sorted(by_position) != list(range(num_ranks)):
        return RanksOnMesh(Axes(dp_replicate=num_ranks), tuple(range(num_ranks)))
    order = tuple(by_position[position] for position in range(num_ranks))
    moved = [f"rank {at} is the script's rank {rank}" for at, rank in enumerate(order) if at != rank]
    return RanksOnMesh(axes, order, f"ranks are numbered by {axes}: {', '.join(moved)}" if moved else "")


def _indices(records: Sequence[RankRecord], labels: list[str]) -> list[int]:
    """Return each rank's position along some mesh dims, as one index."""
    positions = []
    for rank, record in enumerate(records):
        lines = [record.lines.get(label, [rank]) for label in labels]
        positions.append(tuple(line.index(rank) if rank in line else 0 for line in lines))
    known = sorted(set(positions))
    return [known.index(position) for position in positions]


def _role(label: str, records: Sequence[RankRecord]) -> str:
    words = label.lower()
    data = "dp_shard" if any(label in record.sharded for record in records) else "dp_replicate"
    if any(word in words for word in DATA_WORDS):
        return data
    lines = {tuple(record.lines[label]) for record in records if label in record.lines}
    same = all(len({str(records[rank].samples) for rank in line}) == 1 for line in lines)
    return "tp" if any(word in words for word in TENSOR_WORDS) or same else data
