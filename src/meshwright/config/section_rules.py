"""Rules within the sections `train`, `data` and `capture`: freezing, dropout, dtypes, optimizers, documents, graphs.

Whether a source exists is checked when a run starts: a plan needs none.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.config.translate import value_named
from meshwright.data.mixtures.entries import KEY as MIXTURE
from meshwright.data.mixtures.entries import parse_mixture
from meshwright.errors import ConfigError
from meshwright.models.contract.family import DataConfig
from meshwright.optim.catalogue import BUILT_IN, KEY, OTHERS, OWN_RULE, RULE, optimizers_by_role
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.role import Role
from meshwright.settings.import_object import OBJECT_NAME
from meshwright.settings.violation import Fix, Violation, format_value
from meshwright.units import counted

FREEZE = "train.freeze"
SMALLEST_FLOAT32 = 2.0**-126
"""Smallest normal float32; devices may flush subnormal numbers to zero."""
UNREAD = {"adamw": ("momentum",), "sgd": ("beta1", "beta2", "eps")}
"""Keys of `train` that built-in optimizers don't read."""
SOURCE, TEXT, CHAT, PACKING = "data.source", "data.text_field", "data.chat_field", "data.packing"
DEFAULT_SOURCE: str = DataConfig.model_fields["source"].default
SCOPE = "capture.scope"
NAMES = ("layer", "attention", "mlp", "moe_router", "moe")
REGION = "region:"
UNAVAILABLE = {
    "moe_preprocess": "rows are sorted and counted within the scope moe, which a graph can run unless it waits for the "
    "device",
    "chunk": "FSDP2 gathers the weights of one block at a time, and models build masks on the host before their "
    "blocks; layer captures all blocks, with a launch for each",
    "full_step": "reductions, transfers and the loss run between graphs; layer captures all blocks, with a launch for "
    "each",
}
"""Scopes that other frameworks have, and why there are none of that name."""
OFF: Fix = {SCOPE: ()}


def freeze_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield globs that match no parameter, and globs that freeze all parameters."""
    names, globs = model_facts(config).parameter_names(), config.train.freeze
    for glob in globs:
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            rest = tuple(other for other in globs if other != glob)
            kept_globs = [(*rest, near[0]), *([rest] if rest else []), ()]
            what, rule = f"{FREEZE} has {glob}, which matches no parameter", "globs match parameter names such as "
            fixes = [{FREEZE: kept} for kept in kept_globs if not _match_all(kept, names)]
            yield Violation(ConfigError, what, FREEZE, rule + near[0], fixes)
    if _match_all(globs, names):
        what, rule = f"{FREEZE} leaves no parameter to train", "at least one parameter must be trained"
        yield Violation(ConfigError, what, FREEZE, rule, [{FREEZE: ()}])


def _match_all(globs: Iterable[str], names: Iterable[str]) -> bool:
    return all(any(fnmatch.fnmatchcase(name, glob) for glob in globs) for name in names)


def dropout_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if a model without dropout has some."""
    if config.train.dropout and not model_facts(config).has_dropout:
        what = f"train.dropout = {config.train.dropout:g}, but this model has no dropout"
        rule = "train.dropout applies to models whose description says so (ModelFacts.has_dropout)"
        yield Violation(ConfigError, what, "train.dropout", rule, [{"train.dropout": 0.0}])


def unread_key_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield keys not read by the family, except at their default values, as in files of saved runs."""
    for key, purpose in model_facts(config).unread.items():
        section_name, name = key.split(".")
        section = getattr(config, section_name)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            what = f"{key} = {format_value(value)} has no effect"
            rule = f"it applies to {purpose}, but model.kind is {config.model.kind}"
            otherwise = f"remove {key}, or start from a preset for {purpose}"
            yield Violation(ConfigError, what, key, rule, [{key: default}], otherwise)


def precision_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation for each epsilon that would underflow to zero and cause a division by zero."""
    if config.train.precision == "float64":
        return
    for name, section in (("train.eps", config.train), ("model.norm_eps", config.model)):
        value = getattr(section, name.split(".")[1], 1.0)
        if value < SMALLEST_FLOAT32:
            default = type(section).model_fields[name.split(".")[1]].default
            rule = f"an epsilon prevents division by zero: with train.precision = {config.train.precision} it must be "
            fixes = [{name: default}, {"train.precision": "float64"}]
            what = f"{name} = {value} is 0 in float32"
            yield Violation(ConfigError, what, name, f"{rule}at least {SMALLEST_FLOAT32:.3g}", fixes)


def optimizer_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations: states with dims that parameters lack, whole matrices that are none, keys without effect.

    Raises:
        ConfigError: there is no such optimizer, or what it says of itself is wrong.
    """
    chosen = config.train.optimizer
    if chosen not in BUILT_IN and OBJECT_NAME.fullmatch(chosen) is None:
        near = value_named(KEY, chosen) or next(iter(difflib.get_close_matches(chosen.lower(), BUILT_IN)), OTHERS)
        own = "" if near != OTHERS or value_named(KEY, chosen) else "your own by package.module:factory"
        yield Violation(ConfigError, f"unknown optimizer: {chosen}", KEY, RULE, [{KEY: near}], otherwise=own)
        return
    by_role, fixes = optimizers_by_role(chosen), [{KEY: OTHERS}]
    alike = {(one.role, len(one.shape)): name for name, one in reversed(model_facts(config).named_parameters())}
    for (role, dims), name in reversed(alike.items()):
        optimizer = by_role[role][1]
        what = f"{name} has role {role} and {counted(dims, 'dim')}, but {chosen}"
        for state, one in optimizer.states(role).items():
            if max(one.dims or (0,)) >= dims:
                yield Violation(ConfigError, f"{what} keeps {state} along dims {one.dims}", KEY, OWN_RULE, fixes)
                return
        if isinstance(optimizer, MatrixOptimizer) and dims != (3 if role is Role.EXPERTS else 2):
            rule = "a matrix has two dims, and matrices that are stacked, with role experts, three"
            yield Violation(ConfigError, f"{what} updates whole matrices", KEY, rule, fixes)
            return
    for name in UNREAD.get(chosen, ()):  # at their default values, as in files of saved runs, they are accepted
        key, value, default = f"train.{name}", getattr(config.train, name), TrainConfig.model_fields[name].default
        if value != default:
            others = " and ".join(other for other in BUILT_IN if name not in UNREAD.get(other, ()))
            what = f"{key} = {format_value(value)} has no effect"
            rule = f"it applies to {others}, but {KEY} is {chosen}"
            yield Violation(ConfigError, what, key, rule, [{key: default}])


def data_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield what is wrong with conversations, a mixture (malformed entries, or a source beside it), and packing: a
    model's attention may not know of documents."""
    data, facts = config.data, model_facts(config)
    if CHAT not in facts.unread and data.chat_field is not None:
        yield from _chat_violations(data, data.chat_field)
    if data.mixture and MIXTURE not in facts.unread:
        try:
            parse_mixture(data.mixture)
        except ConfigError as error:
            yield Violation(ConfigError, error.what, MIXTURE, error.rule, [], otherwise=error.fix)
        if data.source != DEFAULT_SOURCE:
            what = f"{SOURCE} = {format_value(data.source)}, but {MIXTURE} is set too"
            rule = f"a mixture takes the place of {SOURCE}, which keeps its default then"
            fixes: list[Fix] = [{SOURCE: DEFAULT_SOURCE}, {MIXTURE: ()}]
            otherwise = f"'<weight>:{data.source}' as an entry of {MIXTURE}"
            yield Violation(ConfigError, what, SOURCE, rule, fixes, otherwise)
    without = [kind.name for kind in facts.kinds if kind.attention is None]
    if data.packing != "none" and without and not facts.keeps_documents_apart:
        what = f"{PACKING} = {data.packing}, but blocks {without[0]} don't describe their attention"
        rule = "packed documents must not attend to each other, so a model says where its attention is "
        rule += "(KindFacts.attention)"
        off, otherwise = ([{PACKING: "none"}], "") if data.chat_field is None else ([], "a model that does")
        yield Violation(ConfigError, what, PACKING, rule, off, otherwise)


def _chat_violations(data: DataConfig, field: str) -> Iterator[Violation]:
    if data.text_field is not None:
        what = f"{TEXT} = {data.text_field} and {CHAT} = {field} are both set"
        rule = "a record is one document: a text or a conversation"
        otherwise = f"the field of texts in their entry of {MIXTURE}, as in '0.5:web/*.jsonl#{data.text_field}'"
        yield Violation(ConfigError, what, CHAT, rule, [{TEXT: None}, {CHAT: None}], otherwise)
    if data.packing != "documents":
        what = f"{CHAT} = {field}, but {PACKING} = {data.packing}"
        rule = "conversations are packed whole, so that none of them sees another"
        yield Violation(ConfigError, what, PACKING, rule, [{PACKING: "documents"}])


def capture_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `[capture]`: what CUDA graphs go together with."""
    capture, mesh, train = config.capture, config.mesh, config.train
    if not capture.scope:
        return
    found = f"{SCOPE} = {format_value(capture.scope)}"
    yield from _unknown_scopes(config)
    for axis in ("tp", "cp"):
        if getattr(mesh, axis) > 1:
            what = f"{found} with mesh.{axis} = {getattr(mesh, axis)}"
            rule = f"a graph moves no bytes between ranks, as the layers of a block do over {axis}"
            yield Violation(ConfigError, what, SCOPE, rule, [OFF, {f"mesh.{axis}": 1}])
    if train.compile and capture.backend == "simulate":
        what = f"{found} with train.compile and capture.backend = simulate"
        rule = "the simulation runs a block's operators one by one"
        eager: list[Fix] = [{"capture.backend": "eager"}, {"train.compile": False}, OFF]
        yield Violation(ConfigError, what, "capture.backend", rule, eager)
    recomputes = config.recompute.policy != "none" or bool(config.recompute.blocks)
    none: Fix = {"recompute.policy": "none", "recompute.blocks": ()}
    for name, how, is_so, undone in (
        ("train.compile", "compiled", train.compile, {"train.compile": False}),
        ("recomputation", "recomputed", recomputes, none),
    ):
        if is_so and capture.scope != ("layer",):
            fixes, rule = [{SCOPE: ("layer",)}, undone, OFF], f"a {how} block is captured as a whole"
            yield Violation(ConfigError, f"{found} with {name}", SCOPE, rule, fixes)
    if capture.backend == "cuda" and train.device == "cpu":
        what, rule = "capture.backend = cuda with train.device = cpu", "graphs are captured on a CUDA device"
        on_cuda: list[Fix] = [{"capture.backend": "simulate"}, {"train.device": "cuda"}]
        yield Violation(ConfigError, what, "capture.backend", rule, on_cuda)


def _unknown_scopes(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation for each scope that is neither a name, a region, nor a module with parameters of a block."""
    parameters = {p.name for kind in model_facts(config).kinds for p in kind.parameters}
    modules = {name.rsplit(".", depth)[0] for name in parameters for depth in range(1, name.count(".") + 1)}
    for scope in config.capture.scope:
        if scope in NAMES or scope.startswith(REGION) or any(fnmatch.fnmatchcase(name, scope) for name in modules):
            continue
        near = difflib.get_close_matches(scope, (*NAMES, *modules), n=1) or ["layer"]
        others = tuple(one for one in config.capture.scope if one != scope)
        what = f"{SCOPE} has {scope}, which is no module of a block"
        rule = f"scopes are {', '.join(NAMES)}, globs over the names of a block's modules, and {REGION}NAME"
        yield Violation(ConfigError, what, SCOPE, UNAVAILABLE.get(scope, rule), [{SCOPE: (*others, near[0])}])
