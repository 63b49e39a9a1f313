"""Any causal language model of Hugging Face's transformers, from its configuration alone."""
