"""Import what ranks need of transformers, once, before they are forked, without the warnings of its imports."""

from __future__ import annotations

from importlib.util import find_spec

from meshwright.models.hf import private

with private.quiet():
    import transformers.models.auto.modeling_auto

    # It imports torchao where that is installed, which asks for the device's properties: after the fork, then.
    if find_spec("torchao") is None:
        import transformers.modeling_utils  # noqa: F401
