"""The only room that moves bytes between ranks."""
