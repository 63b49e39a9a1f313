"""What ranks need of transformers, imported once, before they are forked, without the warnings of what it imports."""

from __future__ import annotations

from meshwright.models.hf import private

with private.quiet():
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401
