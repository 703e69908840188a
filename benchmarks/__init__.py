"""Side-by-side measurements: A and B in turn in one process, reported as ratios. Never imported by the package."""
