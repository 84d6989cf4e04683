"""Parsers of thinking and tool calls, by model family."""
