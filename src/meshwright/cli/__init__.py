"""Command-line interface: thin commands on top of `meshwright.api`."""
