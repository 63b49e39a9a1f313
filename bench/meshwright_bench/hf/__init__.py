"""`bench hf`: training steps of a Hugging Face model against ours."""
