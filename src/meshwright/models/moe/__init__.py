"""Mixture-of-experts language models: Mixtral, and models like DeepSeek-V3."""
