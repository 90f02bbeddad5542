"""The data-parallel module, as its users and torch see it."""
