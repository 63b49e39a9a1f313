"""The proof: a layout computes the same losses, gradients and parameters as one device, with evidence."""
