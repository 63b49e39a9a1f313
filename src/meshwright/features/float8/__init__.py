"""Linear layers in float8."""
