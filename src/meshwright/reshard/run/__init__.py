"""Run plans: each step compiled to one rank's program, and executed on its tensor."""
