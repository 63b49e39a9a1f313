"""Plan verifier: checks data movement, memory and stated cost."""
