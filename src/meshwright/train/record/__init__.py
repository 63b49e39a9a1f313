"""Record a run: metrics, loss curves, the timeline of a step, and progress reports."""
