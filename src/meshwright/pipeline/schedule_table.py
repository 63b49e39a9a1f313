"""Pipeline schedule as a table of actions per rank, and its serialization as JSON and CSV.

Generators emit compute only; `lower` adds communication, frees, sharding and buffer slots; `verify`, `simulate` and
`draw` accept both; `execute` runs a lowered table and contains no policy. A single stage on one rank is plain gradient
accumulation, `F0 B0 F1 B1 …`, so every step takes the same path, and the verified table is what runs.

JSON holds the full table, and CSV, which can be written by hand, the compute actions. A CSV has one line per rank and
one action per cell, `0F0,0F1,0B0,0B1`. Empty cells and lines starting with `#` are ignored, and so is PyTorch's
`0REDUCE_GRAD`, since `lower` adds reductions. Compute-only tables written by `torch.distributed.pipelining` can be
read, with its overlaps, `(0F3;3B1)OVERLAP_F_B`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import (
    BACKWARDS,
    COMPUTE,
    NO_MICROBATCH,
    RECVS,
    STAGE_LEVEL,
    Action,
    ActionKind,
    K,
    Overlap,
)

FORMAT = "meshwright pipeline table 1"
CELL = re.compile(r"([0-9]{1,9})([A-Z][A-Z_]*?)([0-9]{1,9})?(?:@([0-9]{1,9}))?")
TORCH_REDUCE = re.compile(r"[0-9]+REDUCE_GRAD")
TORCH_OVERLAP = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
ALMOST_A_CELL = re.compile(r"(?<![0-9])([0-9]{1,9})[\s_:]*([FBIW])[\s_:]*([0-9]{1,9})(?![0-9])")
BY_NAME = {kind.value: kind for kind in ActionKind}
SOME_CELL = "stage, kind and micro-batch, such as 2F3"
CELL_RULE = (
    "a cell is stage, kind and micro-batch, such as 2F3, with kind F, B, I or W; overlapping actions are joined by +"
)


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule: the ordered actions of each rank."""

    kind: str
    """Name of the schedule: a `ScheduleKind`, or the name from a file."""
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action | Overlap, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """Return the maximum number of stages per rank."""
        return max(self.stage_ranks.count(rank) for rank in range(self.num_ranks))

    @cached_property
    def is_lowered(self) -> bool:
        """Return True if the table has been lowered, i.e. contains more than compute."""
        return any(action.kind not in COMPUTE for _, _, action in self.positions())

    @cached_property
    def splits_backward(self) -> bool:
        """Return True if any backward is split into I and W."""
        return any(action.kind is K.BACKWARD_WEIGHT for _, _, action in self.positions())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on `rank`, in model order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def is_transfer(self, stage: int) -> bool:
        """Return True if `stage` sends its output because the next stage is on another rank."""
        return 0 <= stage < self.num_stages - 1 and self.stage_ranks[stage] != self.stage_ranks[stage + 1]

    def send_after(self, part: Action) -> Action | None:
        """Return the send of what an action computes; None if it is not needed on another rank."""
        if part.kind is K.FORWARD and self.is_transfer(part.stage):
            return Action(K.SEND_FORWARD, part.stage, part.microbatch)
        if part.kind in BACKWARDS and self.is_transfer(part.stage - 1):
            return Action(K.SEND_BACKWARD, part.stage, part.microbatch)
        return None

    def positions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield rank, position and action for each action; both actions of an overlap have the same position."""
        for rank, actions in enumerate(self.actions):
            for position, action in enumerate(actions):
                for part in action.parts():
                    yield rank, position, part

    def compute_only(self) -> Schedule:
        return replace(
            self,
            actions=tuple(
                tuple(action for action in actions if action.parts()[0].kind in COMPUTE) for actions in self.actions
            ),
        )

    def fingerprint(self) -> str:
        """Return a hash of the full table, for comparison across ranks."""
        rows = "\n".join(" ".join(map(str, actions)) for actions in self.actions)
        text = f"{self.kind} {self.num_microbatches} {self.stage_ranks}\n{rows}"
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Serialize the full table; `from_json` is the inverse."""
        table = {"format": FORMAT, "kind": self.kind, "num_microbatches": self.num_microbatches}
        rows = [" ".join(map(str, row)) for row in self.actions]
        return json.dumps({**table, "stage_ranks": list(self.stage_ranks), "actions": rows}, indent=1)

    @staticmethod
    def from_json(source: str, *, where: str = "JSON") -> Schedule:
        """Parse a table written by `to_json`.

        Raises:
            ScheduleError: `source` is not a pipeline table; the message locates the error.
        """
        try:
            table = json.loads(source)
            if not isinstance(table, dict) or table.get("format") != FORMAT:
                raise ScheduleError("not a pipeline table", where=where, rule=f"format must be {FORMAT!r}")
            actions = tuple(
                tuple(
                    _at(parse_action, cell, f"{where}, rank {n}, action {i}") for i, cell in enumerate(row.split(), 1)
                )
                for n, row in enumerate(table["actions"])
            )
            stage_ranks = tuple(map(int, table["stage_ranks"]))
            return Schedule(str(table["kind"]), int(table["num_microbatches"]), stage_ranks, actions)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"not a pipeline table: {type(error).__name__}: {error}"
            raise ScheduleError(what, where=where, rule="written by Schedule.to_json") from error

    def to_csv(self) -> str:
        """Serialize the compute actions, one line per rank and one cell per action."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.compute_only().actions)

    @staticmethod
    def from_csv(source: str, *, where: str = "CSV", kind: str = "csv") -> Schedule:
        """Parse a hand-written table of compute actions.

        Raises:
            ScheduleError: a cell is not an action (the message gives line and column), or a stage lacks a unique rank.
        """
        rows: list[tuple[Action | Overlap, ...]] = []
        for number, line in enumerate(source.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            row, column = [], 1
            for cell in line.split(","):
                text = cell.strip()
                if text and not TORCH_REDUCE.fullmatch(text):
                    place = f"{where}, line {number}, column {column + len(cell) - len(cell.lstrip())}"
                    row.append(_at(_parse_compute, text, place))
                column += len(cell) + 1
            rows.append(tuple(row))
        if not any(rows):
            rule = "one line per rank, one cell per action: 0F0,0F1,0B0,0B1"
            raise ScheduleError("no actions", where=where, rule=rule)
        parts = [(rank, part) for rank, row in enumerate(rows) for action in row for part in action.parts()]
        num_microbatches = 1 + max(part.microbatch for _, part in parts)
        return Schedule(kind, num_microbatches, _stage_ranks(parts, where), tuple(rows))


def single_stage(num_microbatches: int) -> Schedule:
    """Return the schedule of a single rank that holds the full model: plain gradient accumulation."""
    kinds = (K.FORWARD, K.BACKWARD)
    actions = tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in kinds)
    return Schedule("one stage", num_microbatches, (0,), (actions,))


def parse_action(cell: str) -> Action | Overlap:
    """Parse the string form of an action.

    Raises:
        ScheduleError: `cell` is not an action.
    """
    of_torch = TORCH_OVERLAP.fullmatch(cell)
    first, plus, second = of_torch.expand(r"\1+\2").partition("+") if of_torch else cell.partition("+")
    if plus:
        return Overlap(_parse_single(first, cell), _parse_single(second, cell))
    return _parse_single(first, cell)


def _stage_ranks(parts: list[tuple[int, Action]], where: str) -> tuple[int, ...]:
    owners: dict[int, int] = {}
    for rank, part in parts:
        if owners.setdefault(part.stage, rank) != rank:
            raise ScheduleError(
                f"stage {part.stage} is on rank {owners[part.stage]} and on rank {rank} ({part})",
                where=where,
                rule="a stage is on one rank; line n of the file is rank n-1",
                fix=f"move {part} to the line of rank {owners[part.stage]}",
            )
    missing = next(stage for stage in count() if stage not in owners)
    if missing < len(owners):
        raise ScheduleError(
            f"stage {missing} is missing, but stage {max(owners)} is present",
            where=where,
            rule="stages are numbered consecutively from 0, in model order",
            fix=f"add the actions of stage {missing}, or renumber the stages",
        )
    return tuple(owners[stage] for stage in sorted(owners))


def _at(parse: Callable[[str], Action | Overlap], cell: str, place: str) -> Action | Overlap:
    try:
        return parse(cell)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=place, rule=error.rule, fix=error.fix) from None


def _parse_compute(cell: str) -> Action | Overlap:
    action = parse_action(cell)
    for part in action.parts():
        if part.kind not in COMPUTE:
            raise ScheduleError(
                f"{cell} is not a computation",
                rule="a CSV contains compute actions only; lowering adds the others",
                fix=f"remove {part}",
            )
    return action


def _parse_single(text: str, cell: str) -> Action:
    match = CELL.fullmatch(text.strip())
    kind = BY_NAME.get(match[2]) if match else None
    if match is None or kind is None:
        raise ScheduleError(f"{cell!r} is not an action", rule=CELL_RULE, fix=_suggestion(cell))
    if (match[3] is None) is not (kind in STAGE_LEVEL) or (match[4] is not None and kind not in RECVS):
        right = f"{match[1]}{match[2]}{'' if kind in STAGE_LEVEL else match[3]}"
        needs_microbatch = match[3] is None and kind not in STAGE_LEVEL
        fix = f"{cell} with its micro-batch, such as 2F3" if needs_microbatch else cell.replace(text, right)
        raise ScheduleError(f"{cell!r} is not an action", rule=CELL_RULE, fix=fix)
    microbatch = NO_MICROBATCH if match[3] is None else int(match[3])
    return Action(kind, int(match[1]), microbatch, None if match[4] is None else int(match[4]))


def _suggestion(text: str) -> str:
    """Return the valid cells closest to `text` if they hold all that it does; else what a cell is."""
    upper = text.upper()
    found = ["".join(parts) for parts in ALMOST_A_CELL.findall(upper)]
    rest = ALMOST_A_CELL.sub("", upper).replace("OVERLAP_F_B", "").replace("OVERLAP", "")
    if not found or re.search("[A-Z0-9]", rest):
        return SOME_CELL
    overlap = len(found) == 2 and re.search(r"[+(]|OVERLAP", upper)
    return ("+" if overlap else ",").join(found)
