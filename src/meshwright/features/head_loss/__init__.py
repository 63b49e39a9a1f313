"""Output head and loss by chunks of tokens, without logits."""
