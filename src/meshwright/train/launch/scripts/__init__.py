"""Scripts that start a run on a cluster: an sbatch script, a Kubernetes JobSet, or torchrun's command lines."""
