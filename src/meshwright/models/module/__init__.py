"""The family `module`: any module of your own that turns token ids into logits, without a description."""
