"""Ring 2: one folder per capability, each reached by entry points and free to be deleted."""
