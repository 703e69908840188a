"""Ring 2: one folder per capability, reached by entry points only."""
