"""Live elasticity: worlds that change while workers keep their processes and their state."""
