"""``elastirun chaos``: faults on a running job of this user, and a verdict on how the job goes on. See docs/chaos.md."""
