"""Benchmarks: `meshwright bench PART`, both sides in one run."""
