"""Plan executor: compiles each step to one program per rank and runs it on the local tensor."""
