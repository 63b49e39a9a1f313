"""Import what ranks need of transformers, once, before they are forked, without the warnings of its imports."""

from __future__ import annotations

from meshwright.models.hf import private

with private.quiet():
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401
