"""What the daemon and a runner say to each other."""
