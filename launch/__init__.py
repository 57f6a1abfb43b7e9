"""The command line, and the supervisor that runs every service on one machine."""
