"""What tests share: gangs of worker processes."""
