"""Another node takes over the store when its host is lost. Pure."""
