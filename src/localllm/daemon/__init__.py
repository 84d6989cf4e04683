"""The long-lived process: residency, queues and the runners it supervises."""
