"""Run captured layers as planned: backends, static memory, weights and gradients at fixed addresses."""
