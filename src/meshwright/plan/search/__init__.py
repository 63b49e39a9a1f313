"""Find the layout of a run on given devices: candidates, what excludes them, their prices, and the best in words."""
