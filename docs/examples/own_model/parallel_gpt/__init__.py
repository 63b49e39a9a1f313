"""A family of one's own: parallel attention and MLP (GPT-J), learned positions, q/k norms, a tied head."""
