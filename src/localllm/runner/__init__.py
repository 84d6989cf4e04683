"""One process per resident model: the engine."""
