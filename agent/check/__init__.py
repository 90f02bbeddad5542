"""`elastirun check`: what each node finds about itself, what the nodes measure between them, and the verdict on each. See docs/check.md."""
