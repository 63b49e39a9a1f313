"""Report of runs: one HTML page that needs no network, made from run folders."""
