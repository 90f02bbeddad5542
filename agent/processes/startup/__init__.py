"""A folder for the beginning of ``PYTHONPATH`` of workers that Python runs: its ``sitecustomize`` runs before their script."""
