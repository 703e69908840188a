"""Files for other runtimes, and measured latency."""
