"""API keys: who may use the daemon, for what and how much of it, and who has used how much."""
