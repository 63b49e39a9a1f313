"""Valid tables with one seeded fault each, and the error that `verify` must raise. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from meshwright.pipeline import Schedule, generate, lower
from meshwright.pipeline.lower import LowerOptions
from meshwright.pipeline.schedule_table import parse_action

TORCH_1F1B = Path(__file__).with_name("torch_1f1b.csv")
EVERYTHING = LowerOptions(reduces=True, keeps_unsharded=True, shared=((0, 3),))


class Edit:
    """A table under edit. Actions are addressed by their unique name without a slot."""

    def __init__(self, table: Schedule) -> None:
        self.table = table
        self.rows = [[str(action) for action in row] for row in table.actions]

    def find(self, name: str) -> tuple[int, int]:
        places = [(r, i) for r, row in enumerate(self.rows) for i, cell in enumerate(row) if _plain(cell) == name]
        assert len(places) == 1, (name, places)
        return places[0]

    def drop(self, *names: str) -> Edit:
        for name in names:
            rank, at = self.find(name)
            del self.rows[rank][at]
        return self

    def insert(self, cell: str, *, after: str) -> Edit:
        rank, at = self.find(after)
        self.rows[rank].insert(at + 1, cell)
        return self

    def put(self, name: str, cell: str) -> Edit:
        rank, at = self.find(name)
        self.rows[rank][at] = cell
        return self

    def move(self, name: str, *, before: str = "", after: str = "") -> Edit:
        rank, at = self.find(name)
        cell = self.rows[rank].pop(at)
        other_rank, other = self.find(before or after)
        assert other_rank == rank
        self.rows[rank].insert(other + bool(after), cell)
        return self

    def done(self, **changes) -> Schedule:
        return replace(self.table, actions=tuple(tuple(map(parse_action, row)) for row in self.rows), **changes)


def _plain(cell: str) -> str:
    return cell.split("@")[0]


@cache
def base(kind: str = "1f1b", p: int = 4, m: int = 8, options: LowerOptions | None = None) -> Schedule:
    table = generate(kind, num_stages=p, num_microbatches=m)
    return table if options is None else lower(table, options)


def lowered(kind: str = "1f1b", options: LowerOptions | None = None, **size: int) -> Edit:
    return Edit(base(kind, options=options or LowerOptions(), **size))


def sharded() -> Edit:
    return lowered(options=EVERYTHING)


@dataclass(frozen=True)
class Fault:
    """A seeded fault: the broken table, the action named by the error (n-th occurrence), and parts of the message."""

    name: str
    make: Callable[[], Schedule]
    at: str
    words: tuple[str, ...]
    nth: int = 0

    def place(self, table: Schedule) -> str:
        """Return the expected location of the error in the broken table."""
        found = [(rank, position, str(action)) for rank, row in enumerate(table.actions)
                 for position, action in enumerate(row) if _plain(str(action)) == self.at]  # fmt: skip
        rank, position, name = found[self.nth]
        return f"rank {rank}, position {position + 1}, {name}"


def both_send_first(*, apart_on: tuple[int, ...]) -> Schedule:
    """Two ranks that send before they receive; on the ranks in `apart_on` the two are not adjacent."""
    edit = lowered(p=2, m=4).move("1RECV_F1", after="1SEND_B0")
    if 0 in apart_on:
        edit.move("0FREE_OUT0", before="0RECV_B0")
    if 1 in apart_on:
        edit.move("1FREE_IN0", before="1RECV_F1")
    return edit.done()


def circle_of_three() -> Schedule:
    """Rank 1 receives from rank 2 before it sends rank 2's first dependency; all ranks deadlock."""
    return lowered("f-then-b", p=3, m=2).move("1SEND_F1", after="1RECV_B1").done()


BASES = {
    **{kind: lambda kind=kind: Edit(base(kind)) for kind in ("1f1b", "zb-h1", "zb-v")},
    "1f1b on 2": lambda: Edit(base("1f1b", p=2)),
    "lowered": lowered,
    "lowered zb-h1": lambda: lowered("zb-h1"),
    "lowered zb-v": lambda: lowered("zb-v"),
    "kept f-then-b": lambda: lowered("f-then-b", LowerOptions(release=False)),
    "sharded": sharded,
}


def fault(name: str, start: str, edits: str, at: str, *words: str, nth: int = 0) -> Fault:
    """Return the fault of a table of `BASES` after edits such as `drop 2F3; move 2F4 after 2B3`."""

    def make() -> Schedule:
        edit = BASES[start]()
        for verb, name, *where in (one.split() for one in edits.split("; ")):
            if len(where) == 2:  # move or insert … before or after …
                getattr(edit, verb)(name, **{where[0]: where[1]})
            else:
                getattr(edit, verb)(name, *where)
        return edit.done()

    return Fault(name, make, at, words, nth)


# fmt: off
COMPUTE_FAULTS = [
    fault("a forward lost", "1f1b", "drop 2F3", "2B3", "depends on 2F3", "rank 2 never runs"),
    fault("a backward lost", "1f1b", "drop 1B5", "1F5", "has no 1B5", "one F and either"),
    fault("a W lost", "zb-v", "drop 3W2", "3I2", "has no 3W2"),
    fault("an I lost", "zb-v", "drop 3I2", "3W2", "depends on 3I2"),
    fault("a forward twice", "1f1b", "insert 1F1 after 1F1", "1F1", "second time", nth=1),
    fault("a backward twice", "1f1b", "insert 0B3 after 0B3", "0B3", "second time", nth=1),
    fault("a W twice", "zb-h1", "insert 0W3 after 0W3", "0W3", "second time", nth=1),
    fault("a B beside an I and a W", "zb-h1", "insert 1B2 after 1W2", "1I2", "duplicates the work of 1B2"),
    fault("a B and a W", "1f1b", "insert 1W2 after 1B2", "1W2", "depends on 1I2"),
    fault("a backward before its forward", "1f1b", "move 3F2 after 3B2", "3B2",
          "comes before 3F2 (position 6), on which it depends"),
    fault("a W before its I", "zb-h1", "move 0W3 before 0I3", "0W3", "comes before 0I3"),
    fault("stages of one rank in the wrong order", "zb-v", "move 4F0 before 3F0", "4F0", "comes before 3F0"),
    fault("backwards of one rank in the wrong order", "zb-v", "move 4I7 after 3I7; move 4W7 after 4I7", "3I7",
          "comes before 4I7"),
    fault("a micro-batch too many", "1f1b", "put 0F7 0F8", "0F8", "micro-batch 8 of 8"),
    fault("another rank's stage", "1f1b", "put 1F2 2F2", "2F2", "is on rank 2"),
    fault("no such stage", "1f1b", "put 3F2 9F2", "9F2", "which does not exist", "use stage 3"),
    fault("ranks that wait for each other's data", "1f1b", "move 0B0 before 0F1", "0B0",
          "4 of 4 ranks deadlock: rank 0 at position 2, 0B0; rank 1 at position 2, 1F1; rank 2 at position 2, 2F1; "
          "rank 3 at position 3, 3F1",
          "1B0 (rank 1, position 4) earlier"),
    fault("an overlap of a forward with its own backward", "1f1b on 2", "put 1F3 1F3+1B3; drop 1B3", "1F3+1B3",
          "overlaps 1B3 with 1F3"),
    fault("an overlap of neighbouring stages", "zb-v", "put 4F0 3F0+4F0; drop 3F0", "3F0+4F0", "overlaps 4F0 with 3F0"),
    fault("an overlap of an I with its W", "zb-h1", "put 0I2 0I2+0W2; drop 0W2", "0I2+0W2", "overlaps 0W2 with 0I2",
          "independent"),
    Fault("PyTorch's 1F1B, whose last rank begins with micro-batch 1",
          lambda: Schedule.from_csv(TORCH_1F1B.read_text(), where="torch_1f1b.csv"), "3B0",
          ("depends on 3F0, which rank 3 never runs", "3F0 before position 2")),
]
TRANSFER_FAULTS = [
    fault("a send lost", "lowered", "drop 1SEND_F2", "2RECV_F2", "has no matching 1SEND_F2 on rank 1"),
    fault("a receive lost", "lowered", "drop 1RECV_B2", "2SEND_B2", "has no matching 1RECV_B2 on rank 1"),
    fault("both ends lost", "lowered", "drop 1SEND_F2; drop 2RECV_F2; drop 2FREE_IN2", "2F2",
          "uses an input that is not available yet", "2RECV_F2"),
    fault("a gradient sent twice", "lowered", "insert 2SEND_B3 after 2SEND_B3", "2SEND_B3", "second time", nth=1),
    fault("a send before its computation", "lowered", "move 1SEND_F2 before 1F2", "1SEND_F2",
          "comes before 1F2, which computes the tensor to send"),
    fault("a gradient's send before its computation", "lowered zb-h1", "move 1SEND_B0 before 1I0", "1SEND_B0",
          "comes before 1B0 or 1I0, which computes the tensor to send"),
    fault("a receive after its use", "lowered", "move 2RECV_F3 after 2F3", "2F3", "is not available yet",
          "2RECV_F3 before position"),
    fault("a transfer within a rank", "lowered zb-v", "insert 3SEND_F0 after 3F0", "3SEND_F0",
          "which is also on rank 3"),
    fault("a send off the end", "lowered", "insert 3SEND_F0 after 3F0", "3SEND_F0", "stage 4 does not exist"),
    fault("micro-batches swapped at the receiving end", "kept f-then-b", "move 1RECV_F2 before 1RECV_F1", "0SEND_F1",
          "would be received as 0SEND_F2", "SEND_Fs from rank 0 to rank 1 are received in send order"),
    fault("micro-batches swapped at the sending end", "kept f-then-b", "move 1SEND_F3 after 1SEND_F4", "1SEND_F4",
          "would be received as 1SEND_F3"),
    Fault("two ranks that send before they receive", lambda: both_send_first(apart_on=(0, 1)), "0SEND_F1",
          ("2 of 2 ranks deadlock: rank 0 at position", "0SEND_F1; rank 1 at position",
           "1SEND_B0", "a send blocks until its receive is reached")),
    Fault("a send deferred past a receive that depends on it", circle_of_three, "1RECV_B0",
          ("deadlock", "rank 1 at position", "rank 2 at position")),
    fault("an overlap with a transfer", "lowered", "drop 1F1; put 1RECV_F2 1F1+1RECV_F2", "1F1+1RECV_F2",
          "overlaps 1RECV_F2", "only computations can overlap"),
]
MEMORY_FAULTS = [
    fault("a receive without a slot", "lowered", "put 2RECV_F1 2RECV_F1", "2RECV_F1", "has no buffer slot"),
    fault("a stale buffer", "lowered", "put 2RECV_F1 2RECV_F1@0", "2RECV_F1",
          "fills slot 0, which 2RECV_F0@0 has occupied"),
    fault("an input freed before its forward", "lowered", "move 1FREE_IN2 before 1F2", "1F2",
          "uses an input that was freed at position"),
    fault("an input freed before its backward", "lowered", "move 1FREE_IN2 before 1B2", "1B2",
          "uses an input that was freed at position"),
    fault("an input freed before its W", "lowered zb-h1", "move 2FREE_IN2 before 2W2", "2W2",
          "uses an input that was freed at position"),
    fault("a gradient freed before its use", "lowered", "move 1FREE_GRAD2 before 1B2", "1B2",
          "uses a gradient that was freed at position"),
    fault("a gradient freed before its W", "lowered zb-h1", "move 1FREE_GRAD2 before 1W2", "1W2",
          "uses a gradient that was freed at position"),
    fault("an output freed before it is sent", "lowered", "move 1FREE_OUT2 before 1SEND_F2", "1SEND_F2",
          "uses an output that was freed at position"),
    fault("an input freed twice", "lowered", "insert 1FREE_IN2 after 1FREE_IN2", "1FREE_IN2", "second time", nth=1),
    fault("something freed that was never there", "lowered", "insert 0FREE_IN2 after 0B2", "0FREE_IN2",
          "frees an input that is not held", "does not cross ranks"),
    fault("a gradient freed before it comes", "lowered", "move 1FREE_GRAD2 before 1RECV_B2", "1FREE_GRAD2",
          "frees a gradient that is not held", "1RECV_B2 does not precede it"),
    fault("an input never freed", "lowered", "drop 3FREE_IN7", "3RECV_F7", "an input that is never freed"),
    fault("a gradient never freed", "lowered", "drop 0FREE_GRAD7", "0RECV_B7", "a gradient that is never freed"),
    fault("an output never freed", "lowered", "drop 0FREE_OUT5", "0F5", "an output that is never freed"),
    fault("an input's gradient freed before it is sent", "lowered", "move 2FREE_IN_GRAD2 before 2SEND_B2", "2SEND_B2",
          "uses the gradient of an input that was freed at position"),
    fault("an input's gradient freed before its I", "lowered zb-h1", "move 2FREE_IN_GRAD2 before 2I2", "2FREE_IN_GRAD2",
          "the gradient of an input that is not held", "2I2 does not precede"),
    fault("an input's gradient freed on the first stage", "lowered", "insert 0FREE_IN_GRAD2 after 0B2",
          "0FREE_IN_GRAD2", "the gradient of an input that is not held", "does not cross ranks"),
    fault("an input's gradient never freed", "lowered", "drop 1FREE_IN_GRAD7", "1B7",
          "the gradient of an input that is never freed"),
]
STAGE_FAULTS = [
    fault("parameters never gathered", "sharded", "drop 1UNSHARD", "1RESHARD", "not unsharded"),
    fault("parameters gathered late", "sharded", "move 1UNSHARD after 1F1", "1F0",
          "parameters of stage 1 while they are sharded"),
    fault("parameters freed early", "sharded", "move 1RESHARD before 1B7", "1B7",
          "parameters of stage 1 while they are sharded"),
    fault("parameters never freed", "sharded", "drop 1RESHARD", "1UNSHARD", "never resharded"),
    fault("parameters gathered twice", "sharded", "insert 1UNSHARD after 1F2", "1UNSHARD",
          "been unsharded since position", nth=1),
    fault("gradients reduced early", "sharded", "move 2REDUCE before 2B7", "2REDUCE",
          "before the last backward of stage 2"),
    fault("gradients reduced twice", "sharded", "insert 2REDUCE after 2REDUCE", "2REDUCE", "reduces a second time",
          nth=1),
    fault("gradients never reduced", "sharded", "drop 2REDUCE", "2B7", "no 2REDUCE follows"),
    fault("shared gradients synced early", "sharded", "move 0SYNC_SHARED before 0B7", "0SYNC_SHARED",
          "before the last backward of stage 0"),
    fault("shared gradients synced before they are reduced", "sharded", "move 3SYNC_SHARED before 3REDUCE",
          "3SYNC_SHARED", "is not preceded by 3REDUCE"),
    fault("shared gradients synced twice", "sharded", "insert 0SYNC_SHARED after 0SYNC_SHARED", "0SYNC_SHARED",
          "appears 2 times, but other ranks sync 1 times"),
    fault("shared gradients synced on one rank only", "sharded", "drop 0SYNC_SHARED", "3SYNC_SHARED",
          "appears 1 times, but other ranks sync 0 times"),
    fault("a transfer after the shared gradients", "sharded",
          "move 3SEND_B7 after 3SYNC_SHARED; move 3FREE_IN_GRAD7 after 3SEND_B7", "3SEND_B7",
          "comes after 3SYNC_SHARED", "could deadlock"),
]
# fmt: on
FAULTS = [*COMPUTE_FAULTS, *TRANSFER_FAULTS, *MEMORY_FAULTS, *STAGE_FAULTS]
