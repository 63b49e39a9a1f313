"""Example of a custom model family: parallel attention and MLP (GPT-J), learned positions, q/k norms, tied head."""
