"""Record runs: metrics, loss curves, step timelines and progress reports."""
