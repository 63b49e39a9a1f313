"""The units that a stage's parameters are gathered and reduced in: `parallel.data` makes them of modules, this predicts
them from shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from meshwright.config.schema import RunConfig
from meshwright.models.shapes import ParameterShape, Part
from meshwright.models.spec import LlamaSpec


def trained_shapes(config: RunConfig, part: Part) -> dict[ParameterShape, bool]:
    """A stage's parameters in the module's order, and whether each is trained: no glob fits its name in the whole."""
    spec = config.model.spec()
    shared = spec.shared_parameters(part.num_stages)
    keys = {name: one.key for one in shared for stage, name in one.sites if stage == part.stage}
    shapes = spec.part_parameters(part.layers, is_first=part.is_first, is_last=part.is_last)
    names = [keys.get(shape.name, shape.name) for shape in shapes]
    frozen = [any(fnmatchcase(name, glob) for glob in config.train.freeze) for name in names]
    return {shape: not is_frozen for shape, is_frozen in zip(shapes, frozen, strict=True)}


@dataclass(frozen=True)
class Unit:
    """Parameters that travel together."""

    num_elements: int
    """A rank's piece, as it is gathered: FSDP2 pads every parameter to the same number of rows on each rank."""
    num_trained: int
    """Of these, what gradients are reduced of."""
    is_freed: bool
    """After its forward, and gathered again for its backward."""
    in_backward: bool = True
    """Whether its backward needs it at all: a lookup's does not."""
    has_backward: bool = True
    """Something in it or before it is trained."""
    has_input_gradient: bool = True
    """So it is freed as soon as its own backward is over, and not with the whole stage's."""


@dataclass(frozen=True)
class _Members:
    """A unit by the names in it; those of the root are all that no other unit has."""

    prefixes: tuple[str, ...]
    is_freed: bool
    in_backward: bool = True
    is_root: bool = False

    def has(self, parameter: ParameterShape) -> bool:
        """Whether it is one of them."""
        return parameter.name.startswith(self.prefixes) is not self.is_root


def fsdp_units(config: RunConfig, part: Part) -> list[Unit]:
    """In the order in which their forwards end, so the root's comes last."""
    frees, names = config.mesh.reshard_after_forward, {shape.name for shape in trained_shapes(config, part)}
    ends = _has_units_of_ends(config, part)
    found = [_Members(("embed.",), frees, in_backward=False)] if ends and "embed.weight" in names else []
    found += [_Members((f"blocks.{layer}.",), frees) for layer in part.layers]
    found += [_Members(("norm.", "head."), is_freed=False)] if ends and "head.weight" in names else []
    taken = tuple(prefix for members in found for prefix in members.prefixes)
    root = _Members(taken, is_freed=False, is_root=True)
    return list(_units(config, part, [*found, root]))


def _has_units_of_ends(config: RunConfig, part: Part) -> bool:
    """Whether a vocabulary's two ends are units of their own, where the stage has them."""
    spec = config.model.spec()
    if not isinstance(spec, LlamaSpec) or (spec.tie_embeddings and part.is_first and part.is_last):
        return False
    return spec.vocab_size * spec.dim > (spec.params_per_layer() if part.layers else 0)


def _units(config: RunConfig, part: Part, found: list[_Members]) -> Iterable[Unit]:
    axes, parameters = config.mesh.axes(), trained_shapes(config, part)
    shapes = list(parameters)
    for members in found:
        own = [shape for shape in shapes if members.has(shape)]
        if not own:
            continue
        pieces = {shape: shape.on_rank(tp=axes.tp, dp_shard=axes.dp_shard) for shape in own}
        earlier = shapes[: shapes.index(own[0])]
        has_input_gradient = not part.is_first or any(parameters[shape] for shape in earlier)
        reached = shapes if members.is_root else own
        yield Unit(
            num_elements=sum(pieces.values()),
            num_trained=sum(pieces[shape] for shape in own if parameters[shape]),
            is_freed=members.is_freed,
            in_backward=members.in_backward,
            has_backward=has_input_gradient or any(parameters[shape] for shape in reached),
            has_input_gradient=has_input_gradient and not members.is_root,
        )
