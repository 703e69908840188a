"""Torture: sweeps are killed, frozen and starved, and their files damaged; an independent reader checks every file."""
