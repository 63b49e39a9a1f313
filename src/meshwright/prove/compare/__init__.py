"""Compare the layout with the reference: one verdict per tensor and scalar."""
