"""Benchmarks of Meshwright against alternatives: `meshwright bench PART`."""
