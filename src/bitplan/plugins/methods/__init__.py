"""Further methods that choose bits: searches, relaxations, racing, and the ceiling."""
