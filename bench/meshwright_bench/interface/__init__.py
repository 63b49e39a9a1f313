"""`bench interface`: training steps of a Hugging Face model against ours."""
