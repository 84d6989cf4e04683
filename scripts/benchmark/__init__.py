"""What scripts/bench runs."""
