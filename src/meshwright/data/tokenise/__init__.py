"""Text as tokens: in batches, on all cores, and in parts that outlive a killed process."""
