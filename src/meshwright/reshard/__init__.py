"""From one layout of a tensor to another, and operators on tensors that lie on a mesh."""
