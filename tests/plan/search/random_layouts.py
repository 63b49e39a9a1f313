"""Layouts drawn at random among those that keep all rules, and whether they fit."""

from __future__ import annotations

import random

from meshwright.plan.search.schedules import SPLIT, choices
from meshwright.settings.violation import divisors


def random_layouts(search, number, *, seed=0):
    """Draw layouts of a search that fit, each axis alone."""
    draw, pricer, found = random.Random(seed), search.pricer, []
    inners = list(search.inner_meshes())
    while len(found) < number:
        inner = draw.choice(inners)
        ranks = search.num_devices // (inner.tp * inner.cp)
        pp = draw.choice(divisors(ranks))
        schedule, chunks = draw.choice(choices(pp))
        layout = _layout(search, draw, inner, pp, schedule, chunks)
        if layout is not None and pricer.num_bytes(layout) <= pricer.capacity:
            found.append(layout)
    return found


def _layout(search, draw, inner, pp, schedule, chunks):
    from meshwright.plan.search.layout import Layout

    replicas = search.num_devices // (inner.tp * inner.cp * pp)
    batch = search.base.train.global_batch
    if pp * chunks > search.pricer.facts(inner.tp).num_layers or batch % replicas or (replicas * inner.cp) % inner.ep:
        return None
    samples = draw.choice(divisors(batch // replicas))
    number = batch // replicas // samples
    shards = draw.choice([one for one in divisors(replicas) if (one * inner.cp) % inner.ep == 0])
    if schedule == "dualpipe-v" and number < 2 * pp:
        return None
    inner = inner._replace(
        samples=samples,
        recompute=draw.choice(("none", "selective", "full")),
        compiled=schedule not in SPLIT and draw.random() < 0.5,
    )
    reshard = draw.random() < 0.5 or shards * inner.cp == 1
    return Layout(inner, pp, replicas // shards, shards, number, schedule, chunks, reshard)
