"""The HTTP surface of the daemon."""
