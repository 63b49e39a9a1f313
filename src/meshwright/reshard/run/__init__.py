"""Execution of plans: each step is compiled to a program per rank and run on the local tensor."""
