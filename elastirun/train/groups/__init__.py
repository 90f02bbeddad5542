"""Process groups, their connections, and small collectives."""
