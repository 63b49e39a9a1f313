"""Updates from whole matrices: each is gathered on its owner, transformed there, and sent back.

Bucket by bucket, so that an owner holds few whole matrices at a time. Both moves of a matrix are those that `reshard`
plans between its layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.optim.contract import MatrixOptimizer, Settings, Slot
from meshwright.optim.whole_matrix import MatrixShard, WholeMatrix
from meshwright.reshard.run.shard_exchange import IndexRun
from meshwright.reshard.run_transfer import RankTransfer, Runs, transfer_many
from meshwright.reshard.transfer_plan import Move

Site = tuple[int, str]
"""A stage, and the full-model name of a parameter on it."""


def rank_moves(matrix: WholeMatrix, rank: int) -> tuple[RankTransfer, RankTransfer]:
    """Return a rank's part in gathering a matrix on its owner, and in sending the update back.

    This is its part in `plan_transfer`'s plans for these layouts, found without making them: a plan takes 0.1 s for 64
    ranks, and a large model has hundreds of matrices.
    """
    shards, owner = dict(zip(matrix.ranks, matrix.shards(), strict=True)), matrix.owner
    own, home = shards[rank], shards[owner].place
    copied = _runs(own) if rank == owner and own.elements else None
    there = [
        (sender, _runs(shard), Move(sender, owner, *shard.replica_part()))
        for sender, shard in sorted(shards.items())
        if rank in (sender, owner) and shard.place != home and shard.replica_part()[0] < shard.replica_part()[1]
    ]
    back = [
        (receiver, _runs(shard, back=True), Move(owner, receiver, 0, shard.elements))
        for receiver, shard in sorted(shards.items())
        if rank in (receiver, owner) and receiver != owner and shard.elements
    ]
    local_shape = (own.rows[1] - own.rows[0], own.columns[1] - own.columns[0])
    if rank == owner:
        gathers = RankTransfer(matrix.shape, copied, (), tuple(there))
        returns = RankTransfer(local_shape, None if copied is None else _runs(own, back=True), tuple(back), ())
        return gathers, returns
    sends = tuple((owner, runs, move) for _, runs, move in there)
    receives = tuple((owner, runs, move) for _, runs, move in back)
    return RankTransfer(None, None, sends, ()), RankTransfer(local_shape, None, (), receives)


def _runs(shard: MatrixShard, *, back: bool = False) -> Runs:
    """Return the block of a shard in the whole matrix; on the way back, the whole matrix is the sender's."""
    sides = ((start, stop - start) for start, stop in (shard.rows, shard.columns))
    return tuple((IndexRun(start, 0, size) if back else IndexRun(0, start, size),) for start, size in sides)


@dataclass(frozen=True)
class _Moved:
    """A matrix of which this rank has a shard, and the rank's part in both moves."""

    site: Site
    index: int | None
    """Index in this rank's shard of a parameter with three dims."""
    moves: tuple[RankTransfer, RankTransfer] | None
    """This rank's part in gathering the matrix and in sending the update back; None if no other rank has a shard."""


class OwnerUpdates:
    """Updates of the matrices of a rank's stages."""

    def __init__(
        self, optimizer: MatrixOptimizer, matrices: Iterable[WholeMatrix], *, rank: int, dtype: torch.dtype,
        first_index: Mapping[Site, int],
    ) -> None:  # fmt: skip
        """Plan the moves of the matrices of all stages of the pipeline rank, the same on all its ranks.

        Matrices are moved and updates computed in `dtype`. Of parameters with three dims, `first_index` is the index of
        the first matrix in this rank's shard.
        """
        self._optimizer, self._dtype = optimizer, dtype
        buckets: dict[int, list[_Moved]] = defaultdict(list)
        for one in matrices:
            if rank in one.ranks:
                site = (one.stage, one.name)
                index = None if one.index is None else one.index - first_index[site]
                moves = rank_moves(one, rank) if len(one.ranks) > 1 else None
                buckets[one.bucket].append(_Moved(site, index, moves))
        self._buckets = [buckets[number] for number in sorted(buckets)]
        self._last = {moved.site: number for number, bucket in enumerate(self._buckets) for moved in bucket}
        """The last bucket with a matrix of each parameter."""

    @torch.no_grad()
    def run(self, slots: Mapping[Site, tuple[Slot, Settings]]) -> None:
        """Update all parameters; all ranks of the stages call this together."""
        prepared: dict[Site, Tensor] = {}
        """Shards of what is transformed; matrices that are done are overwritten by their updates."""
        for number, bucket in enumerate(self._buckets):
            for moved in bucket:
                if moved.site not in prepared:
                    prepared[moved.site] = self._optimizer.prepare(*slots[moved.site]).to(self._dtype)
            shards = [(prepared[moved.site], moved.index) for moved in bucket]
            self._update(bucket, [shard if index is None else shard[index] for shard, index in shards])
            for site in [site for site in prepared if self._last[site] == number]:
                slot, settings = slots[site]
                update = prepared.pop(site)
                self._optimizer.apply(slot, update.to(slot.parameter.dtype), settings)

    def _update(self, bucket: Sequence[_Moved], shards: Sequence[Tensor]) -> None:
        """Overwrite the shards of a bucket's matrices by those of their updates."""
        shared = [place for place, moved in enumerate(bucket) if moved.moves is not None]
        there, back = ([moves[side] for moved in bucket if (moves := moved.moves)] for side in (0, 1))
        whole: list[Tensor | None] = list(shards)
        gathered = transfer_many([shards[place] for place in shared], there, like=shards[0])
        for place, matrix in zip(shared, gathered, strict=True):
            whole[place] = matrix
        updates = self._transform(whole)
        returned = transfer_many([updates[place] for place in shared], back, like=shards[0])
        for place, update in zip(shared, returned, strict=True):
            updates[place] = update
        for shard, update in zip(shards, updates, strict=True):
            assert update is not None, "every rank with a shard gets one back"
            shard.copy_(update)

    def _transform(self, whole: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the updates of the matrices that this rank has; those of one shape are transformed together."""
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for place, matrix in enumerate(whole):
            if matrix is not None:
                by_shape[matrix.shape].append(place)
        updates: list[Tensor | None] = [None] * len(whole)
        for places in by_shape.values():
            stack = torch.stack([matrix for place in places if (matrix := whole[place]) is not None])
            for place, update in zip(places, self._optimizer.transform(stack).contiguous(), strict=True):
                updates[place] = update
        return updates
