"""Context parallelism: the tokens of each rank, what it must receive, and the cheaper method. Doesn't import torch."""
